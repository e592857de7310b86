"""``feedapi cursors upgrade``: convert what an earlier version stored."""

from __future__ import annotations

from dataclasses import dataclass

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.reporting import report
from feedapi_client.cli.store_options import BesideInstances, Chosen, Filters, StorePlace


@dataclass(frozen=True, kw_only=True)
class CursorsUpgrade:
    """Options of ``feedapi cursors upgrade``."""

    place: StorePlace
    chosen: Chosen
    filter: Filters = None
    force: BesideInstances = False


async def cursors_upgrade(options: CursorsUpgrade) -> None:
    """Convert cursors that version 0.1.0 stored to the format of this version.

    Stop the consumers first. Of all feeds and consumers, or of the chosen ones; a Liftbridge stream
    does not name its feed in that format, so it needs --feed URL and --name.
    """
    from feedapi_client.operations import upgrade

    chosen = options.chosen
    async with options.place.open() as store:
        exact = chosen.exact_key(options.filter)
        keys = (
            [key for key in await store.feeds() if chosen.matches(key, options.filter)]
            if exact is None
            else [exact]
        )
        upgraded = await upgrade(store, keys, force=options.force)
    if not upgraded:
        report("nothing is stored in an earlier format: nothing was changed")
    for feed in upgraded:
        report(f"{shown_line(feed.key)}: {len(feed.positions)} positions were converted")
