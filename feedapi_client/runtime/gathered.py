"""Commits that the consumer makes in the application's place, gathered into one save.

See `Limits.commit_interval`. What is gathered is handled, and a crash repeats it until it is saved.
Meanwhile the partition delivers on; for the planner its batches are in flight.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import anyio

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import Position
from feedapi_client.notifications import BatchCommitted
from feedapi_client.retry import Backoff, retry
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import RuntimePartition

Works = dict[RuntimePartition, tuple[int, Position]]


class GatheredCommits:
    """The partitions with commits that are to be saved.

    Arguments:
        driver: of the session.
        seconds: how long the first of them waits.
        settle: awaited with the partitions that were saved.
        refused: awaited with a partition whose position the store refuses. Raises what ends the
            iteration.
    """

    def __init__(
        self,
        driver: Driver,
        seconds: float,
        settle: Callable[[Iterable[RuntimePartition]], Awaitable[None]],
        refused: Callable[[RuntimePartition, StoreError], Awaitable[None]],
    ) -> None:
        self._driver = driver
        self._seconds = seconds
        self._settle = settle
        self._refused = refused
        self._partitions: dict[RuntimePartition, None] = {}
        self._until = 0.0
        self._begun = anyio.Event()
        self._hurry = anyio.Event()
        self._lock = anyio.Lock()
        self._saving: dict[RuntimePartition, anyio.Event] = {}
        self._transactions = False
        self._left = False
        self.backoff: Callable[[], Backoff] | None = None
        """The patience for saves that fail; None: the first failure ends the iteration."""

    def __repr__(self) -> str:
        return f"<GatheredCommits of {len(self._partitions)} partitions>"

    def __bool__(self) -> bool:
        return bool(self._partitions)

    def add(self, partition: RuntimePartition, number: int, cursor: str) -> None:
        """Gather the commit of batch `number` of the partition."""
        partition.gather(number, cursor, self.soon)
        if not self._partitions:
            self._until = self._driver.clock() + self._seconds
            self._begun.set()
        self._partitions[partition] = None
        waits_for_it = (
            partition.at_end
            or not partition.entry.running
            or self._driver.planner.graph.successors.get(partition.id)
        )
        if waits_for_it or self._driver.clock() >= self._until:
            self.soon()

    def soon(self) -> None:
        """Save now what is gathered: a child, another instance or the end waits for it."""
        self._hurry.set()

    async def run(self) -> None:
        """Save in time what is gathered, until cancelled. Raises what ends the iteration."""
        while True:
            await self._begun.wait()
            with anyio.move_on_after(max(self._until - self._driver.clock(), 0.0)):
                await self._hurry.wait()
            self._hurry = anyio.Event()
            await self.save()
            self._until = self._driver.clock() + self._seconds
            if not self._partitions:
                self._begun, self._hurry = anyio.Event(), anyio.Event()

    async def save_at_end(self) -> Exception | None:
        """Save what is gathered, also when the caller was cancelled. Return why that failed.

        The session fails with it, which logs it: a caller that is cancelled raises nothing else.
        None for one that has failed before, perhaps by this: that was raised.
        """
        self._transactions = False  # the application has no batch in flight any more
        failed = self._driver.failure is not None
        if self._partitions:
            try:
                await finish(self._save_all(), hurry=self._driver.positions.hurry_saves)
            except Exception as error:  # noqa: BLE001 - returned
                self._driver.fail(error)
                return None if failed else error
        return None

    async def save_before_leaving(self) -> None:
        """Do as `save_at_end`, before the leases are given away. Nothing is saved after it."""
        await self.save_at_end()
        self._left = True

    async def save(self) -> None:
        """Save what is gathered. A cancellation waits for a save that has begun.

        Raises StoreError.
        """

        async def once() -> None:
            await finish(self._save_all(), hurry=self._driver.positions.hurry_saves)

        if self.backoff is None:
            await once()
        else:
            await retry(once, self.backoff(), sleep=anyio.sleep)

    async def gives_way(self, partition: RuntimePartition, *, transaction: bool) -> None:
        """Wait until no save of the partition is under way: the application commits it.

        Its transaction may hold what such a save waits for. From the first one on, nothing is saved
        of a partition whose batch the application has, and it gets none while one is saved.
        """
        if transaction:
            self._transactions = True
        while partition in self._saving:
            await self._saving[partition].wait()

    # ------------------------------------------------------------------ one save

    def _due(self) -> tuple[Works, list[RuntimePartition]]:
        """Return what is to be saved, and the partitions of which nothing is any more."""
        due: Works = {}
        settled: list[RuntimePartition] = []
        for partition in list(self._partitions):
            gathered = partition.gathered
            if gathered is None:  # a later commit covers it, or it was lost
                del self._partitions[partition]
                settled.append(partition)
                continue
            if partition.has_saves or partition.committing:
                continue  # of a commit of the application, which covers it
            if self._transactions and partition.in_flight:
                continue
            position = self._driver.planner.checkpoint(partition.id, gathered.cursor)
            due[partition] = (gathered.number, position)
        return due, settled

    async def _save_all(self) -> None:
        async with self._lock:
            if self._left:
                return
            works, settled = self._due()
            while settled:
                await self._settle(settled)
                works, settled = self._due()
            if not works:
                return
            try:
                await self._save(works)
                return
            except StoreError as error:
                if len(works) == 1:
                    await self._refuse(next(iter(works)), error)
                    return
            # None was saved. One that is lost, or can't be stored, is to hold up no other.
            for partition, work in works.items():
                if partition.is_lost(work[0]):
                    continue
                try:
                    await self._save({partition: work})
                except StoreError as error:
                    await self._refuse(partition, error)

    async def _refuse(self, partition: RuntimePartition, error: StoreError) -> None:
        """Deal with a position that the store refuses. Raises the error of a store that fails."""
        if error.partition is None and not isinstance(error, FencedError):
            raise error
        self._forget(partition)
        await self._refused(partition, error)

    def _forget(self, partition: RuntimePartition) -> None:
        partition.forget_gathered()
        self._partitions.pop(partition, None)

    async def _save(self, works: Works) -> None:
        driver, began = self._driver, self._driver.clock()
        failure: BaseException | None = None
        through = anyio.Event()
        self._saving = dict.fromkeys(works, through)
        for partition in works:
            partition.begin_commit()
            partition.withhold(self._transactions)
        try:
            await driver.positions.save({p.id: position for p, (_, position) in works.items()})
        except BaseException as error:
            failure = error
            raise
        finally:
            self._saving = {}
            through.set()
            for partition, (number, position) in works.items():
                partition.end_commit()
                partition.withhold(False)
                if failure is None:
                    partition.saved(number, position, durable=True)
                    if partition.gathered is None or partition.gathered.number <= number:
                        self._forget(partition)
                self._tell(partition, began, failure)
        await self._settle(works)

    def _tell(
        self, partition: RuntimePartition, began: float, failure: BaseException | None
    ) -> None:
        driver = self._driver
        for observer in driver.observers:
            observer.committed(partition.id, driver.clock() - began, failure)
        if driver.listeners and failure is None:
            driver.listeners.tell(BatchCommitted(partition.id, driver.clock() - began))
