"""Escape text from elsewhere before a terminal shows it, as text or as JSON."""

from __future__ import annotations

import re
import sys
from typing import Any

MAX_SHOWN = 200
"""Characters of a text from a publisher or a file that are shown."""
_MAX_LINE = 2000

_JSON_ESCAPED = re.compile(r"[^\n -~]")


def one_line(text: str) -> str:
    """Return the text on one line, without any character that a terminal would act upon.

    Backslashes stay as they are, so that a text that is escaped already is not escaped twice.
    """
    return "".join(map(_escaped, " ".join(text.split())))


def shown(text: object, limit: int = MAX_SHOWN) -> str:
    """Return a text from a publisher or a file as a message may show it: escaped, and cut."""
    # Cut first: a text of many megabytes takes seconds to escape.
    line = one_line(str(text)[: limit + 1])
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shown_line(text: object) -> str:
    """Return a whole line of output, escaped. Cut far later than `shown` does."""
    return shown(text, _MAX_LINE)


def escape_json(text: str, encoding: str | None) -> str:
    r"""Return JSON that means the same, with ``\u`` escapes for what can't be shown.

    These are the characters that are not printable, and those that `encoding` does not have.
    """
    if text.isascii() and _JSON_ESCAPED.search(text) is None:
        return text
    unicode = (encoding or "").lower().replace("-", "").replace("_", "").startswith("utf")
    return _JSON_ESCAPED.sub(
        lambda found: found[0] if unicode and found[0].isprintable() else _json_escape(found[0]),
        text,
    )


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode("ascii")


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def to_json(value: Any, encoding: str | None = "utf-8") -> str:
    """Return a value as indented JSON without control characters, see `escape_json`."""
    import orjson

    return escape_json(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), encoding)


def print_json(value: Any) -> None:
    """Print a value as indented JSON that stdout can encode and a terminal does not act upon."""
    print(to_json(value, sys.stdout.encoding))
