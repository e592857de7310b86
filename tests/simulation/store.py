"""A transactional database in memory, with cursors and effects, that fails and is slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import anyio
import orjson

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.stores.base import CursorStore, check_replaces, held_elsewhere
from feedapi_client.stores.done import Claim, DoneEvent, already_done, claimed_anew
from feedapi_client.stores.sqlite import MemoryCursorStore
from tests.simulation.clock import in_drawn_order, sleep, staggered
from tests.simulation.trace import Trace


class ConnectionLostError(Exception):
    """The database's connection broke: before the commit took effect, or after it."""


class Effect(NamedTuple):
    """What a process of the application did with one event."""

    entity: int
    n: int
    partition: int
    process: int = 0
    quarantined: bool = False


OnSave = Callable[[Mapping[int, Position], Mapping[int, Position], float], None]

_LOCK_PAUSE = 0.01
STALL_SECONDS = 60.0
"""The longest time that an operation takes while the database stalls."""


class SimulatedDatabase:
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
        self.done: dict[tuple[FeedKey, int], set[str]] = {}
        """What is done ahead of the cursors."""
        self.readers: dict[tuple[FeedKey, int], int] = {}
        """Under which claim it may be done."""
        self.doers: dict[tuple[FeedKey, int], set[Transaction]] = {}
        """The open transactions that have done something of a partition, and hold its claim."""
        self.leases = MemoryCursorStore()
        """Keeps leases, and no positions."""
        self.locks: dict[tuple[FeedKey, int], Transaction] = {}
        """The rows that open transactions of several instances have changed."""
        self.claims: dict[tuple[FeedKey, int], StoreSession] = {}
        """The leases that are about to be claimed, and by whom."""
        self.now = trace.now
        self.note = trace.add
        self.failing = 0.0
        """The part of the operations that fail; half of the failed saves take effect before."""
        self.failures = 0
        self.stalled_until = 0.0
        self.generation = 0
        """How often the database failed over. A transaction of an earlier one is gone."""
        self.on_apply: Callable[[], None] | None = None
        """Is called when something is about to become durable."""
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
            FencedError: a stored revision is not the one that is to be replaced.
        """
        for (feed, partition), position in changes.items():
            self.check(feed, partition, position)
        if changes and not self.positions and self.on_first_save is not None:
            self.on_first_save()
        if self.on_apply is not None:
            self.on_apply()
        for (feed, partition), position in changes.items():
            self.positions.setdefault(feed, {})[partition] = position
            self._trace.add("saved {}: {}", partition, position)
        for effect in effects:
            self._on_effect(effect)

    def check(self, feed: FeedKey, partition: int, position: Position) -> None:
        """Raise `FencedError` unless the stored revision is the one that is to be replaced."""
        stored = self.positions.get(feed, {}).get(partition)
        check_replaces(feed, partition, position.replaces, stored)

    def check_done(self, feed: FeedKey, event: DoneEvent) -> None:
        """Raise what `DoneStore.done` raises, if the event can't be done."""
        if self.readers.get((feed, event.partition)) != event.claim:
            raise claimed_anew(feed, event.partition)
        if event.id in self.done.get((feed, event.partition), ()):
            raise already_done(feed, event.partition)

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


