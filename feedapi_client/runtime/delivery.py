"""Towards the application: the next batch, its release, its commit (R4, R5)."""

from __future__ import annotations

import logging
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
from feedapi_client.lineage.states import Entry, State
from feedapi_client.model import Batch, Position
from feedapi_client.notifications import (
    BatchCommitted,
    BatchDelivered,
    BatchFetched,
    BatchReleased,
    CommitFailed,
)
from feedapi_client.runtime.key_order import Oldest
from feedapi_client.runtime.late import LateEvents
from feedapi_client.runtime.loop import finish, running_task
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.positions import Passed
from feedapi_client.runtime.topology import Topology

log = logging.getLogger(__name__)

TURN_SECONDS = 0.01
"""Maximum time to deliver already-buffered batches before yielding to the event loop."""


class Keyed(Protocol):
    """What handles events by key, with several batches of a partition in flight."""

    def look(self) -> None:
        """Drop what was lost. Called before each look at what is ready."""

    def fits(self, partition: RuntimePartition) -> bool | None:
        """Whether there is room for its first batch; None: not before it is queued again."""

    def passed(self, partition: int, number: int) -> Passed | None:
        """Return what is done before the end of a batch; None where nothing is remembered."""

    def oldest(self, partition: int) -> Oldest | None:
        """Return what holds the cursor of the partition back; None where nothing does."""


