"""One request after the other for each partition: what follows from each."""

from __future__ import annotations

import logging

from feedapi_client.client import FeedClient
from feedapi_client.errors import (
    AuthenticationError,
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
    TransportError,
)
from feedapi_client.lineage.planner import Entry, Start, State
from feedapi_client.model import FIRST, LAST, FeedInfo
from feedapi_client.notifications import FetchEnded, error_text
from feedapi_client.options import default_decision
from feedapi_client.pace import limits_requests
from feedapi_client.protocol.page import (
    Outcome,
    behind_error,
    lagging_error,
    unrecognized_error,
)
from feedapi_client.protocol.text import excerpt
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.failures import (
    CURSOR_REFUSALS,
    AskedAs,
    is_of_gateway,
    is_refusal,
)
from feedapi_client.runtime.late import LateEvents
from feedapi_client.runtime.partition import ReadEnd, RuntimePartition
from feedapi_client.runtime.request import PartitionRequest, RequestStopped, SlotPreempted
from feedapi_client.runtime.slots import Slot, SlotWatch

log = logging.getLogger(__name__)

UNWINDING_SECONDS = 0.05
"""Delay before a partition is scheduled again whose cancelled request is still ending."""


class Fetching:
    """Runs the requests of all partitions, in the scheduler's slots."""

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self._client = client
        limits, scheduler = driver.limits, driver.scheduler
        self.late = LateEvents(driver, client)
        self.slots = SlotWatch(limits.slot_timeout, scheduler.slots, lambda: scheduler.waiting)

    def watch(self) -> None:
        """Only ask from now on whether there is an event: others read it."""
        self._driver.watches = True
        self._client = self._client.asking_for_one()
        self.late.client = self._client

    async def work(self, partition: RuntimePartition) -> float | None:
        """Make one request and act on its result: the job of the scheduler.

        Return the seconds after which the partition is asked again in its old place among those
        that wait; None otherwise. Raises `StoreError`.
        """
        if self._driver.waits_paused(partition):
            return None
        if not partition.started:
            return await self.late.look(partition)
        if not partition.entry.running:
            return None  # its `Stop` is not carried out yet
        if self._driver.watches and (partition.pending or partition.in_flight):
            return None  # it is asked on from where others have read it to
        if partition.fetching:
            self._driver.scheduler.schedule(partition, UNWINDING_SECONDS)
            return None
        slot = Slot(
            partition.failures.slot_doublings,
            failing=partition.failing,
            clock=self._driver.clock,
        )
        try:
            return await self._fetch(partition, slot)
        except RequestStopped:
            return None
        finally:
            partition.end_request(slot.scope)

    async def _fetch(self, partition: RuntimePartition, slot: Slot) -> float | None:
        driver, asked = self._driver, partition.read_cursor
        request = PartitionRequest(driver, self._client, partition, slot, self.slots)
        partition.begin_request(slot.scope, slot)
        result: Outcome | SlotPreempted | FeedError | None
        self.slots.hold(slot)
        try:
            result = await request.run()
        except (SlotPreempted, FeedError) as error:
            result = error
        finally:
            self.slots.release(slot)
        partition.end_request(slot.scope)
        self._log_request(partition, asked, result, slot)
        if slot.stopped:
            # The response was complete before the cancellation took effect. The partition was
            # stopped, and perhaps started again, so the result of this request is ignored.
            return None
        if partition.read_cursor != asked:
            partition.failures.recovered()
            driver.sound_at = driver.clock()
        self._note(partition, slot, result)
        if isinstance(result, SlotPreempted):
            self._preempted(partition, slot, silent=result.silent)
        elif isinstance(result, FeedError) and limits_requests(result):
            return await self._limited(partition, result, request.info, slot)
        elif isinstance(result, FeedError):
            await self._failed(partition, result, request.info)
        elif result is Outcome.LAGGING:
            await self._lagging(partition, request.info)
        elif result is Outcome.UNRECOGNIZED or result is Outcome.BEHIND:
            await self._without_evidence(partition, result, asked)
        else:
            partition.failures.recovered()
            driver.sound_at = driver.clock()
            if slot.held < driver.limits.slot_timeout / 2:
                partition.failures.answered_quickly()
            await self._finished(partition, result, request.info)
        return None

    def _note(
        self,
        partition: RuntimePartition,
        slot: Slot,
        result: Outcome | SlotPreempted | FeedError | None,
    ) -> None:
        driver, failure = self._driver, result if isinstance(result, FeedError) else None
        if not isinstance(result, SlotPreempted):
            driver.answers.add(driver.clock(), failed=_fails(result))
        for observer in driver.observers:
            observer.fetched(partition.id, slot.age, failure)
        if driver.listeners:
            driver.listeners.tell(FetchEnded(partition.id, slot.age, error_text(failure)))

    def _log_request(
        self,
        partition: RuntimePartition,
        asked: str,
        result: Outcome | SlotPreempted | FeedError | None,
        slot: Slot,
    ) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        feed, outcome = self._driver.feed, "an idle stream"
        if isinstance(result, Outcome):
            outcome = result.name.lower().replace("_", " ")
        elif result is not None:
            outcome = type(result).__name__
        log.debug(
            "feed %s, partition %d: a request from %r ended after %.3f s with %s",
            feed,
            partition.id,
            asked,
            slot.age,
            outcome,
            extra={"feed": feed, "partition": partition.id},
        )

    # ------------------------------------------------------------------ a complete response

    async def _finished(
        self, partition: RuntimePartition, outcome: Outcome | None, asked_of: FeedInfo
    ) -> None:
        """Act on a complete response. `outcome` is None for a stream that ended while idle."""
        driver = self._driver
        if outcome is Outcome.EMPTY or outcome is Outcome.SILENT:
            pause = self._settles_in(partition, asked_of, closed=outcome is Outcome.EMPTY)
            if pause is not None:
                driver.scheduler.schedule(partition, pause)
                return
            partition.reached_end(ReadEnd(partition.read_cursor, outcome is Outcome.EMPTY))
            outcome = Outcome.END
        else:
            partition.contradicted(driver.clock())
        if outcome is Outcome.END:
            if not partition.pending:
                self.reached_end(partition)
                await driver.apply()
        elif outcome is Outcome.DOUBTFUL:
            driver.scheduler.schedule(partition, driver.limits.silent_pause)
        elif outcome is Outcome.NO_PROGRESS:
            error = NoProgressError(outcome.value, feed=driver.feed, partition=partition.id)
            driver.scheduler.schedule(partition, partition.failures.pause_without_progress(error))
        else:
            if outcome is None and not partition.held_open:
                # A proxy cut it at once, or nearly: no more contact than a poll (R15).
                driver.scheduler.schedule(partition, partition.poll_delay)
                partition.polled(driver.limits)
                return
            if outcome is Outcome.PROGRESS:
                driver.planner.progressed(partition.id)
                partition.progressed(driver.limits)
            self.resume(partition)

    def _settles_in(
        self, partition: RuntimePartition, asked_of: FeedInfo, *, closed: bool
    ) -> float | None:
        """Return the seconds until an empty answer is asked for again; None: it is the end (R6)."""
        driver, now = self._driver, self._driver.clock()
        if not closed:
            if driver.settings.follow or partition.was_silent():
                return None
            return driver.limits.silent_pause
        since = max(driver.closed_since.get(partition.id, now), driver.feed_failed_at)
        pause = partition.empty_answer(asked_of, driver.limits, now=now, since=since)
        if pause is not None:
            driver.awaits_evidence(partition)
            if partition.lacks_discovery(driver.discovered):
                driver.timer.soon("a closed partition seems to be at its end")
        return pause

    def resume(self, partition: RuntimePartition) -> None:
        """Schedule the next fetch, unless enough is buffered or the end was seen."""
        driver = self._driver
        if not partition.started or partition.fetching or driver.scheduler.is_scheduled(partition):
            return
        if partition.end is not None or partition.failures.refused or not partition.entry.running:
            return
        if driver.watches and (partition.pending or partition.in_flight):
            return
        if partition.pending_size < driver.limits.max_batch_bytes:
            # Cursors that move on every request, without an event, must not make a busy loop.
            busy = partition.progress.empty > driver.limits.max_attempts_without_progress
            driver.scheduler.schedule(partition, driver.limits.poll_interval if busy else 0.0)

    def reached_end(self, partition: RuntimePartition) -> None:
        """Report the end to the planner, once everything before it is delivered.

        The end travels behind the last batch, so that it can't overtake one. The planner's actions
        are queued: `Driver.apply` carries them out.
        """
        driver = self._driver
        end = partition.take_end()
        driver.defer(driver.planner.ended(partition.id, end.cursor, asked_closed=end.closed))
        entry = partition.entry
        partition.note_caught_up()
        if entry.state is State.CAUGHT_UP and driver.settings.follow:
            driver.scheduler.schedule(partition, partition.poll_delay)
            partition.polled(driver.limits)
        elif entry.state is State.READING and entry.end is not None:
            partition.end_uncommitted(end)  # drained once the application commits
        elif entry.state is State.READING:
            driver.scheduler.schedule(partition)
        driver.wake()

    async def _lagging(self, partition: RuntimePartition, asked_of: FeedInfo) -> None:
        """A closed partition seems to end before its `lastCursor`: ask again for a while (R6)."""
        driver = self._driver
        last_cursor = asked_of.partitions[partition.id].last_cursor
        error = lagging_error(
            partition.read_cursor, last_cursor, feed=driver.feed, partition=partition.id
        )
        try:
            pause = partition.failures.lags(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        self._retried(partition, error)
        if partition.failures.lags_for_long():
            driver.report(partition.id, error.message)
        driver.scheduler.schedule(partition, pause)

    async def _without_evidence(
        self, partition: RuntimePartition, outcome: Outcome, asked: str
    ) -> None:
        """A response that says nothing of the partition, or leads back to an older place (R6)."""
        driver = self._driver
        partition.forget_empty_answers()
        if outcome is Outcome.UNRECOGNIZED:
            if partition.streamed and partition.held_open:
                self.resume(partition)  # held open and idle, whatever kept it alive
                return
            error = unrecognized_error(feed=driver.feed, partition=partition.id)
        else:
            error = behind_error(asked, feed=driver.feed, partition=partition.id)
        ends = not driver.settings.follow or driver.planner.is_closed(partition.id)
        try:
            pause = partition.failures.lags(error, ends=ends)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        self._retried(partition, error)
        if outcome is Outcome.BEHIND or partition.failures.lags_for_long():
            driver.report_failure(partition.id, error.message)
        driver.scheduler.schedule(partition, pause)

    # ------------------------------------------------------------------ for the watchdog

    async def restart(self, partition: RuntimePartition, seconds: float) -> None:
        """End a request that shows no sign of life, and make it again after a pause."""
        driver = self._driver
        if partition.slot is None or partition.slot.restarted:
            return
        partition.slot.restarted = True
        partition.cancel_request()
        error = FeedUnavailableError(
            f"a request showed no sign of life for {seconds:.1f} s",
            feed=driver.feed,
            partition=partition.id,
        )
        try:
            pause = partition.failures.failed(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        driver.scheduler.schedule(partition, pause)

    async def revive(self, entry: Entry) -> None:
        """Read a partition again that nobody reads although it is to be read."""
        partition = self._driver.partition(entry.id)
        self._driver.enqueue(partition)
        if entry.running:
            await self._driver.apply([Start(entry.id, entry.cursor)])

    # ------------------------------------------------------------------ errors

    def _preempted(self, partition: RuntimePartition, slot: Slot, *, silent: bool) -> None:
        """Others need the slot, or the room that is left in the buffer (R14, R16)."""
        driver = self._driver
        if not silent:
            partition.contradicted(driver.clock())  # events may have come
            if not partition.pending:
                driver.scheduler.schedule(partition, driver.limits.poll_interval)
            return
        error = FeedUnavailableError(
            f"no checkpoint came within {slot.held:.1f} s, and other partitions wait for the slot",
            feed=driver.feed,
            partition=partition.id,
        )
        pause = partition.failures.gave_slot_back(error)
        self._retried(partition, error)
        driver.failure_log.warn(partition.id, f"{error}; the next attempt in {pause:.1f} s")
        driver.scheduler.schedule(partition, pause)

    async def _failed(
        self, partition: RuntimePartition, error: FeedError, asked_of: FeedInfo
    ) -> None:
        driver = self._driver
        of_gateway = is_of_gateway(error)
        decides = driver.settings.retry.decide is not default_decision
        if is_refusal(error) and not (of_gateway and decides):
            await self._refused(partition, error, asked_of)
            return
        try:
            pause = partition.failures.failed(error)
        except FeedError as final:
            if of_gateway and not partition.failures.given_up:
                await self._refused(partition, error, asked_of)
            else:
                await driver.fail_partition(partition, final)
            return
        if of_gateway:
            driver.timer.soon("a request was refused")
        attempt = partition.failures.attempts + 1
        self._retried(partition, error)
        driver.failure_log.warn(
            partition.id, f"{error}; attempt {attempt} in {pause:.1f} s", attempt=attempt
        )
        driver.scheduler.schedule(partition, pause)

    async def _limited(
        self, partition: RuntimePartition, error: FeedError, asked_of: FeedInfo, slot: Slot
    ) -> float | None:
        """The publisher limits requests: the whole feed slows down. Return what `work` does."""
        driver, failures = self._driver, partition.failures
        keeps_place = failures.limited(error, driver.pace.count)
        if failures.limited_alone:
            await self._failed(partition, error, asked_of)
            return None
        try:
            driver.slow_down(error, began=slot.began, answering=self.slots.answering)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return None
        self._retried(partition, error)
        pause = failures.ask_when_allowed(driver.pace.own_pause(error))
        if keeps_place:
            return pause
        driver.scheduler.schedule(partition, pause)
        return None

    async def _refused(
        self, partition: RuntimePartition, error: FeedError, asked_of: FeedInfo
    ) -> None:
        """Discover again, then ask again, for `RetryPolicy.refused_for` (R10)."""
        driver, failures = self._driver, partition.failures
        outdated = asked_of is not driver.discovered
        try:
            pause = failures.refuse(error, AskedAs.of(asked_of), outdated=outdated)
        except FeedError:
            await driver.fail_partition(partition, self._final(partition, error))
            return
        self._retried(partition, error)
        if failures.refusals > 1:  # one refusal is how a publisher says that its topology changed
            driver.failure_log.warn(
                partition.id, f"{error}; a new discovery and the next attempt in {pause:.1f} s"
            )
        if failures.refused:
            driver.timer.refused(pause)
        else:
            driver.scheduler.schedule(partition, pause)

    def _retried(self, partition: RuntimePartition, error: FeedError) -> None:
        partition.forget_empty_answers()
        for observer in self._driver.observers:
            observer.fetch_retried(partition.id, error)

    def _final(self, partition: RuntimePartition, error: FeedError) -> FeedError:
        """What to raise for a partition that refused its requests for too long."""
        cursor, status = partition.read_cursor, getattr(error, "status", None)
        times = (
            f"{error.message}. It has done so for {partition.failures.refused_seconds:.0f} s, "
            "while discovery lists the partition"
        )
        kind: type[FeedError] = ProtocolError
        if isinstance(error, AuthenticationError):
            kind, advice = AuthenticationError, "Its discovery is answered all the same"
        elif status == 409:
            advice = "Its fetches don't accept the token that its discovery gives"
        elif status not in CURSOR_REFUSALS:
            kind = TransportError if isinstance(error, TransportError) else ProtocolError
            advice = (
                "Its discovery is answered all the same: look at gateways and proxies on the way"
            )
        elif cursor in (FIRST, LAST):
            advice = f"The cursor can't be at fault, since it is {cursor}"
        else:
            kind = CursorRejectedError
            advice = (
                f"The cursor is '{excerpt(cursor.encode())}'. If this is an outage, start again "
                "later: nothing is lost. Only if the publisher says that it no longer has that "
                "place, reset the cursor, which skips or repeats events"
            )
        final = kind(f"{times}. {advice}", feed=self._driver.feed, partition=partition.id)
        if isinstance(final, (ProtocolError, TransportError)):
            final.status = status
        final.__cause__ = error
        return final


def _fails(result: object) -> bool:
    """Whether an answer is one that says nothing of the feed. A refusal says that it changed."""
    refused = isinstance(result, RequestRefusedError)
    return result is Outcome.UNRECOGNIZED or (isinstance(result, FeedError) and not refused)
