"""One request after the other for each partition: what is asked, read, retried and refused."""

from __future__ import annotations

import anyio

from feedapi_client.client import FeedClient, Response
from feedapi_client.errors import (
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.lineage.planner import State
from feedapi_client.model import FIRST, LAST, FeedInfo
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.protocol.page import Outcome, PageReader
from feedapi_client.protocol.text import excerpt
from feedapi_client.runtime.buffer import EVENT_BYTES
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.failures import AskedAs
from feedapi_client.runtime.partition import ReadEnd, RuntimePartition
from feedapi_client.runtime.slots import Slot, SlotWatch

DELIVERY_BYTES = 256 * 1024
"""Within a page, delivering less than this at a time costs more than it brings forward."""
DELIVERY_SECONDS = 0.05
"""When the next bytes arrive, what came before them waits no longer than this for its page."""
SHARED_STREAM_MILLISECONDS = 5000
"""How long a streamed response lasts when more partitions want to be read than there are slots."""
UNWINDING_SECONDS = 0.05
"""After which a partition is looked at again whose cancelled request is not over yet."""
EMPTY_PAGES_REPORTED = 100
"""So many responses in a row that only moved the cursor are reported."""


class SlotPreempted(Exception):  # noqa: N818 - not an error
    """The request was given up so that others can go on; what was checkpointed is kept.

    Attributes:
        silent: the publisher is to blame: it sent no checkpoint while its request had a slot.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent


class Fetching:
    """Runs the requests of all partitions, in the scheduler's slots."""

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self._client = client
        limits, scheduler = driver.limits, driver.scheduler
        self.slots = SlotWatch(limits.slot_timeout, scheduler.slots, lambda: scheduler.waiting)

    async def work(self, partition: RuntimePartition) -> None:
        """The scheduler's job: one request, and what follows from it. Raises `StoreError`."""
        if not partition.started:
            return
        if partition.fetching:
            self._driver.scheduler.schedule(partition, UNWINDING_SECONDS)
            return
        scope = anyio.CancelScope()
        slot = Slot(partition.failures.slot_doublings, failing=partition.failing)
        try:
            with scope:
                await self._fetch(partition, scope, slot)
        finally:
            partition.end_request(scope)

    async def _fetch(
        self, partition: RuntimePartition, scope: anyio.CancelScope, slot: Slot
    ) -> None:
        driver, asked = self._driver, partition.read_cursor
        request = _Request(driver, self._client, partition, scope, slot, self.slots)
        partition.begin_request(scope)
        result: Outcome | SlotPreempted | FeedError | None
        try:
            with self.slots.holding(slot):
                result = await request.run()
        except (SlotPreempted, FeedError) as error:
            result = error
        partition.end_request(scope)
        if scope.cancel_called:
            # Its last bytes were there before the cancellation was delivered. The partition was
            # stopped, and perhaps started again: nothing follows from the old request.
            return
        if partition.read_cursor != asked:
            partition.failures.recovered()
        if isinstance(result, SlotPreempted):
            self._preempted(partition, slot, silent=result.silent)
        elif isinstance(result, FeedError):
            await self._failed(partition, result, request.info)
        else:
            partition.failures.recovered()
            if slot.held < driver.limits.slot_timeout / 2:
                partition.failures.answered_quickly()
            await self._finished(partition, result)

    # ------------------------------------------------------------------ a complete response

    async def _finished(self, partition: RuntimePartition, outcome: Outcome | None) -> None:
        """`outcome` is None for a stream that was idle for too long."""
        driver = self._driver
        if outcome is Outcome.NO_PROGRESS:
            error = NoProgressError(outcome.value, feed=driver.feed, partition=partition.id)
            driver.scheduler.schedule(partition, partition.failures.pause_without_progress(error))
        elif outcome is Outcome.END:
            if not partition.pending:
                await self.reached_end(partition)
        else:
            if outcome is Outcome.PROGRESS:
                driver.planner.progressed(partition.id)
                partition.progressed(driver.limits)
            self.resume(partition)

    def resume(self, partition: RuntimePartition) -> None:
        """Fetch on, unless enough is waiting for the application or the end was seen."""
        driver = self._driver
        if not partition.started or partition.fetching or driver.scheduler.is_scheduled(partition):
            return
        if partition.end is not None or partition.failures.refused or partition.error:
            return
        if partition.pending_bytes < driver.limits.max_batch_bytes:
            # Cursors that move on every request, without an event, must not make a busy loop.
            busy = partition.progress.empty > driver.limits.max_attempts_without_progress
            driver.scheduler.schedule(partition, driver.limits.poll_interval if busy else 0.0)

    async def reached_end(self, partition: RuntimePartition) -> None:
        """The end was seen and everything before it delivered: tell the planner.

        The end travels behind the last batch, so that it can't overtake one.
        """
        driver = self._driver
        end = partition.take_end()
        actions = driver.planner.ended(partition.id, end.cursor, asked_closed=end.closed)
        await driver.apply(actions)
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

    # ------------------------------------------------------------------ errors

    def _preempted(self, partition: RuntimePartition, slot: Slot, *, silent: bool) -> None:
        """Others need the slot, or the room that is left in the buffer (R14, R16)."""
        driver = self._driver
        if not silent:
            if not partition.pending:
                driver.scheduler.schedule(partition, driver.limits.poll_interval)
            return
        error = FeedUnavailableError(
            f"no checkpoint came within {slot.held:.1f} s, and other partitions wait for the slot",
            feed=driver.feed,
            partition=partition.id,
        )
        pause = partition.failures.gave_slot_back(error)
        driver.failure_log.warn(partition.id, f"{error}; the next attempt in {pause:.1f} s")
        driver.scheduler.schedule(partition, pause)

    async def _failed(
        self, partition: RuntimePartition, error: FeedError, asked_of: FeedInfo
    ) -> None:
        driver = self._driver
        if isinstance(error, RequestRefusedError):
            await self._refused(partition, error, asked_of)
            return
        try:
            pause = partition.failures.failed(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        attempt = partition.failures.attempts + 1
        driver.failure_log.warn(partition.id, f"{error}; attempt {attempt} in {pause:.1f} s")
        driver.scheduler.schedule(partition, pause)

    async def _refused(
        self, partition: RuntimePartition, error: RequestRefusedError, asked_of: FeedInfo
    ) -> None:
        """400, 404, 409, 410: discover again, then ask again, for `refused_for` (R10)."""
        driver, failures = self._driver, partition.failures
        outdated = asked_of is not driver.discovered
        try:
            pause = failures.refuse(error, AskedAs.of(asked_of), outdated=outdated)
        except RequestRefusedError:
            await driver.fail_partition(partition, self._final(partition, error))
            return
        driver.failure_log.warn(
            partition.id, f"{error}; a new discovery and the next attempt in {pause:.1f} s"
        )
        if failures.refused:
            driver.timer.refused(pause)
        else:
            driver.scheduler.schedule(partition, pause)

    def _final(self, partition: RuntimePartition, error: RequestRefusedError) -> FeedError:
        """What to raise for a partition that refused its requests for too long."""
        cursor = partition.read_cursor
        times = (
            f"{error.message}. It has done so for {partition.failures.refused_seconds:.0f} s, "
            "while discovery lists the partition"
        )
        kind: type[ProtocolError] = ProtocolError
        if error.status == 409:
            advice = "Its fetches don't accept the token that its discovery gives"
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
        final.__cause__ = error
        return final


class _Request:
    """One request of a partition, from asking to its end."""

    def __init__(
        self,
        driver: Driver,
        client: FeedClient,
        partition: RuntimePartition,
        scope: anyio.CancelScope,
        slot: Slot,
        slots: SlotWatch,
    ) -> None:
        self._driver = driver
        self._client = client
        self._partition = partition
        self._scope = scope
        self._slot = slot
        self._slots = slots
        self._idle_stream = False
        self.info = driver.discovered
        self._stream = self._streamed()
        self._unclosed = 0
        self._reserved = 0
        self._undelivered = 0
        self._delivered_at = 0.0

    def _streamed(self) -> bool | int:
        """Whether a long response is asked for, and for how many milliseconds.

        The end of a closed partition, and of all without `follow`, shows only in a complete
        response.
        """
        driver = self._driver
        stream, settings = driver.settings.stream, driver.settings
        if not stream or not settings.follow or not self.info.stream:
            return False
        if driver.planner.is_closed(self._partition.id):
            return False
        if len(driver.partitions) <= driver.limits.max_concurrent_fetches:
            return stream
        if stream is True:
            return SHARED_STREAM_MILLISECONDS
        return min(stream, SHARED_STREAM_MILLISECONDS)

    async def run(self) -> Outcome | None:
        """Read the response; None when a stream was ended because it was idle for too long.

        What was checkpointed is in the partition, whatever happens. Raises `FeedError`, and
        `SlotPreempted` when its slot or its bytes are needed elsewhere.
        """
        slot = self._slot
        with slot.scope:
            return await self._run()
        innocent = slot.brought or slot.waits_for_room or self._idle_stream
        raise SlotPreempted(silent=not innocent)

    async def _run(self) -> Outcome | None:
        partition = self._partition
        opened = self._open()
        outcome: Outcome | None = None
        async with opened as response:
            partition.answered(streamed=bool(self._stream))
            self._idle_stream = bool(self._stream)
            reader = response.reader
            try:
                with anyio.CancelScope() as idle:
                    await self._read(response, idle)
                    outcome = self._finish(reader)
            finally:
                self._close(reader)
        if outcome is Outcome.END and not self._scope.cancel_called:
            partition.reached_end(ReadEnd(reader.asked, reader.closed))
        return outcome

    def _open(self) -> Response:
        partition = self._partition
        try:
            return self._client.open(
                self.info,
                partition.id,
                partition.read_cursor,
                stream=self._stream,
                progress=partition.progress,
            )
        except UnicodeError as error:
            raise ProtocolError(
                "its cursor can't be sent: it is not text that UTF-8 can carry",
                feed=self._driver.feed,
                partition=partition.id,
            ) from error

    async def _read(self, response: Response, idle: anyio.CancelScope) -> None:
        """Read the body. A stream that brings nothing for too long is ended by `idle` (R15)."""
        reader, limits, buffer = response.reader, self._driver.limits, self._driver.buffer
        partition = self._partition
        self._delivered_at = anyio.current_time()
        await self._make_room(reader)
        if self._stream:
            idle.deadline = anyio.current_time() + limits.stream_idle_timeout
        async for chunk in response.chunks():
            if self._stream:
                idle.deadline = float("inf")
            before = partition.pending_bytes + self._unclosed
            for batch in reader.feed(chunk):
                self._receive(batch)
            self._update_buffer(reader)
            buffer.learn(partition.pending_bytes + self._unclosed - before)
            self._idle_stream = bool(self._stream) and not reader.unclosed_bytes
            reader.check()
            self._deliver_in_time()
            await self._make_room(reader)
            if self._stream:
                idle.deadline = anyio.current_time() + limits.stream_idle_timeout

    def _finish(self, reader: PageReader) -> Outcome:
        finished = reader.finish()
        for batch in finished.batches:
            self._receive(batch)
        empty = self._partition.progress.empty
        if empty and empty % EMPTY_PAGES_REPORTED == 0 and finished.outcome is Outcome.PROGRESS:
            self._driver.report_failure(
                self._partition.id,
                f"{empty} responses in a row moved the cursor and held no event",
            )
        return finished.outcome

    def _close(self, reader: PageReader) -> None:
        """Keep what was checkpointed; what no checkpoint closed is fetched again."""
        for batch in reader.rest():
            self._receive(batch)
        self._unreserve()
        self._driver.buffer.free(self._unclosed)
        self._unclosed = 0
        self._deliver()
        if reader.unknown_commands:
            self._driver.timer.perhaps()  # perhaps "list the partitions again" (R10)

    # ------------------------------------------------------------------ towards the application

    def _receive(self, batch: CheckpointedEvents) -> None:
        if self._scope.cancel_called:
            return  # the partition was stopped: it reads again from what was delivered
        self._partition.received(batch)
        self._slots.brought(self._slot)
        self._undelivered += batch.size

    def _deliver_in_time(self) -> None:
        at_least = 1 if self._stream else DELIVERY_BYTES
        waited = anyio.current_time() - self._delivered_at
        if self._undelivered >= at_least or (self._undelivered and waited > DELIVERY_SECONDS):
            self._deliver()

    def _deliver(self) -> None:
        self._undelivered = 0
        self._delivered_at = anyio.current_time()
        self._driver.announce(self._partition)

    # ------------------------------------------------------------------ back-pressure (R16)

    def _update_buffer(self, reader: PageReader) -> None:
        """Count what is held back for want of a checkpoint."""
        self._unreserve()
        unclosed = reader.unclosed_bytes + reader.unclosed_events * EVENT_BYTES
        self._driver.buffer.add(unclosed - self._unclosed)
        self._unclosed = unclosed

    def _unreserve(self) -> None:
        self._driver.buffer.unreserve(self._reserved)
        self._reserved = 0

    async def _make_room(self, reader: PageReader) -> None:
        """Stop reading from the socket until there is room for one more read."""
        limits, buffer, partition = self._driver.limits, self._driver.buffer, self._partition
        while partition.pending_bytes >= limits.max_batch_bytes or not buffer.has_room:
            self._deliver()
            self._slot.waits_for_room = True
            await self._wait_for_room(reader)
            self._slot.waits_for_room = False
        if not self._stream:  # which may be silent for long, and would keep the room from others
            self._reserved = buffer.reserve()

    async def _wait_for_room(self, reader: PageReader) -> None:
        limits, buffer, partition = self._driver.limits, self._driver.buffer, self._partition
        while not buffer.has_room:
            if buffer.stuck and self._unclosed >= buffer.used:
                raise reader.too_much_unclosed()
            if buffer.stuck:
                raise SlotPreempted
            await buffer.changed().wait()
        while partition.pending_bytes >= limits.max_batch_bytes:
            await partition.taken().wait()
