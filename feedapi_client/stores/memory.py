"""Cursors in memory: for tests, and for programs that start from the beginning each time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import anyio.lowlevel

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    check_predecessor,
    check_storable,
    replace_positions,
)
from feedapi_client.stores.memory_leases import MemoryLeases
from feedapi_client.stores.moving import check_moves, moved_positions


class MemoryCursorStore(MemoryLeases, Closable):
    """Keeps positions for as long as the object lives.

    It takes part in no transaction. It keeps leases, too (`LeaseStore`), for several consumers in
    one process. It must not be used from several threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._feeds: dict[FeedKey, dict[int, Position]] = {}

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        return dict(self._feeds.get(feed, {}))

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. Raises `StoreError` if a transaction is given."""
        if transaction is not None:
            raise StoreError(
                "MemoryCursorStore can't take part in a transaction: "
                "use a store in the database that the effects go to",
                feed=feed.url,
            )
        await anyio.lowlevel.checkpoint_if_cancelled()
        check_storable(feed, positions)
        stored = self._feeds.get(feed, {})
        for partition, position in positions.items():
            found = stored.get(partition)
            check_predecessor(feed, partition, position, None if found is None else found.revision)
        if positions:
            self._feeds.setdefault(feed, {}).update(positions)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        return sorted(self._feeds, key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        stored = self._feeds.get(feed, {})
        for partition in list(stored) if partitions is None else partitions:
            stored.pop(partition, None)
        if not stored:
            self._feeds.pop(feed, None)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        return await replace_positions(self, feed, positions)

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)
        await anyio.lowlevel.checkpoint_if_cancelled()
        moved = {
            new: moved_positions(
                new, self._feeds[old], self._feeds.get(new, {}), overwrite=overwrite
            )
            for old, new in keys.items()
            if old in self._feeds
        }
        for old, new in keys.items():
            if new in moved:
                del self._feeds[old]
                self._feeds[new] = dict(moved[new])
        return moved

    def __repr__(self) -> str:
        positions = sum(map(len, self._feeds.values()))
        return f"<MemoryCursorStore: {len(self._feeds)} feeds, {positions} positions>"
