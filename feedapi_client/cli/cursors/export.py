"""``feedapi cursors export``: write positions as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from feedapi_client.cli.common.errors import CommandError
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
        _write(output, text + "\n")


def _write(output: Path, text: str) -> None:
    """Write the file as a whole, or leave it as it was. Raises `CommandError`."""
    # Not beside a device or a link, which a rename would replace.
    plain = not output.exists() or (output.is_file() and not output.is_symlink())
    target = output.with_name(f".{output.name}.{os.getpid()}.tmp") if plain else output
    try:
        with target.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if plain:
                os.fsync(file.fileno())
        if plain:
            target.replace(output)
    except OSError as error:
        if plain:
            target.unlink(missing_ok=True)
        raise CommandError(f"{output}: nothing was exported: {error.strerror}") from None
