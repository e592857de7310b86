"""``feedapi cursors import``: store exported positions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import BesideInstances, StorePlace, Yes
from feedapi_client.errors import FeedError

if TYPE_CHECKING:
    from feedapi_client.model import FeedKey, Position
    from feedapi_client.operations import FeedPositions

    Feeds = dict[FeedKey, dict[int, Position]]

_STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class CursorsImport:
    """Options of ``feedapi cursors import``."""

    source: Annotated[
        str, typer.Argument(metavar="FILE", help="What 'export' printed; - for stdin.")
    ]
    place: StorePlace
    force: BesideInstances = False
    yes: Yes = False


def cursors_import(options: CursorsImport) -> None:
    """Make exported positions the current ones. Those of other partitions stay.

    A store that does not exist is created.
    """
    from feedapi_client.operations import parse_export

    stdin = options.source == _STDIN
    text = sys.stdin.buffer.read() if stdin else Path(options.source).read_bytes()
    try:
        feeds = parse_export(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not options.yes and not stdin and (count := run_async(_count, options, feeds)):
        typer.confirm(
            f"{count} positions are there already and will be replaced. Go on?", abort=True
        )
    for feed in run_async(_import, options, feeds):
        report(f"{shown_line(feed.key)}: {len(feed.positions)} positions imported")


async def _count(options: CursorsImport, feeds: Feeds) -> int:
    from feedapi_client.cli.databases import is_gap
    from feedapi_client.operations import count_replaced

    count = 0
    async with options.place.open(create=True) as store:
        for key, positions in feeds.items():
            try:
                count += await count_replaced(store, {key: positions})
            except FeedError as error:
                if not is_gap(error):  # what is left can't be read, and is replaced
                    raise
    return count


async def _import(options: CursorsImport, feeds: Feeds) -> list[FeedPositions]:
    from feedapi_client.operations import import_positions

    async with options.place.open(create=True) as store:
        return await import_positions(store, feeds, force=options.force)