class StoreSession:
    """The connections of one process to the database: a `CursorStore`.

    A process that was killed is `dead`: whatever it still does has no effect.
    """

    def __init__(self, database: SimulatedDatabase) -> None:
        self.dead = False
        self.lock_seconds = 0.0
        """How long a statement waits for a locked row; 0: for ever."""
        self.on_save: OnSave | None = None
        """Is called with what is about to be saved, what is stored, and when the save began."""
        self.known: dict[int, Position] = {}
        """The positions that the process has loaded, or saved since."""
        self._database = database

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await self.operation()
        self.known = dict(self._database.positions.get(feed, {}))
        return dict(self.known)

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Any = None,
        passed: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """See `CursorStore.save`, and `save_passing` for what is `passed`."""
        changes = {(feed, partition): position for partition, position in positions.items()}
        if transaction is not None:
            await transaction.save(changes)
            return
        began = anyio.current_time()
        await self.operation()
        await self.wait_for(changes)
        self.apply(changes, [], began)
        for partition, ids in (passed or {}).items():
            self._database.done.get((feed, partition), set()).difference_update(ids)
        await self._database.reply()

    # ------------------------------------------------------------------ DoneStore

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
        await self.operation()
        database, rows = self._database, [(feed, partition) for partition in partitions]
        await self._wait_for_doers(rows)
        database.check(feed, partitions[0], Position("", replaces=revision or None))
        number = max(database.readers.values(), default=0) + 1
        database.readers.update(dict.fromkeys(rows, number))
        database.note("claimed {} as {}", partitions, number)
        await self.operation()
        database.check(feed, partitions[0], Position("", replaces=revision or None))
        done: dict[str, int] = {}
        for row in rows:
            done |= dict.fromkeys(database.done.get(row, ()), row[1])
        return Claim(number, done)

    async def _wait_for_doers(self, rows: Collection[tuple[FeedKey, int]]) -> None:
        doers, began = self._database.doers, self._database.now()
        while any(not each._session.dead for row in rows for each in doers.get(row, ())):
            bound = self.lock_seconds
            if 0.0 < bound < self._database.now() - began:
                feed, partition = next(iter(rows))
                raise held_elsewhere(feed, partition, bound)
            await sleep(_LOCK_PAUSE)

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`."""
        if transaction is not None:
            await transaction.done(feed, event)
            return
        await self.operation()
        self._database.check_done(feed, event)
        self._database.done.setdefault((feed, event.partition), set()).add(event.id)
        await self._database.reply()

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        await self.operation()
        return event.id in self._database.done.get((feed, event.partition), ())

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`. Not in a transaction."""
        assert transaction is None
        await self.save(feed, positions, passed=passed)

    async def wait_for(self, rows: Collection[tuple[FeedKey, int]]) -> None:
        """Wait until none of the rows is locked. Nobody locks any where one process runs."""

    def transaction(self) -> Transaction:
        """Begin a transaction of the application."""
        return Transaction(self)

    def apply(
        self,
        changes: Mapping[tuple[FeedKey, int], Position],
        effects: list[Effect],
        began: float,
    ) -> None:
        """Make changes durable whose save has begun then. See `SimulatedDatabase.apply`."""
        positions = {partition: position for (_, partition), position in changes.items()}
        if positions and self.on_save is not None:
            feed, _ = next(iter(changes))
            self.on_save(positions, self._database.positions.get(feed, {}), began)
        self._database.apply(changes, effects)
        self.known |= positions

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

    def __init__(self, session: StoreSession) -> None:
        self.effects: list[Effect] = []
        self.quarantined: list[Effect] = []
        self._session = session
        self._generation = session._database.generation
        self._changes: dict[tuple[FeedKey, int], Position] = {}
        self._began = 0.0
        self._done: list[tuple[tuple[FeedKey, int], str]] = []

    async def done(self, feed: FeedKey, event: DoneEvent) -> None:
        """Remember an event in this transaction, which holds the claim of its partition."""
        await self._session.operation()
        self._check_connection()
        database, row = self._session._database, (feed, event.partition)
        database.check_done(feed, event)
        if (row, event.id) in self._done:
            raise already_done(feed, event.partition)
        database.doers.setdefault(row, set()).add(self)
        self._done.append((row, event.id))

    async def save(self, changes: Mapping[tuple[FeedKey, int], Position]) -> None:
        """Save positions in this transaction. Raises `FencedError`."""
        self._began = anyio.current_time()
        await self._session.operation()
        self._check_connection()
        for (feed, partition), position in changes.items():
            self._session._database.check(feed, partition, position)
        self._changes.update(changes)

    def close(self) -> None:
        """Roll back what was not committed."""
        for row, _ in self._done:
            self._session._database.doers.get(row, set()).discard(self)
        self._done.clear()

    async def commit(self) -> None:
        """Make everything durable, or nothing.

        Raises:
            ConnectionLostError: the connection broke, perhaps after the commit took effect.
            FencedError: another transaction saved one of the positions meanwhile.
        """
        await self._session.operation()
        self._check_connection()
        self._session.apply(self._changes, self._in_order(), self._began)
        for row, id in self._done:
            self._session._database.done.setdefault(row, set()).add(id)
        await self._session._database.reply()

    def _check_connection(self) -> None:
        if self._generation != self._session._database.generation:
            raise ConnectionLostError

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


class _Alone(Transaction):
    """One that holds a single save, and is committed with it."""

    async def save(self, changes: Mapping[tuple[FeedKey, int], Position]) -> None:
        """See `Transaction.save`."""
        await super().save(changes)
        with anyio.CancelScope(shield=True):
            await self.commit()


class SimulatedQuarantine:
    """A `QuarantineStore` in the same database: it joins the transactions of cursors and effects.

    An event in it counts as one that took effect: it was not lost.
    """

    def __init__(self, session: StoreSession) -> None:
        self._session = session

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`."""
        await self._session.operation()

    def along(self, cursors: CursorStore, events: Sequence[QuarantinedEvent]) -> Transaction | None:
        """Return a transaction that commits itself with the save of a cursor."""
        if cursors is not self._session:
            return None
        transaction = _Alone(self._session)
        transaction.quarantined += map(_quarantined_effect, events)
        return transaction

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        await self._session.operation()
        effects = [_quarantined_effect(event) for event in events]
        if transaction is None:
            self._session.apply_at_once(effects)
        else:
            transaction.quarantined += effects

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """Return nothing: no simulated operator looks."""
        return []

    async def get(self, id: str) -> QuarantinedEvent | None:
        """Return None."""
        return None

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """Remove nothing."""
        return 0


def _quarantined_effect(event: QuarantinedEvent) -> Effect:
    payload = orjson.loads(event.raw)
    return Effect(payload["entity"], payload["n"], event.partition, quarantined=True)
