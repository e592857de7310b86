"""``feedapi cursors rename``: keep the cursors of a consumer that has another name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.reporting import report
from feedapi_client.cli.store_options import BesideInstances, StorePlace


@dataclass(frozen=True, kw_only=True)
class CursorsRename:
    """Options of ``feedapi cursors rename``."""

    old_name: Annotated[str, typer.Argument(metavar="OLD", help="The name so far.")]
    new_name: Annotated[str, typer.Argument(metavar="NEW", help="The name from now on.")]
    place: StorePlace
    feed: Annotated[
        str | None,
        typer.Option("--feed", metavar="URL", help="Only of this feed, or a part of its URL."),
    ] = None
    force: BesideInstances = False


async def cursors_rename(options: CursorsRename) -> None:
    """Keep the cursors of a consumer that gets another name. Stop it first.

    Of all its feeds, or of one (--feed), in one step or not at all.
    """
    from feedapi_client.operations import rename

    old, new = options.old_name, options.new_name
    if not new or old == new:
        raise typer.BadParameter("NEW must be another name, and not empty")
    async with options.place.open() as store:
        renamed = await rename(store, old, new, feed=options.feed, force=options.force)
    for feed in renamed:
        report(f"{shown_line(feed.key)}: {len(feed.positions)} positions have this name now")
