"""Towards the application: the next batch, its release, its commit (R4, R5)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from feedapi_client.errors import (
    AlreadyDoneError,
    CommitOrderError,
    FencedError,
    LeaseLostError,
    StoreError,
)
from feedapi_client.lineage.planner import Entry, State
from feedapi_client.model import Batch, Position
from feedapi_client.notifications import (
    BatchCommitted,
    BatchDelivered,
    BatchFetched,
    BatchReleased,
    CommitFailed,
)
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.key_order import Oldest
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.positions import Passed

log = logging.getLogger(__name__)

TURN_SECONDS = 0.01
"""Maximum time to deliver already-buffered batches before yielding to the event loop."""


class Keyed(Protocol):
    """What handles events by key, with several batches of a partition in flight."""

    def look(self) -> None:
        """Drop what was lost. Called before each look at what is ready."""
        ...

    def fits(self, partition: RuntimePartition) -> bool | None:
        """Whether there is room for the first batch that the partition holds.

        None: it may not be delivered before its partition is queued again.
        """
        ...

    def passed(self, partition: int, number: int) -> Passed | None:
        """Return what is done before the end of a batch; None where nothing is remembered."""
        ...

    def oldest(self, partition: int) -> Oldest | None:
        """Return what holds the cursor of the partition back; None where nothing does."""
        ...


class Delivery:
    """Delivers batches, at most one of each partition at a time; several to a `Keyed`.

    Its methods are called from the iterating task, or, by `FeedConsumer.run`, from several handler
    tasks at once.
    """

    def __init__(self, driver: Driver, fetching: Fetching) -> None:
        self._driver = driver
        self._fetching = fetching
        self._released: deque[RuntimePartition] = deque()
        self._last: int | None = None
        self._turn_ends = 0.0
        self._unread: Entry | None = None
        self.left: object = None
        """The iterator over the events of the batch in flight, in a loop over events. What is left
        in it shows the application's progress, which costs nothing for an event."""
        self.task: int | None = None
        """The iterating task, as `anyio.TaskInfo.id`; None while handlers run in tasks of ours."""
        self.keyed: Keyed | None = None

    def overlap(self, keyed: Keyed) -> None:
        """Deliver also what comes behind batches in flight, as far as it fits."""
        self.keyed = keyed
        self._driver.overlap()

    def takes_from(self, events: object) -> None:
        """The application takes the events of its batch from this iterator."""
        self.left = events

    async def advance(self) -> Batch | None:
        """Release the batch that the last call returned, and return the next one.

        None at the end. Raises the session's failure. For the one task of an iteration.
        """
        if self._last is not None:
            last, self._last = self._last, None
            await self.release(last)
        batch = await self.next()
        self._last = None if batch is None else batch.partition
        self.task = anyio.get_current_task().id
        return batch

    async def next(self) -> Batch | None:
        """Return the next batch of any partition that has none in flight; None at the end.

        Raises the session's failure.
        """
        await self._checkpoint()
        driver = self._driver
        while True:
            if driver.failure is None:
                await self._acknowledge()
            # Looked at after the last await: a failure during it is not announced again.
            if driver.failure is not None:
                raise driver.failure
            if driver.stopping or driver.over:
                return None
            if self.keyed is not None:
                self.keyed.look()
            partition = driver.next_ready(None if self.keyed is None else self.keyed.fits)
            if partition is not None:
                return self._take(partition)
            if not driver.settings.follow and self._finished():
                return None
            await driver.woken()

    async def _checkpoint(self) -> None:
        # Not each time: with many partitions the fetches would get far ahead of the application,
        # and ask for pages that can wait.
        if self._driver.clock() >= self._turn_ends:
            await anyio.lowlevel.checkpoint()
            self._turn_ends = self._driver.clock() + TURN_SECONDS
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()

    def _take(self, partition: RuntimePartition) -> Batch:
        # Without an await: a cancellation in it would lose the batch (R20).
        limits = self._driver.limits
        # By key they are not joined: the cursor of each may be committed.
        most = limits.max_batch_bytes if self.keyed is None else 0
        events, cursor = partition.take(most, limits.max_batch_events)
        partition.handling.delivered(self._driver.clock())
        self._driver.planner.delivered(partition.id)
        commit = partial(self._commit, partition, partition.batches)
        batch = Batch(partition.id, events, cursor, commit)
        if listeners := self._driver.listeners:
            listeners.tell(BatchDelivered(partition.id, len(events)))
            ago = self._driver.clock() - partition.requested_at
            listeners.tell(BatchFetched(partition.id, ago))
        if partition.end is not None and not partition.pending:
            self._fetching.reached_end(partition)
        else:
            self._fetching.resume(partition)
        if self.keyed is not None:
            self._driver.enqueue(partition)
        return batch

    async def release(self, partition_id: int, count: int = 1) -> None:
        """Release the oldest batches: what was committed of them counts from now on (R5)."""
        partition = self._driver.partitions[partition_id]
        for _ in range(count):
            if self._driver.listeners:
                seconds = self._driver.clock() - partition.handling.delivered_at
                self._driver.listeners.tell(BatchReleased(partition_id, seconds))
            partition.release()
        self._released.append(partition)
        self._driver.enqueue(partition)
        if self._driver.failure is None:
            await self._acknowledge()

    async def handled(self, batch: Batch) -> None:
        """Commit the batch of a handler that returned, unless it did so, and release it."""
        if not self._driver.partitions[batch.partition].has_saves:
            await self.commit(batch)
        await self.release(batch.partition)

    def abandon(self, partition_id: int, count: int) -> None:
        """Release batches whose lease was lost: somebody else handles them, or has done so."""
        partition = self._driver.partitions[partition_id]
        if partition.loss_untold:
            log.warning("%s", self._lease_lost(partition), extra=self._extra(partition_id))
        for _ in range(count):
            partition.release()
        self._released.append(partition)

    def _extra(self, partition: int) -> dict[str, object]:
        return {"feed": self._driver.feed, "partition": partition}

    async def commit(
        self, batch: Batch, save: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Commit a batch in the application's place; `save` does it, if it is given.

        With ``on_error="park"`` a cursor that can't be stored parks its partition, and nothing is
        raised (R18). Nor is a lost lease: the instance that has it delivers the batch again.
        """
        try:
            await (batch.commit() if save is None else save())
        except LeaseLostError as error:
            log.warning("%s", error, extra=self._extra(batch.partition))
        except StoreError as error:
            # A store that refuses a cursor as a value names its partition; one that fails does not.
            own = error.partition is not None and type(error) is StoreError
            if not own or self._driver.settings.on_error != "park":
                raise
            await self._driver.fail_partition(self._driver.partitions[batch.partition], error)

    async def _acknowledge(self) -> None:
        """Pass released batches to the planner, and carry out its actions."""
        driver = self._driver
        while self._released:
            partition = self._released.popleft()
            if partition.committing or (partition.in_flight and self.keyed is None):
                continue  # it comes again: released, or at the end of the commit
            if partition.in_flight:
                position = partition.acknowledge()
                if position is not None:
                    driver.planner.committed(partition.id, position)
                continue
            actions = driver.planner.released(partition.id, partition.acknowledge())
            if actions or driver.applying:
                await driver.apply(actions)
            partition.note_caught_up()
            if driver.sharing is not None:
                driver.sharing.released(partition.id)
            driver.wake()
        if driver.applying:
            await driver.apply()

    async def _commit(
        self, partition: RuntimePartition, number: int, batch: Batch, transaction: Any
    ) -> None:
        """Save the cursor of batch `number`; see `Batch.commit`."""
        driver = self._driver
        if driver.over:
            raise self._out_of_order(
                batch,
                "its iteration has ended, and what was not committed is read again by the next one",
            )
        if partition.is_lost(number):
            raise self._lease_lost(partition)
        if partition.committing:
            raise self._out_of_order(
                batch, "another commit of this partition is under way: await one after the other"
            )
        if partition.loss_untold and driver.sharing is not None:
            driver.lose(partition)
            raise self._lease_lost(partition)
        if partition.is_overtaken(number):
            raise self._out_of_order(
                batch,
                "it, or a later batch of the partition, was committed before. If that was rolled "
                "back: to ask for the next batch says that it was not. Commit again before you "
                "ask, or begin a new iteration",
            )
        if partition.entry.state is State.SUPERSEDED:
            raise self._out_of_order(
                batch,
                "the partition was split, and its successors went on from the last committed "
                "cursor",
            )
        if transaction is None and partition.is_saved(number, durably=True):
            return
        before = partition.position_before(number)
        position = partition.drawn(
            number, driver.planner.checkpoint(partition.id, batch.cursor, after=before)
        )
        # Block lineage changes to this position until the save is through, also when the batch was
        # released before, or is meanwhile.
        driver.planner.hold(partition.id)
        partition.begin_commit()
        save = self._save(partition, number, position, transaction)
        # What is saved in the caller's transaction ends with it, so it may be cancelled. It also
        # stays in the caller's task: others must not run while a synchronous transaction is open.
        interruptible = transaction is None and not driver.positions.at_once
        await (finish(save) if interruptible else save)

    async def _save(
        self, partition: RuntimePartition, number: int, position: Position, transaction: Any
    ) -> None:
        driver, began = self._driver, self._driver.clock()
        failure: BaseException | None = None
        passed = None if self.keyed is None else self.keyed.passed(partition.id, number)
        try:
            await driver.positions.save({partition.id: position}, transaction, passed)
            partition.saved(number, position, durable=transaction is None)
        except FencedError as error:
            failure = error
            # One that an attempt before this one has saved, whose end nobody saw.
            again = partition.is_saved(number, position=position)
            if again and await driver.positions.holds({partition.id: position}):
                partition.saved(number, position, durable=True)
                raise AlreadyDoneError(
                    "this batch is committed already: an earlier COMMIT went through, and only its "
                    "reply was lost. Roll this transaction back; the batch counts as handled",
                    feed=driver.feed,
                    partition=partition.id,
                ) from error
            if driver.sharing is not None:
                driver.lose(partition)
                raise self._lease_lost(partition) from error
            driver.fail(error)  # another consumer has replaced this one (R17)
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            if driver.listeners:
                told = BatchCommitted if failure is None else CommitFailed
                driver.listeners.tell(told(partition.id, driver.clock() - began), failure)
            partition.end_commit()
            if not partition.in_flight:
                self._released.append(partition)
                driver.wake()

    def _lease_lost(self, partition: RuntimePartition) -> LeaseLostError:
        partition.tell_loss()
        return LeaseLostError(
            "the lease of this partition was lost while a batch was in flight: what was not "
            "committed is delivered again, by the instance that has the lease",
            feed=self._driver.feed,
            partition=partition.id,
        )

    def _out_of_order(self, batch: Batch, why: str) -> CommitOrderError:
        return CommitOrderError(
            f"a batch up to cursor {batch.cursor!r} can't be committed: {why}",
            feed=self._driver.feed,
            partition=batch.partition,
        )

    def _is_unread(self, entry: Entry) -> bool:
        """Whether something of a partition is to be read, or is with the application."""
        if entry.state is not State.READING:
            return False
        partition = self._driver.partitions.get(entry.id)
        return partition is None or not partition.at_end or partition.in_flight > 0

    def _finished(self) -> bool:
        """Whether the feed was read to its end.

        It was not while a partition that is over is listed as open (R11): that passes, or the
        discovery fails the session.

        Raises `CommitOrderError` when children wait for a commit that the application forgot.
        """
        driver = self._driver
        if driver.timer.wanted or driver.applying or driver.awaits_partitions:
            return False
        if driver.planner.listed_again() or self._fetching.late.awaited:
            return False
        if driver.planner.finished():
            return True
        # The one that was found last time is looked at first: this is asked before each wait, and
        # there may be thousands of partitions.
        if self._unread is not None and self._is_unread(self._unread):
            return False
        entries = driver.planner.entries.values() if driver.planner.reads else ()
        self._unread = next((entry for entry in entries if self._is_unread(entry)), None)
        at_end = {entry.id for entry in entries if entry.state is State.READING}
        if self._unread is not None or not at_end:
            return False
        # All was read, but the application did not commit the end of some closed partitions.
        waits = (e.id for e in entries if e.waits_for and at_end.intersection(e.waits_for))
        child = next(waits, None)
        if child is None and not driver.planner.unfinished_elsewhere():
            return True
        who = "another instance waits" if child is None else f"partition {child} waits"
        raise CommitOrderError(
            f"{who} until the last batch of this one is committed, and it was not: await "
            "batch.commit() before asking for the next",
            feed=driver.feed,
            partition=min(at_end),
        )
