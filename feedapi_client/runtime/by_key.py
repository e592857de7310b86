"""Handles the events of one session by key: keys at once, each one's events in order.

What may be handled and what may be committed is decided by `KeyOrder`. This part runs the handlers
in a bounded number of tasks, retries failing events, and saves cursors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from datetime import UTC, datetime
from types import CoroutineType

import anyio
import anyio.lowlevel

from feedapi_client.arguments import awaitable_of
from feedapi_client.causes import failure_of
from feedapi_client.lineage.states import State
from feedapi_client.model import Batch, Event
from feedapi_client.quarantine.aside import Aside, Key
from feedapi_client.quarantine.failure_text import failure_line
from feedapi_client.quarantine.record import EarlierEventQuarantined, QuarantinedEvent
from feedapi_client.retry import retry
from feedapi_client.runtime.delivery import TURN_SECONDS, Delivery
from feedapi_client.runtime.done_ahead import DoneAhead, EventIdOf
from feedapi_client.runtime.key_order import KeyedBatch, KeyedEvent, KeyOrder, Oldest
from feedapi_client.runtime.loop import Wakeup
from feedapi_client.runtime.partition import RuntimePartition, memory_of
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.running import Running

log = logging.getLogger(__name__)

EVENT_HANDLER = "async def handle(event): ..."
"""What a handler looks like, for messages."""
_LOOK_EVERY = 16
"""Events after which a task looks at the clock that no other one has interrupted."""
EventHandler = Callable[[Event], Awaitable[object]]


class _NoKey:
    """In the place of the key of an event whose key could not be found: like no other."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ByKey:
    """One `FeedConsumer.run_by_key`. `failures`: what becomes of events that fail."""

    def __init__(
        self,
        planning: Planning,
        delivery: Delivery,
        handle: EventHandler,
        key: Key,
        failures: Aside,
        *,
        event_id: EventIdOf | None = None,
        max_concurrency: int,
        max_in_flight: int,
    ) -> None:
        self._running = Running(planning, log)
        self.scope = self._running.scope
        self._planning, self._iteration = planning, planning.iteration
        self._delivery = delivery
        self._handle = handle
        self._key = key
        self._failures = failures
        self._ahead: DoneAhead | None = None
        if event_id is not None:
            self._ahead = DoneAhead(planning, event_id, self._running, self.look, failures.backoff)
        self._max_concurrency = max_concurrency
        self._max_in_flight = max_in_flight
        self._max_size = planning.iteration.limits.max_buffered_bytes
        self._order = KeyOrder()
        self._size = 0
        self._losses = planning.losses
        self._readings: dict[int, int] = {}
        self._workers = 0
        self._idle: list[Wakeup] = []
        self._turn: object = None
        self._turn_ends = 0.0
        self._committing: set[int] = set()
        self._failing: Counter[int] = Counter()
        """By partition: how many events in flight have failed, where any has."""
        self._unkeyed = False

    def __repr__(self) -> str:
        return f"<ByKey {self._workers - len(self._idle)} handlers, {self._order!r}>"

    async def run(self) -> None:
        """Handle events until the end of the feed or a stop. Raises what ended the iteration."""
        self._delivery.overlap(self)
        await self._running.run(self._deliver)

    async def _deliver(self) -> None:
        iteration = self._iteration
        while (batch := await self._delivery.next()) is not None:
            self._admit(batch)
        while not self._finished:
            if iteration.failure is not None:
                raise iteration.failure
            self.look()
            if not self._finished:
                await iteration.woken()
        for partition in self._order.partitions:
            await self._save_partly(partition)
        self._running.end_tasks()

    @property
    def _finished(self) -> bool:
        begun = self._workers - len(self._idle)
        done = not begun if self._iteration.stopping else self._order.idle
        return done and not self._committing

    # ------------------------------------------------------------------ what is delivered

    def look(self) -> None:
        """Drop what was lost with its lease; of what is given away, what is not begun."""
        if self._losses == self._planning.losses:
            return
        self._losses = self._planning.losses
        self._held_may_be_stale()
        for id in self._order.partitions:
            partition, first = self._planning.partitions[id], self._order.first_number(id)
            if partition.is_lost(first):
                last = max(n for n in range(first, partition.batches + 1) if partition.is_lost(n))
                self._dropped(id, self._order.drop(id, last))
            elif partition.entry.state is State.ELSEWHERE:
                self._dropped(id, self._order.drop_unbegun(id))

    def _held_may_be_stale(self) -> None:
        """Another instance may have changed which keys wait for a replay."""
        if self._failures.held is not None and self._planning.sharing is not None:
            self._failures.held.doubt()

    def _dropped(self, id: int, lost: list[KeyedBatch]) -> None:
        for work in lost:
            self._settle(work)
            for item in work.open_items:
                if item is not None:
                    self._recovered(item)
        self._delivery.abandon(id, len(lost))
        self._call_workers()

    def fits(self, partition: RuntimePartition) -> bool | None:
        """Whether its first batch fits; None: not before the partition is queued again."""
        if self._ahead is not None and not self._ahead.is_claimed(partition):
            return None
        first, order = partition.pending[0], self._order
        self._size = memory_of(first)
        return order.idle or (
            order.events + len(first.events) <= self._max_in_flight
            and order.size + self._size <= self._max_size
        )

    def oldest(self, partition: int) -> Oldest | None:
        return self._order.oldest(partition, self._iteration.clock())

    def _admit(self, batch: Batch) -> None:
        partition = self._planning.partitions[batch.partition]
        work = KeyedBatch(
            batch,
            number=partition.batches,
            size=self._size,
            delivered_at=self._iteration.clock(),
            marks=partition.marks,
        )
        if self._readings.get(partition.id) != partition.readings:
            self._readings[partition.id] = partition.readings
            self._held_may_be_stale()
        done = () if self._ahead is None else self._ahead.identify(work)
        self._order.admit(work, self._keys(batch), done)
        if not work.left:
            self._commit_soon(batch.partition)
        self._call_workers()

    def _keys(self, batch: Batch) -> list[Hashable]:
        try:
            keys = list(map(self._key, batch.events))
            set(keys)  # raises for one that is not hashable
        except Exception:  # noqa: BLE001 - one of them failed: each one's error is its own
            return [self._key_of(event) for event in batch.events]
        return keys

    def _key_of(self, event: Event) -> Hashable:
        try:
            key = self._key(event)
            hash(key)
        except Exception as error:  # noqa: BLE001 - handled like an error of the handler
            self._unkeyed = True
            return _NoKey(error)
        return key

    # ------------------------------------------------------------------ what is handled

    def _call_workers(self) -> None:
        """Let as many tasks run as there are events to handle, up to the bound."""
        if self._iteration.stopping:
            return  # what is woken is not idle, and would have to be waited for
        wanted = self._order.ready
        while wanted and self._idle:
            self._idle.pop().set()
            wanted -= 1
        for _ in range(min(wanted, self._max_concurrency - self._workers)):
            self._workers += 1
            self._running.start(self._work)

    async def _work(self) -> None:
        """Handle one event after the other. No call more than needed: it is the inner loop."""
        iteration, order, woken = self._iteration, self._order, Wakeup()
        handle, failures, clock, count = self._handle, self._failures, iteration.clock, 0
        handled: Awaitable[object]
        while True:
            while not iteration.stopping and (item := order.begin()) is not None:
                try:
                    if self._unkeyed or failures.held or self._ahead is not None:
                        handled = self._checked(item)
                    else:
                        handled = handle(item.event)
                    if type(handled) is not CoroutineType:
                        handled = _awaitable(handled)
                    await handled
                except BaseException as error:  # noqa: BLE001 - retried, quarantined or raised
                    self._failed(item, failure_of(error, "the handler", own_task=True))
                else:
                    if self._failing or failures.in_a_row:
                        self._iteration.handled_at = datetime.now(UTC)
                        self._recovered(item)
                        failures.handled(item.work.batch.partition)
                    if order.done(item):
                        self._commit_soon(item.work.batch.partition)
                # A handler that never waits would keep all else from running.
                if self._turn is not woken:
                    self._turn, self._turn_ends, count = woken, clock() + TURN_SECONDS, 0
                elif (count := count + 1) % _LOOK_EVERY == 0 and clock() >= self._turn_ends:
                    self._turn = None
                    await anyio.lowlevel.checkpoint()
            self._idle.append(woken)
            if iteration.stopping:
                iteration.wake()
            await woken.wait()

    async def _checked(self, item: KeyedEvent) -> None:
        if isinstance(item.key, _NoKey):
            raise item.key.error
        held = self._failures.held
        if held and (earlier := await held.holding(item.key)) is not None:
            raise EarlierEventQuarantined(earlier[1])
        if self._ahead is None:
            await _awaitable(self._handle(item.event))
        else:
            await self._ahead.attempt(item, lambda event: _awaitable(self._handle(event)))

    def _done(self, item: KeyedEvent) -> None:
        self._recovered(item)
        if self._order.done(item):
            self._commit_soon(item.work.batch.partition)

    # ------------------------------------------------------------------ what fails

    def _failed(self, item: KeyedEvent, error: Exception) -> None:
        if item.work.lost:
            self._done(item)  # whoever has the lease now handles it
        elif isinstance(error, EarlierEventQuarantined):
            self._put_aside(item, error)
        else:
            self._note_failure(item, error)
            assert item.backoff is not None
            try:
                pause = item.backoff.pause(error)
            except Exception:  # noqa: BLE001 - the same error: it is final
                self._put_aside(item, error)
            else:
                attempt, partition = item.backoff.failures + 1, item.work.batch.partition
                self._running.retries(partition, error, attempt, pause, of=" of this event")
                self._order.pause(item)
                self._running.start(self._again, item, pause)

    async def _again(self, item: KeyedEvent, pause: float) -> None:
        await anyio.sleep(pause)
        if self._order.resume(item):
            self._call_workers()

    def _put_aside(self, item: KeyedEvent, error: Exception) -> None:
        cursor = item.work.batch.cursor
        record = self._failures.record(item.event, cursor, item.index, error, item.key)
        if record is None:
            self._running.ended_by(item.work.batch.partition, error)
            self._running.end(error)
        else:
            self._iteration.handled_at = datetime.now(UTC)
            item.work.quarantined.append(record)
            self._done(item)

    def _note_failure(self, item: KeyedEvent, error: Exception) -> None:
        id, again = item.work.batch.partition, item.backoff is not None
        if item.backoff is None:
            item.backoff = self._failures.backoff()
            self._failing[id] += 1
        text = f"the handler failed with {failure_line(error)}"
        self._planning.partitions[id].handling.event_failed(text, again=again)
        self._running.tell_failure(id, error)

    def _recovered(self, item: KeyedEvent) -> None:
        if item.backoff is None:
            return
        item.backoff, id = None, item.work.batch.partition
        self._failing[id] -= 1
        if not self._failing[id]:
            del self._failing[id]
            self._planning.partitions[id].handling.recovered()

    # ------------------------------------------------------------------ what is committed

    def _commit_soon(self, partition: int) -> None:
        """Commit the first batches of the partition, unless none of them is done."""
        if partition not in self._committing and self._order.complete(partition):
            self._committing.add(partition)
            self._running.start_beside(self._commit, partition)

    async def _commit(self, partition: int) -> None:
        """Save the cursor of the last batch up to which all is done, as long as there is one."""
        try:
            while works := self._order.complete(partition):
                records = [record for work in works for record in work.quarantined]
                await self._save(works[-1].batch, records)
                self.look()  # the save may have found the lease lost
                retired = self._order.retire(works)
                for work in works:
                    if not work.lost:
                        if self._ahead is not None:
                            self._ahead.forget(work)
                        self._settle(work)
                        self._running.quarantined(work.quarantined)
                self._delivery.release(partition, retired)
        finally:
            self._committing.discard(partition)
            self._iteration.wake()

    async def _save_partly(self, partition: int) -> None:
        """Save the cursor of the last checkpoint before which all is done, within a batch."""
        if (found := self._order.last_mark(partition)) is None:
            return
        work, count, cursor = found
        records = [record for record in work.quarantined if record.index < count]
        passed = set(work.ids[:count]).difference(work.ids[count:])
        work.passes = {id: done & passed for id, done in work.passes.items()}
        await self._save(
            replace(work.batch, events=work.batch.events[:count], cursor=cursor), records
        )
        self._running.quarantined(records)

    async def _save(self, batch: Batch, records: list[QuarantinedEvent]) -> None:
        async def save() -> None:
            await self._delivery.commit(batch, lambda: self._failures.save(batch, records))

        await retry(save, self._failures.backoff(), sleep=anyio.sleep)

    def passed(self, partition: int, number: int) -> dict[int, set[str]] | None:
        if self._ahead is None:
            return None
        return self._ahead.passed(self._order.up_to(partition, number))

    def _settle(self, work: KeyedBatch) -> None:
        if work.quarantined and self._failures.held is not None:
            self._failures.held.settled(work.quarantined)


def _awaitable(handled: object) -> Awaitable[object]:
    result: Awaitable[object] = awaitable_of(handled, "the handler", EVENT_HANDLER)
    return result
