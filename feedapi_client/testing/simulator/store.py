"""A transactional database in memory, with cursors and effects, that fails and is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_predecessor
from feedapi_client.stores.memory_leases import MemoryLeases
from feedapi_client.testing.simulator.clock import in_drawn_order, sleep, staggered
from feedapi_client.testing.simulator.trace import Trace


class ConnectionLostError(Exception):
    """The database's connection broke: before the commit took effect, or after it."""


class Effect(NamedTuple):
    """What a process of the application did with one event."""

    entity: int
    n: int
    partition: int
    process: int = 0
    quarantined: bool = False


OnSave = Callable[[Mapping[int, Position], Mapping[int, Position]], None]

STALL_SECONDS = 60.0
"""The longest time that an operation takes while the database stalls."""


class Database:
    """What is durable: positions, and effects in the order in which they took effect.

    Arguments:
        random: decides how long an operation takes, and which one fails.
        latency: the longest time that an operation takes, in seconds.
        reply_latency: the longest time from a save's effect until it returns.
        on_effect: is called with each effect when it becomes durable.
    """

    def __init__(
        self,
        *,
        random: Random,
        latency: float,
        reply_latency: float = 0.0,
        trace: Trace,
        on_effect: Callable[[Effect], None],
    ) -> None:
        self.positions: dict[FeedKey, dict[int, Position]] = {}
        self.leases = MemoryLeases()
        self.locks: dict[tuple[FeedKey, int], Transaction] = {}
        """The rows that open transactions of several instances have changed."""
        self.now = trace.now
        self.note = trace.add
        self.failing = 0.0
        """The part of the operations that fail; half of the failed saves take effect before."""
        self.failures = 0
        self.stalled_until = 0.0
        self.on_first_save: Callable[[], None] | None = None
        self._random = random
        self._latency = latency
        self._reply_latency = reply_latency
        self._trace = trace
        self._on_effect = on_effect

    async def operation(self) -> None:
        """Take the time of a round trip, or fail."""
        await sleep(self._random.uniform(0.0, self._latency))
        if self._trace.now() < self.stalled_until:
            self.failures += 1  # a save that is given up may fence the next one
            await sleep(self._random.uniform(0.0, STALL_SECONDS))
        if not in_drawn_order():
            await staggered(self._random)
        if self._random.random() < self.failing / 2:
            self.failures += 1
            self._trace.add("the database fails")
            raise ConnectionLostError

    def apply(self, changes: Mapping[tuple[FeedKey, int], Position], effects: list[Effect]) -> None:
        """Make changes durable, all of them or none.

        Raises:
            FencedError: a stored revision is not the predecessor of the one to be saved.
        """
        for (feed, partition), position in changes.items():
            self.check(feed, partition, position)
        if changes and not self.positions and self.on_first_save is not None:
            self.on_first_save()
        for (feed, partition), position in changes.items():
            self.positions.setdefault(feed, {})[partition] = position
            self._trace.add("saved {}: {}", partition, position)
        for effect in effects:
            self._on_effect(effect)

    def check(self, feed: FeedKey, partition: int, position: Position) -> None:
        """Raise `FencedError` unless the stored revision is the one before the position's."""
        stored = self.positions.get(feed, {}).get(partition)
        check_predecessor(feed, partition, position, None if stored is None else stored.revision)

    async def reply(self) -> None:
        """Take the time of an answer to a save that took effect, or fail."""
        if self._reply_latency:
            await sleep(self._random.uniform(0.0, self._reply_latency))
        else:
            await sleep(0.0)
        self.lose_reply()

    def lose_reply(self) -> None:
        """Fail after an operation took effect, sometimes."""
        if self._random.random() < self.failing / 2:
            self.failures += 1
            self._trace.add("the database's reply is lost")
            raise ConnectionLostError


class Session:
    """The connections of one process to the database: a `CursorStore`.

    A process that was killed is `dead`: whatever it still does has no effect.
    """

    def __init__(self, database: Database) -> None:
        self.dead = False
        self.on_save: OnSave | None = None
        """Is called with what is about to be saved outside of a transaction, and what is stored."""
        self._database = database

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await self.operation()
        return dict(self._database.positions.get(feed, {}))

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`."""
        changes = {(feed, partition): position for partition, position in positions.items()}
        if transaction is not None:
            await transaction.save(changes)
            return
        await self.operation()
        if self.on_save is not None:
            self.on_save(positions, self._database.positions.get(feed, {}))
        self._database.apply(changes, [])
        await self._database.reply()

    def transaction(self) -> Transaction:
        """Begin a transaction of the application."""
        return Transaction(self)

    def apply_at_once(self, effects: list[Effect]) -> None:
        """Make effects durable in a transaction of their own, for an application without one."""
        if not self.dead:
            self._database.apply({}, effects)

    async def operation(self) -> None:
        """Take the time of a round trip, or fail. A process that is gone always does."""
        await self._database.operation()
        if self.dead:
            raise StoreError("simulated: the process is gone")


class Transaction:
    """A transaction: nothing is durable before `commit`."""

    def __init__(self, session: Session) -> None:
        self.effects: list[Effect] = []
        self.quarantined: list[Effect] = []
        self._session = session
        self._changes: dict[tuple[FeedKey, int], Position] = {}

    async def save(self, changes: Mapping[tuple[FeedKey, int], Position]) -> None:
        """Save positions in this transaction. Raises `FencedError`."""
        await self._session.operation()
        for (feed, partition), position in changes.items():
            self._session._database.check(feed, partition, position)
        self._changes.update(changes)

    def close(self) -> None:
        """Roll back what was not committed."""

    async def commit(self) -> None:
        """Make everything durable, or nothing.

        Raises:
            ConnectionLostError: the connection broke, perhaps after the commit took effect.
            FencedError: another transaction saved one of the positions meanwhile.
        """
        await self._session.operation()
        self._session._database.apply(self._changes, self._in_order())
        await self._session._database.reply()

    def _in_order(self) -> list[Effect]:
        """Return the effects, with the quarantined events in their places among them.

        They became durable at once: an order between the two doesn't exist.
        """
        effects = list(self.effects)
        for event in self.quarantined:
            later = (
                place
                for place, effect in enumerate(effects)
                if effect.entity == event.entity and effect.n > event.n
            )
            effects.insert(next(later, len(effects)), event)
        return effects
