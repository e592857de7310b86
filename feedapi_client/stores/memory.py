"""Cursors in memory: for tests, and for programs that start from the beginning each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import anyio.lowlevel

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    check_replaces,
    check_storable,
    replace_positions,
)
from feedapi_client.stores.done import Claim, DoneEvent, already_done, claimed_anew
from feedapi_client.stores.done_scripts import new_claim
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
        self._claims: dict[tuple[FeedKey, int], int] = {}
        self._done: dict[tuple[FeedKey, int], set[str]] = {}

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        return dict(self._feeds.get(feed, {}))

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. Raises `StoreError` if a transaction is given."""
        _check_no_transaction(feed, transaction)
        await anyio.lowlevel.checkpoint_if_cancelled()
        check_storable(feed, positions)
        stored = self._feeds.get(feed, {})
        for partition, position in positions.items():
            check_replaces(feed, partition, position.replaces, stored.get(partition))
        if positions:
            self._feeds.setdefault(feed, {}).update(positions)

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        found = self._feeds.get(feed, {}).get(partitions[0])
        check_replaces(feed, partitions[0], revision or None, found)
        number = new_claim()
        done: dict[str, int] = {}
        for partition in partitions:
            self._claims[feed, partition] = number
            done |= dict.fromkeys(self._done.get((feed, partition), ()), partition)
        return Claim(number, done)

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`. Raises `StoreError` if a transaction is given."""
        _check_no_transaction(feed, transaction)
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._claims.get((feed, event.partition)) != event.claim:
            raise claimed_anew(feed, event.partition)
        done = self._done.setdefault((feed, event.partition), set())
        if event.id in done:
            raise already_done(feed, event.partition)
        done.add(event.id)

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        return event.id in self._done.get((feed, event.partition), ())

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`. Raises `StoreError` if a transaction is given."""
        await self.save(feed, positions, transaction=transaction)
        for partition, ids in passed.items():
            self._done.get((feed, partition), set()).difference_update(ids)

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
            self._forget(feed, [partition])
        if not stored:
            self._feeds.pop(feed, None)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        replaced = await replace_positions(self, feed, positions)
        self._forget(feed, positions)
        return replaced

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
                for kept in (self._claims, self._done):
                    _move(kept, old, new)
        return moved

    def _forget(self, feed: FeedKey, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self._done.pop((feed, partition), None)
            self._claims.pop((feed, partition), None)

    def __repr__(self) -> str:
        positions = sum(map(len, self._feeds.values()))
        return f"<MemoryCursorStore: {len(self._feeds)} feeds, {positions} positions>"


def _check_no_transaction(feed: FeedKey, transaction: Any) -> None:
    if transaction is not None:
        raise StoreError(
            "MemoryCursorStore can't take part in a transaction: "
            "use a store in the database that the effects go to",
            feed=feed.url,
        )


def _move(kept: dict[tuple[FeedKey, int], Any], old: FeedKey, new: FeedKey) -> None:
    for feed, partition in [key for key in kept if key[0] in (old, new)]:
        value = kept.pop((feed, partition))
        if feed == old:
            kept[new, partition] = value
