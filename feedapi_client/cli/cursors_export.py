"""``feedapi cursors export``: write positions as JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from feedapi_client.cli.reporting import CommandError, run_async
from feedapi_client.cli.store_options import Chosen, StorePlace


@dataclass(frozen=True, kw_only=True)
class CursorsExport:
    """Options of ``feedapi cursors export``."""

    place: StorePlace
    chosen: Chosen
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout."),
    ] = None


def cursors_export(options: CursorsExport) -> None:
    """Print positions as JSON that 'import' reads, into this or another store."""
    from feedapi_client.cli.cursors_ls import CursorsLs, positions_and_lags, print_export
    from feedapi_client.cli.feed_options import Connection
    from feedapi_client.operations import export_positions

    chosen = CursorsLs(place=options.place, chosen=options.chosen, connection=Connection())
    feeds = run_async(positions_and_lags, chosen)
    if options.output is None:
        print_export(feeds)
    else:
        _write(options.output, export_positions(feeds) + b"\n")


def _write(output: Path, text: bytes) -> None:
    """Write the file as a whole, or leave it as it was. Raises `CommandError`."""
    # Not beside a device or a link, which a rename would replace.
    plain = not output.exists() or (output.is_file() and not output.is_symlink())
    target = output.with_name(f".{output.name}.{os.getpid()}.tmp") if plain else output
    try:
        with target.open("wb") as file:
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
