"""Handles the events of one session by key: keys at once, each one's events in order.

What may be handled and what may be committed is decided by `KeyOrder`. This part runs the handlers
in a bounded number of tasks, retries failing events, and saves cursors.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from datetime import UTC, datetime
from types import CoroutineType

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from feedapi_client.arguments import awaitable_of
from feedapi_client.causes import failure_of
from feedapi_client.lineage.planner import State
from feedapi_client.model import Batch, Event
from feedapi_client.notifications import EventQuarantined, HandlerFailed, HandlerRetried
from feedapi_client.quarantine.by_event import EventFailures, Key
from feedapi_client.quarantine.failure_text import failure_line, failure_traceback
from feedapi_client.quarantine.record import EarlierEventQuarantined, QuarantinedEvent
from feedapi_client.retry import Backoff, retry
from feedapi_client.runtime.buffer import memory_of
from feedapi_client.runtime.delivery import TURN_SECONDS, Delivery
from feedapi_client.runtime.done_ahead import DoneAhead, EventIdOf
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.key_order import KeyedBatch, KeyedEvent, KeyOrder, Oldest
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.wakeup import Wakeup

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
    """One `FeedConsumer.run_by_key`.

    Arguments:
        driver, delivery: of the session.
        handle: the application's handler of an event.
        key: gives the key of an event.
        failures: what becomes of events that fail.
        event_id: gives the identity of an event, with which what is done is remembered.
        max_concurrency: handlers at once.
        max_in_flight: events that were delivered and are not committed.
    """

    def __init__(
        self,
        driver: Driver,
        delivery: Delivery,
        handle: EventHandler,
        key: Key,
        failures: EventFailures,
        *,
        event_id: EventIdOf | None = None,
        max_concurrency: int,
        max_in_flight: int,
    ) -> None:
        self.scope = anyio.CancelScope()
        """Cancels what is in flight."""
        self._driver = driver
        self._delivery = delivery
        self._handle = handle
        self._key = key
        self._failures = failures
        self._ahead = None if event_id is None else DoneAhead(driver, event_id, self)
        self._max_concurrency = max_concurrency
        self._max_in_flight = max_in_flight
        self._max_size = driver.limits.max_buffered_bytes
        self._order = KeyOrder()
        self._size = 0
        self._losses = driver.losses
        self._workers = 0
        self._idle: list[Wakeup] = []
        self._turn: object = None
        self._turn_ends = 0.0
        self._committing: set[int] = set()
        self._backoffs: dict[int, Backoff] = {}
        self._failing: dict[int, set[int]] = {}
        self._unkeyed = False
        self._tasks: TaskGroup
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<ByKey {self._workers - len(self._idle)} handlers, {self._order!r}>"

    async def run(self) -> None:
        """Handle events until the end of the feed or a stop.

        Raises what the handler raises, if that ends the iteration, and the session's failure.
        Cancellation cancels the handlers.
        """
        self._delivery.overlap(self)
        try:
            with self.scope:
                async with anyio.create_task_group() as self._tasks:
                    while (batch := await self._delivery.next()) is not None:
                        self._admit(batch)
                    await self._finish()
                    self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if self._failure is not None:
            raise self._failure

    async def _finish(self) -> None:
        """Wait until all that was delivered is handled and committed; after a stop, what was begun.

        The rest comes again, undone. So does what is done behind the cursor: that is then saved as
        far as all before it is done.
        """
        driver = self._driver
        while not self._finished:
            if driver.failure is not None:
                raise driver.failure
            self.look()
            if not self._finished:
                await driver.woken()
        for partition in self._order.partitions:
            await self._save_partly(partition)

    @property
    def _finished(self) -> bool:
        begun = self._workers - len(self._idle)
        done = not begun if self._driver.stopping else self._order.idle
        return done and not self._committing

    # ------------------------------------------------------------------ what is delivered

    def look(self) -> None:
        """Drop what was lost with its lease, so that nothing more of it is begun.

        Of a partition that is given away, what is not begun: it need not be waited for.
        """
        if self._losses == self._driver.losses:
            return
        self._losses = self._driver.losses
        if self._failures.held is not None and self._driver.sharing is not None:
            self._failures.held.stale = True
        for id in self._order.partitions:
            partition, first = self._driver.partitions[id], self._order.first_number(id)
            if partition.is_lost(first):
                last = max(n for n in range(first, partition.batches + 1) if partition.is_lost(n))
                self._dropped(id, self._order.drop(id, last))
            elif partition.entry.state is State.ELSEWHERE:
                self._dropped(id, self._order.drop_unbegun(id))

    def _dropped(self, id: int, lost: list[KeyedBatch]) -> None:
        for work in lost:
            self._settle(work)
            for item in work.open_items:
                if item is not None:
                    self._recovered(item)
        self._delivery.abandon(id, len(lost))
        self._call_workers()

    def fits(self, partition: RuntimePartition) -> bool | None:
        """Whether there is room for the first batch that the partition holds.

        None: it may not be delivered before its partition is queued again.
        """
        if self._ahead is not None and not self._ahead.is_claimed(partition):
            return None
        first = partition.pending[0]
        self._size = memory_of(first)
        order = self._order
        if order.idle:
            return True
        return (
            order.events + len(first.events) <= self._max_in_flight
            and order.size + self._size <= self._max_size
        )

    def oldest(self, partition: int) -> Oldest | None:
        """Return what holds the cursor of the partition back; None where nothing does."""
        return self._order.oldest(partition, self._driver.clock())

    def _admit(self, batch: Batch) -> None:
        driver = self._driver
        partition = driver.partitions[batch.partition]
        number = partition.batches
        work = KeyedBatch(
            batch,
            number=number,
            size=self._size,
            delivered_at=driver.clock(),
            marks=partition.marks,
        )
        if number == 1 and driver.sharing is not None and self._failures.held is not None:
            self._failures.held.stale = True
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
        if self._driver.stopping:
            return  # what is woken is not idle, and would have to be waited for
        wanted = self._order.ready
        while wanted and self._idle:
            self._idle.pop().set()
            wanted -= 1
        for _ in range(min(wanted, self._max_concurrency - self._workers)):
            self._workers += 1
            self._tasks.start_soon(self._work)

    async def _work(self) -> None:
        """Handle one event after the other. No call more than needed: it is the inner loop."""
        driver, order, woken = self._driver, self._order, Wakeup()
        handle, failures, clock, count = self._handle, self._failures, driver.clock, 0
        handled: Awaitable[object]
        while True:
            while not driver.stopping and (item := order.begin()) is not None:
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
                    if self._backoffs or failures.in_a_row:
                        self._driver.handled_at = datetime.now(UTC)
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
            if driver.stopping:
                driver.wake()
            await woken.wait()

    async def _checked(self, item: KeyedEvent) -> None:
        """Handle an event that may have no key, wait for a replay, or be done already."""
        if isinstance(item.key, _NoKey):
            raise item.key.error
        held = self._failures.held
        if held and (earlier := await held.first(item.key)) is not None:
            raise EarlierEventQuarantined(earlier)
        if self._ahead is None:
            await _awaitable(self._handle(item.event))
        else:
            await self._ahead.attempt(item, lambda event: _awaitable(self._handle(event)))

    def _done(self, item: KeyedEvent) -> None:
        """Note the end of an event that was not handled."""
        self._recovered(item)
        if self._order.done(item):
            self._commit_soon(item.work.batch.partition)

    # ------------------------------------------------------------------ what fails

    def _failed(self, item: KeyedEvent, error: Exception) -> None:
        """Retry the event, put it aside, or end the iteration."""
        if item.work.lost:
            self._done(item)  # whoever has the lease now handles it
            return
        if isinstance(error, EarlierEventQuarantined):
            self._put_aside(item, error)
            return
        self._note_failure(item, error)
        backoff = self._backoffs.get(id(item))
        if backoff is None:
            backoff = self._backoffs[id(item)] = self._failures.backoff()
        try:
            pause = backoff.pause(error)
        except Exception:  # noqa: BLE001 - the same error: it is final
            self._put_aside(item, error)
        else:
            self._retry(item, error, pause, backoff.failures + 1)

    def _retry(self, item: KeyedEvent, error: Exception, pause: float, attempt: int) -> None:
        driver, partition = self._driver, self._partition(item)
        partition.handling.pauses(pause)
        if driver.listeners:
            driver.listeners.tell(HandlerRetried(partition.id), error)
        driver.failure_log.warn(
            partition.id,
            lambda: (
                f"feed {driver.feed}, partition {partition.id}: {partition.handling.error}; "
                f"attempt {attempt} of this event in {pause:.1f} s\n"
                f"{failure_traceback(error)}"
            ),
            attempt=attempt,
        )
        self._order.pause(item)
        self._tasks.start_soon(self._again, item, pause)

    async def _again(self, item: KeyedEvent, pause: float) -> None:
        await anyio.sleep(pause)
        if self._order.resume(item):
            self._call_workers()

    def _put_aside(self, item: KeyedEvent, error: Exception) -> None:
        """Quarantine the event, or end the iteration with its error."""
        cursor = item.work.batch.cursor
        record = self._failures.put_aside(item.event, cursor, item.index, item.key, error)
        if record is None:
            self._end(item, error)
        else:
            self._driver.handled_at = datetime.now(UTC)
            item.work.quarantined.append(record)
            self._done(item)

    def _note_failure(self, item: KeyedEvent, error: Exception) -> None:
        partition = self._partition(item)
        text = f"the handler failed with {failure_line(error)}"
        failing = self._failing.setdefault(partition.id, set())
        partition.handling.event_failed(text, again=id(item) in failing)
        failing.add(id(item))
        if self._driver.listeners:
            failed = HandlerFailed(partition.id, type(error).__qualname__)
            self._driver.listeners.tell(failed, error)

    def _recovered(self, item: KeyedEvent) -> None:
        """Note that an event that may have failed is done, or dropped."""
        self._backoffs.pop(id(item), None)
        partition = self._partition(item)
        failing = self._failing.get(partition.id)
        if failing is None or id(item) not in failing:
            return
        failing.discard(id(item))
        if not failing:
            del self._failing[partition.id]
            partition.handling.recovered()

    def _end(self, item: KeyedEvent, error: Exception) -> None:
        """End the iteration with the error of an event."""
        driver, partition = self._driver, self._partition(item)
        if self._failure is None:
            self._failure = error
            driver.ended_by_handler(partition)
            if error is not driver.failure:  # which was logged where it was found
                log.error(
                    "feed %s, partition %d: %s, which ends the iteration\n%s",
                    driver.feed,
                    partition.id,
                    partition.handling.error,
                    failure_traceback(error),
                    extra={"feed": driver.feed, "partition": partition.id},
                )
        self.scope.cancel()

    def _partition(self, item: KeyedEvent) -> RuntimePartition:
        return self._driver.partitions[item.work.batch.partition]

    # ------------------------------------------------------------------ what is committed

    def _commit_soon(self, partition: int) -> None:
        """Commit the first batches of the partition, unless none of them is done."""
        if partition not in self._committing and self._order.complete(partition):
            self._committing.add(partition)
            self._tasks.start_soon(self._commit, partition)

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
                        self._log_quarantined(work.quarantined)
                await self._delivery.release(partition, retired)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, without a group around it
            failed = failure_of(error, "a save or a task beside the handlers", own_task=True)
            self._failure = self._failure or failed
            self.scope.cancel()
        finally:
            self._committing.discard(partition)
            self._driver.wake()

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
        self._log_quarantined(records)

    async def _save(self, batch: Batch, records: list[QuarantinedEvent]) -> None:
        async def save() -> None:
            await self._delivery.commit(batch, lambda: self._failures.save(batch, records))

        await retry(save, self.backoff(), sleep=anyio.sleep)

    def passed(self, partition: int, number: int) -> dict[int, set[str]] | None:
        """Return what is done before the end of a batch; None where nothing is remembered."""
        if self._ahead is None:
            return None
        return self._ahead.passed(self._order.up_to(partition, number))

    def backoff(self) -> Backoff:
        """Return the backoff of one operation of the store."""
        return self._failures.backoff()

    def begin(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task beside the handlers. An error of it ends the iteration."""
        self._tasks.start_soon(self._run_beside, task)

    async def _run_beside(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except BaseException as error:  # noqa: BLE001 - raised by `run`, without a group around it
            failed = failure_of(error, "a save or a task beside the handlers", own_task=True)
            self._failure = self._failure or failed
            self.scope.cancel()

    def _settle(self, work: KeyedBatch) -> None:
        if work.quarantined and self._failures.held is not None:
            self._failures.held.settled(work.quarantined)

    def _log_quarantined(self, records: list[QuarantinedEvent]) -> None:
        for record in records:
            self._driver.partitions[record.partition].handling.quarantine()
            if self._driver.listeners:
                told = EventQuarantined(record.partition, record.error_type)
                self._driver.listeners.tell(told)
            log.warning(
                "feed %s, partition %d: quarantined event %s (number %d up to cursor %r): "
                "the handler failed with %s",
                self._driver.feed,
                record.partition,
                record.id,
                record.index,
                record.cursor,
                record.error_type,
                extra={"feed": self._driver.feed, "partition": record.partition},
            )


def _awaitable(handled: object) -> Awaitable[object]:
    result: Awaitable[object] = awaitable_of(handled, "the handler", EVENT_HANDLER)
    return result
