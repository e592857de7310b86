"""One request after the other for each partition: what is asked, read, retried and refused."""

from __future__ import annotations

import logging

import anyio

from feedapi_client.client import FeedClient, Response
from feedapi_client.errors import (
    CursorRejectedError,
    FeedError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.lineage.planner import State
from feedapi_client.model import FeedInfo
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.protocol.page import Outcome, PageReader, lagging_error
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import ReadEnd, RuntimePartition

log = logging.getLogger("feedapi_client")

DELIVERY_BYTES = 256 * 1024
"""Minimum bytes to deliver before a page is complete. Smaller batches cost too much."""
DELIVERY_SECONDS = 0.05
"""Maximum time that events wait for `DELIVERY_BYTES`, checked when the next bytes arrive."""
SLOW_APPLICATION_SECONDS = 5.0
"""How long a response is held open for a slow application while others want its slot."""
SHARED_STREAM_MILLISECONDS = 5000
"""How long a streamed response lasts when more partitions want to be read than there are slots."""
FAILING_SHARE = 4
"""At most 1/N of the fetch slots may be used by failing partitions (R14)."""
UNWINDING_SECONDS = 0.05
"""Delay before a partition is scheduled again whose cancelled request is still ending."""
EMPTY_PAGES_REPORTED = 100
"""Number of responses in a row without an event after which a report is made."""


class SlotPreempted(Exception):  # noqa: N818 - not an error
    """The response was ended early to free its slot. Checkpointed events are kept."""


class Fetching:
    """Runs the requests of all partitions, in the scheduler's slots."""

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self._client = client
        self._failing = 0

    async def work(self, partition: RuntimePartition) -> None:
        """Make one request and act on its result: the job of the scheduler. Raises `StoreError`."""
        driver = self._driver
        if not partition.started:
            return
        # Partitions whose requests hang until they time out must not take all slots from those
        # that answer (R14).
        failing = partition.failing
        share = max(1, driver.limits.max_concurrent_fetches // FAILING_SHARE)
        if partition.fetching or (failing and self._failing >= share):
            driver.scheduler.schedule(partition, UNWINDING_SECONDS)
            return
        self._failing += failing
        scope = anyio.CancelScope()
        try:
            with scope:
                await self._fetch(partition, scope)
        finally:
            partition.end_request(scope)
            self._failing -= failing

    async def _fetch(self, partition: RuntimePartition, scope: anyio.CancelScope) -> None:
        driver, asked = self._driver, partition.read_cursor
        request = _Request(driver, self._client, partition, scope)
        partition.begin_request(scope)
        result: Outcome | SlotPreempted | FeedError | None
        try:
            result = await request.run()
        except (SlotPreempted, FeedError) as error:
            result = error
        partition.end_request(scope)
        if scope.cancel_called:
            # The response was complete before the cancellation took effect. The partition was
            # stopped, and perhaps started again, so the result of this request is ignored.
            return
        if isinstance(result, SlotPreempted):
            if not partition.pending:
                driver.scheduler.schedule(partition, driver.limits.poll_interval)
        elif isinstance(result, FeedError):
            if partition.read_cursor != asked:
                partition.recovered()
            await self._failed(partition, result, request.info)
        elif result is Outcome.LAGGING:
            await self._lagging(partition, request.info)
        else:
            partition.recovered()
            await self._finished(partition, result)

    # ------------------------------------------------------------------ a complete response

    async def _finished(self, partition: RuntimePartition, outcome: Outcome | None) -> None:
        """Act on a complete response. `outcome` is None for a stream idle for too long."""
        driver = self._driver
        if outcome is Outcome.NO_PROGRESS:
            error = NoProgressError(outcome.value, feed=driver.feed, partition=partition.id)
            driver.scheduler.schedule(partition, partition.pause_without_progress(error))
        elif outcome is Outcome.SILENT:
            driver.scheduler.schedule(partition, driver.limits.poll_interval)
        elif outcome is Outcome.END:
            if not partition.pending:
                await self.reached_end(partition)
        else:
            if outcome is Outcome.PROGRESS:
                driver.planner.progressed(partition.id)
                partition.progressed(driver.limits)
            self.resume(partition)

    def resume(self, partition: RuntimePartition) -> None:
        """Schedule the next fetch, unless enough is buffered or the end was seen."""
        driver = self._driver
        if not partition.started or partition.fetching or driver.scheduler.is_scheduled(partition):
            return
        if partition.end is not None or partition.refused or partition.error is not None:
            return
        if partition.pending_bytes < driver.limits.max_batch_bytes:
            # Cursors that move on every request, without an event, must not make a busy loop.
            busy = partition.progress.empty > driver.limits.max_attempts_without_progress
            driver.scheduler.schedule(partition, driver.limits.poll_interval if busy else 0.0)

    async def reached_end(self, partition: RuntimePartition) -> None:
        """Report the end to the planner, once everything before it is delivered.

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

    async def _lagging(self, partition: RuntimePartition, asked_of: FeedInfo) -> None:
        """A closed partition seems to end before its `lastCursor`: ask again for a while (R6)."""
        driver = self._driver
        last_cursor = asked_of.partitions[partition.id].last_cursor
        error = lagging_error(
            partition.read_cursor, last_cursor, feed=driver.feed, partition=partition.id
        )
        try:
            pause = partition.lags(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        if partition.lags_for_long():
            driver.report(partition.id, error.message)
        driver.scheduler.schedule(partition, pause)

    # ------------------------------------------------------------------ errors

    async def _failed(
        self, partition: RuntimePartition, error: FeedError, asked_of: FeedInfo
    ) -> None:
        driver = self._driver
        if isinstance(error, RequestRefusedError):
            await self._refused(partition, error, asked_of)
            return
        try:
            pause = partition.failed(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        log.warning("%s; attempt %d in %.1f s", error, partition.attempts + 1, pause)
        driver.scheduler.schedule(partition, pause)

    async def _refused(
        self, partition: RuntimePartition, error: RequestRefusedError, asked_of: FeedInfo
    ) -> None:
        """Request a discovery after a 400, 404, 409 or 410, to fetch again after it (R10)."""
        driver = self._driver
        info = driver.discovered
        if asked_of is not info:
            driver.scheduler.schedule(partition)
            return
        asked_as = (info.dialect, info.token)
        # A feed that changed between two refusals explains them both, for a while.
        same_feed = error.status != 409 and partition.refused_as == asked_as
        refusals = partition.refuse(error, asked_as)
        if refusals >= (2 if same_feed else driver.limits.max_attempts_without_progress):
            await driver.fail_partition(partition, self._final(partition, error, refusals))
        else:
            driver.timer.soon()

    def _final(
        self, partition: RuntimePartition, error: RequestRefusedError, refusals: int
    ) -> FeedError:
        final: FeedError
        if error.status == 409:
            final = ProtocolError(
                f"409 Conflict again, {refusals} times, each with the token of a new discovery",
                feed=self._driver.feed,
                partition=partition.id,
            )
        else:
            final = CursorRejectedError(
                f"the partition is listed and refuses the cursor {partition.read_cursor!r} with "
                f"{error.status}: {error.message}. Reset its cursor if the publisher no longer has "
                "that place",
                feed=self._driver.feed,
                partition=partition.id,
            )
        final.__cause__ = error
        return final


class _Request:
    """One request of a partition, from sending it to the end of its response."""

    def __init__(
        self,
        driver: Driver,
        client: FeedClient,
        partition: RuntimePartition,
        scope: anyio.CancelScope,
    ) -> None:
        self._driver = driver
        self._client = client
        self._partition = partition
        self._scope = scope
        self.info = driver.discovered
        self._stream = self._streamed()
        self._unclosed = 0
        self._reserved = False
        self._undelivered = 0
        self._delivered_at = 0.0

    def _streamed(self) -> bool | int:
        """Return whether to ask for a long response, or for how many milliseconds.

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

        Checkpointed events are in the partition's buffer even after an error. Raises `FeedError`,
        and `SlotPreempted` when its slot or its bytes are needed elsewhere.
        """
        partition = self._partition
        opened = self._client.open(
            self.info,
            partition.id,
            partition.read_cursor,
            stream=self._stream,
            progress=partition.progress,
        )
        outcome: Outcome | None = None
        async with opened as response:
            partition.answered(streamed=bool(self._stream))
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

    async def _read(self, response: Response, idle: anyio.CancelScope) -> None:
        """Read the body. A stream that brings nothing for too long is ended by `idle` (R15)."""
        reader, limits = response.reader, self._driver.limits
        self._delivered_at = anyio.current_time()
        await self._make_room(reader)
        if self._stream:
            idle.deadline = anyio.current_time() + limits.stream_idle_timeout
        async for chunk in response.chunks():
            if self._stream:
                idle.deadline = float("inf")
            for batch in reader.feed(chunk):
                self._receive(batch)
            self._update_buffer(reader)
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
            self._driver.report(
                self._partition.id,
                f"{empty} responses in a row moved the cursor and held no event",
            )
        return finished.outcome

    def _close(self, reader: PageReader) -> None:
        """Keep checkpointed events, and drop the others: they are fetched again."""
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
        """Update the count of bytes that no checkpoint closed yet."""
        self._unreserve()
        unclosed = reader.unclosed_bytes
        self._driver.buffer.add(unclosed - self._unclosed)
        self._unclosed = unclosed

    def _unreserve(self) -> None:
        if self._reserved:
            self._reserved = False
            self._driver.buffer.unreserve()

    async def _make_room(self, reader: PageReader) -> None:
        """Stop reading from the socket until there is room for one more read."""
        limits, buffer, partition = self._driver.limits, self._driver.buffer, self._partition
        while partition.pending_bytes >= limits.max_batch_bytes or not buffer.has_room:
            self._deliver()
            await self._wait_for_room(reader)
        if not self._stream:  # which may be silent for long, and would keep the room from others
            buffer.reserve()
            self._reserved = True

    async def _wait_for_room(self, reader: PageReader) -> None:
        limits, buffer, partition = self._driver.limits, self._driver.buffer, self._partition
        while not buffer.has_room:
            if buffer.stuck and self._unclosed >= buffer.used:
                raise reader.too_much_unclosed()
            if buffer.stuck:
                raise SlotPreempted
            await self._wait(buffer.changed())
        while partition.pending_bytes >= limits.max_batch_bytes:
            await self._wait(partition.taken())

    async def _wait(self, event: anyio.Event) -> None:
        with anyio.move_on_after(SLOW_APPLICATION_SECONDS):
            await event.wait()
        if not event.is_set() and self._driver.scheduler.contended:
            raise SlotPreempted
