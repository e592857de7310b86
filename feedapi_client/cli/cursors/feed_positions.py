"""Load the stored positions of feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feedapi_client.cli.cursors.selection import Selection, no_such_positions
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.moving import cursors_elsewhere, keys_elsewhere

if TYPE_CHECKING:
    from feedapi_client.cli.cursors.lag import LagLookup


@dataclass(frozen=True, slots=True)
class FeedPositions:
    """The positions of one feed and consumer, and how far behind each partition is.

    `lag` is None when the feed was not asked. It also has the partitions without a position.
    """

    key: FeedKey
    positions: Mapping[int, Position]
    lag: Mapping[int, str] | None = None

    def partitions(self) -> list[int]:
        """Return the ids of all partitions that are stored or listed."""
        return sorted(self.positions.keys() | (self.lag or {}).keys())


async def _elsewhere(
    store: AdministrableStore, selection: Selection, lookup: LagLookup | None
) -> str:
    """Return a hint at cursors of the feed under another origin, "" when there are none."""
    if lookup is None:
        return ""
    key = FeedKey(lookup.url, selection.choice.name or "default")
    found = await keys_elsewhere(store, key)
    return cursors_elsewhere(found[0], key.url) if found else ""


async def load_feeds(selection: Selection, lookup: LagLookup | None = None) -> list[FeedPositions]:
    """Load the positions of the chosen feeds. With `lookup`, only those of its feed, with lags.

    Raises `CommandError` when a choice is given and nothing of it is stored.
    """
    async with selection.open() as store:
        keys = [
            key for key in await selection.feeds(store) if lookup is None or lookup.is_of_feed(key)
        ]
        if not keys and (lookup is not None or selection.choice):
            raise no_such_positions(await _elsewhere(store, selection, lookup))
        feeds = [FeedPositions(key, await store.load(key)) for key in keys]
    if lookup is None:
        return feeds
    return [
        FeedPositions(feed.key, feed.positions, await lookup.lag(feed.key, feed.positions))
        for feed in feeds
    ]
