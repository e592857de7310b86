"""``feedapi cursors export``: write positions as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from feedapi_client.cli.common.escape import escape_json
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.export_format import dump
from feedapi_client.cli.cursors.feed_positions import load_feeds
from feedapi_client.cli.cursors.selection import Selection


def export_positions(selection: Selection, output: Path | None) -> None:
    """Write the chosen positions to a file, or to stdout."""
    text = dump(run_async(load_feeds, selection))
    if output is None:
        print(escape_json(text, sys.stdout.encoding))
    else:
        output.write_text(text + "\n", encoding="utf-8")