class Delivery:
    """Delivers batches, at most one of each partition at a time; several to a `Keyed`."""

    def __init__(self, planning: Planning, topology: Topology, late: LateEvents) -> None:
        self._planning = planning
        self._iteration = planning.iteration
        self._planner = planning.planner
        self._topology = topology
        self._late = late
        self._late_commits: list[RuntimePartition] = []
        """Whose commits have ended after their batch was released. Their transactions may still be
        rolled back: they count when the next batch is asked for."""
        self._last: int | None = None
        self._turn_ends = 0.0
        self._unread: Entry | None = None
        self.left: object = None
        """The iterator over the events of the batch in flight, in a loop over events. What is left
        in it shows the application's progress, which costs nothing for an event."""
        self.task: Any = None
        self.keyed: Keyed | None = None

    def overlap(self, keyed: Keyed) -> None:
        self.keyed = keyed
        self._planning.overlaps = True

    def takes_from(self, events: object) -> None:
        self.left = events

    async def advance(self) -> Batch | None:
        """Release the batch that the last call returned, and return the next; None at the end."""
        if self._last is not None:
            last, self._last = self._last, None
            self.release(last)
        batch = await self.next()
        self._last = None if batch is None else batch.partition
        self.task = running_task()
        return batch

    async def next(self) -> Batch | None:
        """Return the next batch of any partition that has none in flight; None at the end."""
        await self._checkpoint()
        iteration, planning = self._iteration, self._planning
        while True:
            # Looked at after the last await: a failure during it is not announced again.
            if iteration.failure is not None:
                raise iteration.failure
            if iteration.over:
                return None
            while self._late_commits:
                self._settle(self._late_commits.pop())
            if not planning.applying:  # what the planner has to save comes before a further batch
                if iteration.stopping:
                    return None
                if self.keyed is not None:
                    self.keyed.look()
                p = planning.next_ready(None if self.keyed is None else self.keyed.fits)
                if p is not None:
                    return self._take(p)
                if not iteration.settings.follow and self._finished():
                    return None
            await iteration.woken()

    async def _checkpoint(self) -> None:
        # Not each time: with many partitions the fetches would get far ahead of the application,
        # and ask for pages that can wait.
        if self._iteration.clock() >= self._turn_ends:
            await anyio.lowlevel.checkpoint()
            self._turn_ends = self._iteration.clock() + TURN_SECONDS
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()

    def _take(self, p: RuntimePartition) -> Batch:
        # Without an await: a cancellation in it would lose the batch (R20).
        limits, iteration = self._iteration.limits, self._iteration
        # By key they are not joined: the cursor of each may be committed.
        most = limits.max_batch_bytes if self.keyed is None else 0
        events, cursor = p.take(most, limits.max_batch_events)
        p.handling.delivered(iteration.clock())
        self._planner.delivered(p.id)
        batch = Batch(p.id, events, cursor, partial(self._commit, p, p.batches))
        if iteration.listeners:
            iteration.listeners.tell(BatchDelivered(p.id, len(events)))
            iteration.listeners.tell(BatchFetched(p.id, iteration.clock() - p.requested_at))
        self._planning.advance(p)
        return batch

    # ------------------------------------------------------------------ what is released

    def release(self, partition: int, count: int = 1) -> None:
        p = self._planning.partitions[partition]
        for _ in range(count):
            if self._iteration.listeners:
                seconds = self._iteration.clock() - p.handling.delivered_at
                self._iteration.listeners.tell(BatchReleased(partition, seconds))
            p.release()
        self._settle(p)

    async def handled(self, batch: Batch) -> None:
        if not self._planning.partitions[batch.partition].has_saves:
            await self.commit(batch)
        self.release(batch.partition)

    def abandon(self, partition: int, count: int) -> None:
        p = self._planning.partitions[partition]
        if p.loss_untold:
            log.warning("%s", self._lease_lost(p), extra=self._extra(partition))
        for _ in range(count):
            p.release()
        self._settle(p)

    def _settle(self, p: RuntimePartition) -> None:
        """Tell the planner what is released and committed: the loop closes only here."""
        if p.committing or self._iteration.failure is not None:
            return  # it comes again at the end of the commit
        if p.in_flight:
            if self.keyed is not None and (position := p.acknowledge()) is not None:
                self._planner.committed(p.id, position)
        else:
            self._planning.perform(self._planner.released(p.id, p.acknowledge()))
            p.note_caught_up()
            if self._planning.sharing is not None:
                self._planning.sharing.released(p.id)
        self._planning.advance(p)
        self._iteration.wake()

    # ------------------------------------------------------------------ what is committed

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
            if not own or self._iteration.settings.on_error != "park":
                raise
            self._planning.fail(self._planning.partitions[batch.partition], error)

    async def _commit(
        self, p: RuntimePartition, number: int, batch: Batch, transaction: Any
    ) -> None:
        planning = self._planning
        if self._iteration.over:
            raise self._out_of_order(
                batch,
                "its iteration has ended, and what was not committed is read again by the next one",
            )
        if p.is_lost(number):
            raise self._lease_lost(p)
        if p.committing:
            raise self._out_of_order(
                batch, "another commit of this partition is under way: await one after the other"
            )
        if p.loss_untold and planning.sharing is not None:
            planning.lose(p)
            raise self._lease_lost(p)
        if p.is_overtaken(number):
            raise self._out_of_order(
                batch,
                "it, or a later batch of the partition, was committed before. If that was rolled "
                "back: to ask for the next batch says that it was not. Commit again before you "
                "ask, or begin a new iteration",
            )
        if p.entry.state is State.SUPERSEDED:
            raise self._out_of_order(
                batch,
                "the partition was split, and its successors went on from the last committed "
                "cursor",
            )
        if transaction is None and p.is_saved(number, durably=True):
            return
        position = p.drawn(
            number,
            self._planner.checkpoint(p.id, batch.cursor, after=p.position_before(number)),
        )
        # Block lineage changes to this position until the save is through, also when the batch was
        # released before, or is meanwhile.
        self._planner.hold(p.id)
        p.commits(+1)
        save = self._save(p, number, position, transaction)
        # What is saved in the caller's transaction ends with it, so it may be cancelled. It also
        # stays in the caller's task: others must not run while a synchronous transaction is open.
        interruptible = transaction is None and not planning.positions.at_once
        await (finish(save) if interruptible else save)

    async def _save(
        self, p: RuntimePartition, number: int, position: Position, transaction: Any
    ) -> None:
        iteration, planning, began = self._iteration, self._planning, self._iteration.clock()
        failure: BaseException | None = None
        passed = None if self.keyed is None else self.keyed.passed(p.id, number)
        try:
            await planning.positions.save({p.id: position}, transaction, passed)
            p.saved(number, position, durable=transaction is None)
        except FencedError as error:
            failure = error
            # One that an attempt before this one has saved, whose end nobody saw.
            again = p.is_saved(number, position=position)
            if again and await planning.positions.holds({p.id: position}):
                p.saved(number, position, durable=True)
                raise AlreadyDoneError(
                    "this batch is committed already: an earlier COMMIT went through, and only its "
                    "reply was lost. Roll this transaction back; the batch counts as handled",
                    feed=iteration.feed,
                    partition=p.id,
                ) from error
            if planning.sharing is not None:
                planning.lose(p)
                raise self._lease_lost(p) from error
            iteration.fail(error)  # another consumer has replaced this one (R17)
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = iteration.clock() - began
            if iteration.listeners:
                told = BatchCommitted if failure is None else CommitFailed
                iteration.listeners.tell(told(p.id, seconds), failure)
            p.commits(-1)
            if not p.in_flight:
                self._late_commits.append(p)
                iteration.wake()

    def _extra(self, partition: int) -> dict[str, object]:
        return {"feed": self._iteration.feed, "partition": partition}

    def _lease_lost(self, p: RuntimePartition) -> LeaseLostError:
        p.loss_untold = False
        return LeaseLostError(
            "the lease of this partition was lost while a batch was in flight: what was not "
            "committed is delivered again, by the instance that has the lease",
            feed=self._iteration.feed,
            partition=p.id,
        )

    def _out_of_order(self, batch: Batch, why: str) -> CommitOrderError:
        return CommitOrderError(
            f"a batch up to cursor {batch.cursor!r} can't be committed: {why}",
            feed=self._iteration.feed,
            partition=batch.partition,
        )

    # ------------------------------------------------------------------ the end

    def _is_unread(self, entry: Entry) -> bool:
        if entry.state is not State.READING:
            return False
        p = self._planning.partitions.get(entry.id)
        return p is None or entry.end is None or p.in_flight > 0

    def _finished(self) -> bool:
        """Whether the feed was read to its end.

        It was not while a partition that is over is listed as open (R11): that passes, or the
        discovery fails the session.

        Raises `CommitOrderError` when children wait for a commit that the application forgot.
        """
        planner = self._planner
        if self._planning.timer.wanted or self._topology.awaits_partitions:
            return False
        if planner.listed_again() or self._late.awaited:
            return False
        if planner.finished():
            return True
        # The one that was found last time is looked at first: this is asked before each wait, and
        # there may be thousands of partitions.
        if self._unread is not None and self._is_unread(self._unread):
            return False
        entries = planner.entries.values() if planner.reads else ()
        self._unread = next((entry for entry in entries if self._is_unread(entry)), None)
        at_end = {entry.id for entry in entries if entry.state is State.READING}
        if self._unread is not None or not at_end:
            return False
        # All was read, but the application did not commit the end of some closed partitions.
        waits = (e.id for e in entries if e.waits_for and at_end.intersection(e.waits_for))
        child = next(waits, None)
        if child is None and not planner.unfinished_elsewhere():
            return True
        who = "another instance waits" if child is None else f"partition {child} waits"
        raise CommitOrderError(
            f"{who} until the last batch of this one is committed, and it was not: await "
            "batch.commit() before asking for the next",
            feed=self._iteration.feed,
            partition=min(at_end),
        )
