"""Print JSON."""

from __future__ import annotations

import sys
from typing import Any

import orjson

from feedapi_client.cli.common.escape import escape_json


def to_json(value: Any, encoding: str | None = "utf-8") -> str:
    """Return a value as indented JSON without control characters, see `escape_json`."""
    return escape_json(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), encoding)


def print_json(value: Any) -> None:
    """Print a value as indented JSON that stdout can encode and a terminal does not act upon."""
    print(to_json(value, sys.stdout.encoding))
