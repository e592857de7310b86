"""Several instances that share the feed: leases beside the cursors, and what happens to instances.

A process that is frozen neither handles anything nor reaches the database, as after SIGSTOP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.options import Share
from feedapi_client.stores.leases import Lease, View
from tests.simulation.clock import sleep
from tests.simulation.knowledge import Knowledge
from tests.simulation.scenario import (
    LEASE_SECONDS,
    Scenario,
    Settings,
    Step,
    Way,
)
from tests.simulation.store import SimulatedDatabase, StoreSession, Transaction

_LOCK_PAUSE = 0.01


def share(number: int, settings: Settings) -> Share:
    """Return the options of one process. Its name decides about its place among the instances."""
    return Share(
        instance=f"process {number:06}",
        lease_seconds=settings.lease,
        rebalance_seconds=settings.rebalance,
        handover_seconds=settings.handover,
    )


def shared(scenario: Scenario, instances: int) -> Scenario:
    """Return the scenario with several instances, of which each may come to grief."""
    random = Random(f"instances {scenario.seed}")
    settings = replace(
        scenario.settings,
        instances=instances,
        careless=False,
        mixed=random.random() < 0.3,
        lock_seconds=random.choice((0.0, 3.0)),
    )
    if settings.manners.rate and settings.give_up_after is not None:
        # They divide what a publisher grants, and one that starts may be refused for any time.
        settings = replace(settings, give_up_after=None)
    steps: list[Step] = []
    for step in scenario.steps:
        if step.do == "life_step":
            how = {**step.how, "which": random.randrange(instances)}
            steps.append(replace(step, how=how))
        elif step.do != "second":  # which has the name of an instance, and no share
            steps.append(step)
    for _ in range(random.randint(0, 3)):
        seconds = random.choice((2.0, 1.2 * LEASE_SECONDS, 3 * LEASE_SECONDS))
        how = {"what": "freeze", "seconds": seconds, "which": random.randrange(instances)}
        step = Step(round(3 * random.random(), 3), "life_step", how)
        steps.insert(random.randint(1, len(steps)), step)
    # Drawn apart, so that the seeds without them stay what they were.
    random = Random(f"hand-overs {scenario.seed}")
    if random.random() < 0.5:
        settings, steps = _with_hand_overs(random, settings, steps)
    random = Random(f"leases {scenario.seed}")
    if random.random() < 0.5:
        steps += _to_and_fro(random, instances)
    steps = _with_databases(Random(f"databases {scenario.seed}"), steps)
    return replace(scenario, settings=settings, steps=tuple(steps))


def _with_databases(random: Random, steps: list[Step]) -> list[Step]:
    """Keep leases and cursors in two databases, or let the clock of the leases' one jump.

    Each is off in most histories.
    """
    if random.random() < 0.3:  # the cursors go back, and the leases don't
        for place, step in enumerate(steps):
            if step.do == "fail_over":
                steps[place] = Step(step.after, "fail_over", {**step.how, "leases": False})
    if random.random() < 0.2:
        for _ in range(random.randint(1, 3)):
            how = {"seconds": random.choice((-1, 1)) * random.choice((2.0, 6.0, 30.0))}
            step = Step(round(3 * random.random(), 3), "lease_clock", how)
            steps.insert(random.randint(1, len(steps)), step)
    return steps


def _to_and_fro(random: Random, instances: int) -> list[Step]:
    """Let leases go to another instance and back, and then be as they were before."""
    stop = {"what": "stop", "which": random.randrange(instances)}
    back = {"seconds": round(random.uniform(3.4, 4.6), 3)}
    return [
        Step(2.0, "life_step", stop),
        Step(3.5, "life_step", stop),
        Step(2.0, "leases_go_back", back),
        Step(1.5, "publish", {"count": 10, "entities": 6}),
    ]


def _with_hand_overs(
    random: Random, settings: Settings, steps: list[Step]
) -> tuple[Settings, list[Step]]:
    """Let instances come and go, one after the other, while the newest partitions are split.

    Much of what goes wrong needs something slow beside it: a batch, a save, or a hand-over that
    nobody waits for any more.
    """
    if random.random() < 0.6:
        settings = replace(settings, handling=1.0, batch_bytes=1, page_size=5, checkpoint_every=1)
    if random.random() < 0.5:
        settings = replace(settings, store_latency=0.5, reply_latency=0.3)
    settings = replace(settings, handover=random.choice((0.3, 2.0, 15.0)))
    refused, goes_back = random.random() < 0.5, random.random() < 0.5
    often = random.randrange(settings.instances)  # what leaves it for another one comes back
    steps = [*steps, Step(0.0, "publish", {"count": 30, "entities": 6})]
    for _ in range(random.randint(3, 7)):
        which = often if random.random() < 0.7 else random.randrange(settings.instances)
        how: dict[str, Any] = {"what": "stop", "which": which}
        steps.append(Step(round(random.uniform(0.3, 4.0), 3), "life_step", how))
        if random.random() < 0.6:
            method = random.choice(("starts-after", "cursor-from"))
            how = {"which": random.choice((-1, -1, 0)), "parts": 2, "method": method}
            steps.append(Step(round(random.uniform(0.0, 2.0), 3), "split", how))
        if refused and random.random() < 0.8:
            how = {"kind": "404", "on": "fetch", "share": random.choice((0.5, 1.0, 1.0))}
            steps.append(Step(0.0, "fault", {**how, "seconds": random.choice((2.0, 5.0))}))
        count = {"count": random.randint(1, 20), "entities": 6}
        steps.append(Step(round(random.uniform(0.0, 0.5), 3), "publish", count))
        if goes_back and random.random() < 0.5:
            seconds = random.choice((2.0, 4.0, 6.0))
            steps.append(Step(random.choice((0.0, 1.5)), "leases_go_back", {"seconds": seconds}))
    return settings, steps


def of_another_version(settings: Settings, random: Random) -> Settings:
    """Return the settings of a process that another version of the application runs."""
    # A loop over batches has nothing that would put a failing event aside.
    alike = settings.way in ("events", "keys") or settings.poison
    way: Way = settings.way if alike else random.choice(("batches", "run"))
    return replace(
        settings,
        way=way,
        commit_every=settings.commit_every if way == "batches" else 1,
        concurrent=random.choice((1, 2, 64)),
        batch_bytes=random.choice((1, 1_000, 1024 * 1024)),
        batch_events=random.choice((None, 1, 7)),
        lease=random.choice((LEASE_SECONDS, LEASE_SECONDS, 3.0, 25.0)),
        rebalance=random.choice((0.3, 1.0, 1.0)),
    )


class Claimed(NamedTuple):
    """What was stored of a partition when it was claimed, after so many changes by others."""

    stored: Position
    changes: int


class SharedSession(StoreSession):
    """The connections of one of several instances: a `CursorStore` and a `LeaseStore`."""

    def __init__(self, database: SimulatedDatabase, lock_seconds: float = 0.0) -> None:
        super().__init__(database)
        self.frozen_until = 0.0
        self.lock_seconds = lock_seconds
        self.claimed: dict[int, Claimed] = {}
        """What was stored of the partitions that were claimed, and not asked for since."""
        self.changes: Callable[[], int] = lambda: 0
        """Returns how often positions were changed by others than the consumers."""
        self.knowledge: Knowledge | None = None
        """What the process must know by what this has answered."""
        self._generation = database.generation

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        if self.knowledge is not None:
            self.knowledge.loads()
        return await super().load(feed)

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Any = None,
        passed: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """See `CursorStore.save`."""
        if self.knowledge is not None and not self.dead:
            if self._generation != self._database.generation:
                self._generation = self._database.generation
                self.knowledge.went_back()
            self.knowledge.saves(positions, self._database.positions.get(feed, {}))
        await super().save(feed, positions, transaction=transaction, passed=passed)
        same = self._generation == self._database.generation
        if self.knowledge is not None and transaction is None and same:
            self.knowledge.saved(positions)

    async def operation(self) -> None:
        """See `StoreSession.operation`. It waits while the process is frozen."""
        while (left := self.frozen_until - self._database.now()) > 0:
            await sleep(left)
        await super().operation()

    async def wait_for(self, rows: Collection[tuple[FeedKey, int]]) -> None:
        """Wait until no transaction has changed one of the rows and may still commit it.

        Raises:
            StoreError: one of them is still locked after the time that a statement waits.
        """
        locks, began = self._database.locks, self._database.now()
        while any(row in locks and not locks[row]._session.dead for row in rows):
            if 0.0 < self.lock_seconds < self._database.now() - began:
                raise StoreError("simulated: canceling statement due to lock timeout")
            await sleep(_LOCK_PAUSE)

    def transaction(self) -> Transaction:
        """Begin a transaction that locks the rows it changes, until it has ended."""
        return LockingTransaction(self)

    # ------------------------------------------------------------------ LeaseStore

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        """See `LeaseStore.look`."""
        await self.operation()
        if self.knowledge is not None:
            self.knowledge.looks()
        found = await self._database.leases.look(feed, last)
        if self.knowledge is not None and (last is None or found.leases is not last.leases):
            self.knowledge.saw(found.leases)
        return found

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        await self.operation()
        lasted = await self._database.leases.beat(feed, instance, seconds, options)
        await self._database.reply()
        if self.knowledge is not None and not lasted:
            self.knowledge.expired()
        return lasted

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        """See `LeaseStore.put`. It leaves out the rows that another one is about to change.

        Between its two statements the process may be frozen: its rows stay locked meanwhile.
        """
        asked = 0 if self.knowledge is None else self.knowledge.moment
        await self.operation()
        claims, mine = self._database.claims, set()
        try:
            for lease in leases:
                holder = claims.get((feed, lease.partition))
                if holder is None or holder.dead:
                    claims[feed, lease.partition] = self
                    mine.add(lease.partition)
            await self.operation()
            wanted = [lease for lease in leases if lease.partition in mine]
            put = await self._database.leases.put(feed, instance, wanted)
            kept = {lease.partition: lease for lease in wanted if lease.partition in put}
            claimed = {p: each.epoch for p, each in kept.items() if each.owner and not each.ended}
            stored = self._database.positions.get(feed, {})
            changes = self.changes()
            self.claimed |= {p: Claimed(stored[p], changes) for p in claimed if p in stored}
        finally:
            for partition in mine:
                if claims.get((feed, partition)) is self:
                    del claims[feed, partition]
        released = sorted(p for p, each in kept.items() if each.owner is None)
        self._database.note("{} claimed {}, released {}", _process(instance), claimed, released)
        await self._database.reply()
        if self.knowledge is not None:
            self.knowledge.claimed(instance, claimed, asked=asked)
            self.knowledge.released(released)
        return put

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        if self.knowledge is not None:
            self.knowledge.left()
        await self.operation()
        await self._database.leases.leave(feed, instance)
        await self._database.reply()


class LockingTransaction(Transaction):
    """A transaction that nobody overtakes between its save and its commit, as in PostgreSQL.

    A killed process has none: its connection is broken.
    """

    _session: SharedSession

    async def save(self, changes: Mapping[tuple[FeedKey, int], Position]) -> None:
        """See `Transaction.save`."""
        await self._session.wait_for([row for row in changes if not self._holds(row)])
        self._lock(changes)
        try:
            await super().save(changes)
        except BaseException:
            self.close()
            raise

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        try:
            await super().commit()
        finally:
            self.close()

    def close(self) -> None:
        """Release the rows: it was committed or rolled back."""
        super().close()
        locks = self._session._database.locks
        for row in [row for row, holder in locks.items() if holder is self]:
            del locks[row]

    def _holds(self, row: tuple[FeedKey, int]) -> bool:
        return self._session._database.locks.get(row) is self

    def _lock(self, rows: Iterable[tuple[FeedKey, int]]) -> None:
        self._session._database.locks.update(dict.fromkeys(rows, self))


def _process(instance: str) -> str:
    """Return the name without its random part, which no seed decides."""
    return instance.rpartition("-")[0]
