"""Several instances that share the feed: leases beside the cursors, and what happens to instances.

A process that is frozen neither handles anything nor reaches the database, as after SIGSTOP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from feedapi_client.model import FeedKey, Position
from feedapi_client.options import Share
from feedapi_client.stores.leases import Instance, Lease
from feedapi_client.testing.simulator.clock import sleep
from feedapi_client.testing.simulator.scenario import Scenario, Step
from feedapi_client.testing.simulator.store import Database, Session, Transaction

LEASE_SECONDS = 10.0
_LOCK_PAUSE = 0.01
_LEFT_OUT = ("merge", "split_unnamed", "choose_descendants")
"""Steps that one instance can't take part in while another one reads on."""


def share(number: int) -> Share:
    """Return the options of one process. Its name decides about its place among the instances."""
    return Share(
        instance=f"process {number:06}",
        lease_seconds=LEASE_SECONDS,
        rebalance_seconds=1.0,
        handover_seconds=15.0,
    )


def shared(scenario: Scenario, instances: int) -> Scenario:
    """Return the scenario with several instances, of which each may come to grief."""
    random = Random(f"instances {scenario.seed}")
    settings = replace(
        scenario.settings,
        instances=instances,
        chosen=0,
        commit_every=1,
        careless=False,
        on_error="raise",
        on_failure="raise",
        flaky=0.0,
        poison=False,
    )
    steps: list[Step] = []
    for step in scenario.steps:
        if step.do == "life_step":
            how = {**step.how, "which": random.randrange(instances)}
            steps.append(replace(step, how=how))
        elif step.do not in _LEFT_OUT:
            steps.append(step)
    for _ in range(random.randint(0, 3)):
        seconds = random.choice((2.0, 1.2 * LEASE_SECONDS, 3 * LEASE_SECONDS))
        how = {"what": "freeze", "seconds": seconds, "which": random.randrange(instances)}
        step = Step(round(3 * random.random(), 3), "life_step", how)
        steps.insert(random.randint(1, len(steps)), step)
    return replace(scenario, settings=settings, steps=tuple(steps))


class SharedSession(Session):
    """The connections of one of several instances: a `CursorStore` and a `LeaseStore`."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.frozen_until = 0.0

    async def operation(self) -> None:
        """See `Session.operation`. It waits while the process is frozen."""
        while (left := self.frozen_until - self._database.now()) > 0:
            await sleep(left)
        await super().operation()

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. It waits for the rows that a transaction has changed."""
        if transaction is None:
            await self.unlocked([(feed, partition) for partition in positions])
        await super().save(feed, positions, transaction=transaction)

    async def unlocked(self, rows: Collection[tuple[FeedKey, int]]) -> None:
        """Wait until no transaction has changed one of the rows and may still commit it."""
        locks = self._database.locks
        while any(row in locks and not locks[row]._session.dead for row in rows):
            await sleep(_LOCK_PAUSE)

    def transaction(self) -> Transaction:
        """Begin a transaction that locks the rows it changes, until it has ended."""
        return LockingTransaction(self)

    # ------------------------------------------------------------------ LeaseStore

    async def join(self, feed: FeedKey, instance: str, seconds: float) -> None:
        """See `LeaseStore.join`."""
        await self.operation()
        await self._database.leases.join(feed, instance, seconds)
        await self._database.reply()

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        await self.operation()
        renewed = await self._database.leases.renew(feed, instance, seconds)
        await self._database.reply()
        return renewed

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        await self.operation()
        await self._database.leases.leave(feed, instance)
        await self._database.reply()

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        await self.operation()
        return await self._database.leases.instances(feed)

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        await self.operation()
        return await self._database.leases.leases(feed)

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        await self.operation()
        claimed = await self._database.leases.claim(feed, instance, epochs)
        self._database.note("{} claimed {}", _process(instance), claimed)
        await self._database.reply()
        return claimed

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        await self.operation()
        await self._database.leases.release(feed, instance, partitions)
        self._database.note("{} released {}", _process(instance), sorted(partitions))
        await self._database.reply()

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        await self.operation()
        await self._database.leases.end(feed, instance, partitions)
        await self._database.reply()


class LockingTransaction(Transaction):
    """A transaction that nobody overtakes between its save and its commit, as in PostgreSQL.

    A killed process has none: its connection is broken.
    """

    _session: SharedSession

    async def save(self, changes: Mapping[tuple[FeedKey, int], Position]) -> None:
        """See `Transaction.save`."""
        await self._session.unlocked([row for row in changes if not self._holds(row)])
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
