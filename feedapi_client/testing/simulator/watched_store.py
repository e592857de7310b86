"""An application's own store in a simulated history: it is slow, it fails, and it is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from feedapi_client.causes import causes
from feedapi_client.errors import FencedError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.simulator.oracle import Oracle
from feedapi_client.testing.simulator.store import (
    ConnectionLostError,
    SimulatedDatabase,
    StoreSession,
)

Saved = Callable[[int, Position], None]


class Killed(BaseException):
    """The process is gone. Not an `Exception`, because no handler of errors runs in such a case."""


class StoredPositions:
    """What a store must hold, by what it was told, over all lives of the process.

    Whether a save took effect is open when it failed, was cancelled, or was a part of a transaction
    whose end was not seen. The next `load` decides.

    Arguments:
        store: the application's.
        database: keeps the positions that the store must hold, and decides what fails.
        oracle: gets the violations.
        saved: is called with each position that became durable.
    """

    def __init__(
        self, store: CursorStore, database: SimulatedDatabase, oracle: Oracle, saved: Saved
    ) -> None:
        self.store = store
        self.database = database
        self._saved = saved
        self._oracle = oracle
        self._open: list[tuple[FeedKey, dict[int, Position]]] = []

    def of(self, feed: FeedKey) -> dict[int, Position]:
        """Return the positions that the store must hold, without the open ones."""
        return self.database.positions.get(feed, {})

    def began(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        """Record a save whose outcome is open."""
        self._open.append((feed, dict(positions)))

    def succeeded(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        """Record that a save is durable."""
        undecided = self._overlapping(feed, positions)
        self._open = [entry for entry in self._open if entry[1] not in undecided]
        changes = {(feed, partition): position for partition, position in positions.items()}
        try:
            self.database.apply(changes, [])
        except FencedError as error:
            if undecided in ([], [positions]):
                self._violated(f"a save was accepted that has to be refused: {error}")
            self.database.positions.setdefault(feed, {}).update(positions)
        for partition, position in positions.items():
            self._saved(partition, position)

    def refused(self, feed: FeedKey, positions: Mapping[int, Position], error: FencedError) -> None:
        """Record that the store refused a save."""
        self._open.remove((feed, dict(positions)))
        if self._overlapping(feed, positions):
            return  # an earlier save may have gone through
        try:
            for partition, position in positions.items():
                self.database.check(feed, partition, position)
        except FencedError:
            return
        self._violated(f"a save was refused that has to be accepted: {error}")

    def loaded(self, feed: FeedKey, found: Mapping[int, Position]) -> None:
        """Check what the store returned, and decide what was open."""
        for key, group in self._open:
            if key == feed:
                self._decide(feed, group, found)
        self._open = [entry for entry in self._open if entry[0] != feed]
        expected = self.of(feed)
        for partition in sorted(expected.keys() | found.keys()):
            if expected.get(partition) != found.get(partition):
                self._violated(
                    f"partition {partition} was saved as {expected.get(partition)}, and loaded as "
                    f"{found.get(partition)}. If the handler saves it in a transaction: was that "
                    "committed before the handler returned?",
                )

    async def probe(self, feed: FeedKey, found: Mapping[int, Position]) -> None:
        """Try to save a position that is out of date, beside one that is not."""
        if not found:
            return
        *others, last = sorted(found)
        stale = Position.after(None, found[last].cursor, found[last].status)
        refused = {p: found[p].advance() for p in others[:1]} | {last: stale}
        try:
            await self.store.save(feed, refused)
        except FencedError:
            if others and await self.store.load(feed) != found:
                self._violated("a save was refused, and a part of it took effect")
        else:
            self._violated(
                f"a save of partition {last} was accepted as its first one, although revision "
                f"{found[last].revision} is stored: two consumers would not be noticed"
            )

    def _overlapping(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> list[dict[int, Position]]:
        """Return the open saves of these partitions."""
        return [
            group for key, group in self._open if key == feed and positions.keys() & group.keys()
        ]

    def _violated(self, text: str) -> None:
        self._oracle.violated("store", text)

    def _decide(
        self, feed: FeedKey, group: dict[int, Position], found: Mapping[int, Position]
    ) -> None:
        known = self.of(feed)
        through = {p: new for p, new in group.items() if found.get(p) == new != known.get(p)}
        if not through:
            return
        if len(through) < len(group):
            self._violated(
                f"only a part of a save took effect, of the partitions {sorted(through)}"
            )
        self.database.positions.setdefault(feed, {}).update(through)
        for partition, position in through.items():
            self._saved(partition, position)


class WatchedStore(StoreSession):
    """The connection of one process to the application's store: a `CursorStore`."""

    def __init__(self, positions: StoredPositions) -> None:
        super().__init__(positions.database)
        self._positions = positions
        self._joined: dict[tuple[FeedKey, int], Position] = {}

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await self.operation()
        found = await self._positions.store.load(feed)
        self._positions.loaded(feed, found)
        await self._positions.probe(feed, found)
        return found

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Any = None,
        passed: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """See `CursorStore.save`."""
        assert not passed, "the application handles batches"
        store = self._positions.store
        if transaction is not None:
            # Without a pause: SQLite has one writer at a time, and it would keep others waiting.
            self._check_alive()
            self._database.lose_reply()
            self._positions.began(feed, positions)
            try:
                await store.save(feed, positions, transaction=transaction)
            except FencedError as error:
                self._positions.refused(feed, positions, error)
                raise
            self._joined |= {(feed, partition): new for partition, new in positions.items()}
            return
        await self.operation()
        self._positions.began(feed, positions)
        try:
            await store.save(feed, positions)
        except FencedError as error:
            self._positions.refused(feed, positions, error)
            raise
        self._positions.succeeded(feed, positions)
        await self._database.reply()

    def joined(self, partition: int) -> None:
        """The handler returned: what it saved in its own transaction is durable."""
        for key in [key for key in self._joined if key[1] == partition]:
            self._positions.succeeded(key[0], {partition: self._joined.pop(key)})

    async def operation(self) -> None:
        """Take the time of a round trip, or fail. In a process that is gone nothing goes on."""
        self._check_alive()
        await self._database.operation()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise Killed


def is_simulated(error: BaseException | None) -> bool:
    """Return whether an error goes back to a failure that the simulation has caused."""
    return any(isinstance(each, (ConnectionLostError, Killed)) for each in causes(error))
