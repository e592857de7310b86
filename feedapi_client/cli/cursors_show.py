"""``feedapi cursors show``: show the positions of one consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feedapi_client.cli.feed_options import Json
from feedapi_client.cli.store_options import Chosen, Filters, StorePlace

if TYPE_CHECKING:
    from feedapi_client.operations import FeedPositions


@dataclass(frozen=True, kw_only=True)
class CursorsShow:
    """Options of ``feedapi cursors show``."""

    place: StorePlace
    chosen: Chosen
    filters: Filters = None
    json: Json = False


def cursors_show(options: CursorsShow) -> None:
    """Show the positions of one feed and consumer: an error where the choice leaves several."""
    from feedapi_client.cli.cursors_ls import print_export, print_feed
    from feedapi_client.cli.reporting import run_async

    feed = run_async(_load, options)
    if options.json:
        print_export([feed])
    else:
        print_feed(feed)


async def _load(options: CursorsShow) -> FeedPositions:
    from feedapi_client.operations import FeedPositions

    async with options.place.open() as store:
        key = await options.chosen.one_feed(store, options.filters)
        return FeedPositions(key, await store.load(key))
