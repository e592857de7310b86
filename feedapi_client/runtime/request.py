"""One request of a partition: what is asked, read, buffered and delivered, up to its end."""

from __future__ import annotations

from collections.abc import Iterator

import anyio

from feedapi_client.client import FeedClient, FetchResponse
from feedapi_client.errors import FeedUnavailableError, ProtocolError, TornResponseError
from feedapi_client.protocol.page import CheckpointedEvents, Outcome, PageReader
from feedapi_client.runtime.buffer import EVENT_BYTES
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import ReadEnd, RuntimePartition
from feedapi_client.runtime.slots import Slot, SlotWatch

DELIVERY_BYTES = 256 * 1024
"""Minimum bytes to deliver before a page is complete. Smaller batches cost too much."""
DELIVERY_SECONDS = 0.05
"""Maximum time that events wait for `DELIVERY_BYTES`, checked when the next bytes arrive."""
_PARTS = 8
"""The parts of `Limits.max_batch_events` that are read, and joined, one by one."""
_LINES_BY_KEY = 32
"""By key the last checkpoint of so many lines is kept: a cursor may be saved there at a stop."""
SHARED_STREAM_MILLISECONDS = 5000
"""How long a streamed response lasts when more partitions want to be read than there are slots."""
EMPTY_PAGES_REPORTED = 100
"""Number of responses in a row without an event after which a report is made."""


class SlotPreempted(Exception):  # noqa: N818 - not an error
    """The request was given up so that others can go on; what was checkpointed is kept.

    Attributes:
        silent: the publisher is to blame: it sent no checkpoint while its request had a slot.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent


class RequestStopped(Exception):  # noqa: N818 - not an error
    """The partition was stopped, and perhaps started again, while the request was under way."""


class PartitionRequest:
    """One request of a partition, from sending it to the end of its response."""

    def __init__(
        self,
        driver: Driver,
        client: FeedClient,
        partition: RuntimePartition,
        slot: Slot,
        slots: SlotWatch,
    ) -> None:
        self._driver = driver
        self._client = client
        self._partition = partition
        self._slot = slot
        self._slots = slots
        self._idle_stream = False
        self._heard = False
        self._cut = False
        """The connection was cut while the stream was idle: that is its end (R15). Or its request
        failed, as it does where a gateway does not wait for the first byte of a quiet stream."""
        self._open_since: float | None = None
        """When the first event came that no checkpoint of the stream has closed yet."""
        self._brought_events = False
        self._news = False
        """Whether an event came that others are to read: the rest is not needed."""
        self.info = driver.discovered
        self._stream = self._streamed()
        self._unclosed = 0
        self._reserved = 0
        self._undelivered: int | None = None
        """Bytes that came and are not announced; a cursor alone takes none. None: nothing came."""
        self._delivered_at = 0.0
        self._clock = driver.clock

    def _streamed(self) -> bool | int:
        """Return whether to ask for a long response, or for how many milliseconds.

        The end of a closed partition, and of all without `follow`, shows only in a complete
        response.
        """
        driver = self._driver
        stream, settings = driver.settings.stream, driver.settings
        if not stream or not settings.follow or not self.info.stream or driver.watches:
            return False
        partition, limits = self._partition, driver.limits
        if driver.planner.is_closed(partition.id) or partition.silent_stream:
            return False
        if not driver.streaming.is_tried(partition.id, driver.clock(), limits.stream_idle_timeout):
            return False
        if len(driver.partitions) <= limits.max_concurrent_fetches:
            return stream
        if stream is True:
            return SHARED_STREAM_MILLISECONDS
        return min(stream, SHARED_STREAM_MILLISECONDS)

    async def run(self) -> Outcome | None:
        """Read the response; None when a stream ended while it was idle.

        Checkpointed events are in the partition's buffer even after an error. Raises `FeedError`,
        `SlotPreempted` when its slot or its bytes are needed elsewhere, and `RequestStopped` when
        it was cancelled because its partition was stopped.
        """
        slot = self._slot
        try:
            with slot.scope:
                return await self._run()
        except FeedUnavailableError:
            self._cut = True
            raise
        finally:
            self._note_silence()
        if slot.stopped:
            raise RequestStopped
        innocent = slot.brought or slot.waits_for_room or self._idle_stream
        raise SlotPreempted(silent=not innocent)

    async def _run(self) -> Outcome | None:
        """Read the response. A stream that brings nothing for too long is ended (R15).

        Otherwise there is no scope: it takes longer to enter one than to read most pages.
        """
        if not self._stream:
            return await self._respond(None)
        timeout = self._driver.limits.stream_idle_timeout
        with anyio.CancelScope(deadline=self._clock() + timeout) as idle:
            return await self._respond(idle)
        return None

    async def _respond(self, idle: anyio.CancelScope | None) -> Outcome | None:
        partition = self._partition
        opened = self._open()
        outcome: Outcome | None = None
        async with opened as response:
            partition.answered(stream=self._stream)
            now, limits = self._clock(), self._driver.limits
            self._driver.pace.passed(now, began=self._slot.began)
            self._slot.answered(now, limits.stream_idle_timeout if self._stream else 0.0)
            self._idle_stream = idle is not None
            reader = response.reader
            try:
                await self._read(response, idle)
                if self._news:
                    outcome = Outcome.PROGRESS
                elif not self._cut:
                    outcome = self._finish(reader)
            finally:
                self._close(reader)
        if outcome is Outcome.END and not self._slot.stopped:
            partition.reached_end(ReadEnd(reader.asked, reader.closed))
        return outcome

    def _open(self) -> FetchResponse:
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

    async def _read(self, response: FetchResponse, idle: anyio.CancelScope | None) -> None:
        """Read the body. `idle` ends a stream that brings nothing; None for a page."""
        reader, limits, buffer = response.reader, self._driver.limits, self._driver.buffer
        partition = self._partition
        self._delivered_at = self._clock()
        await self._make_room(reader)
        if idle is not None:
            idle.deadline = self._clock() + limits.stream_idle_timeout
        waits = True
        try:
            async for chunk in response.chunks():
                waits = False
                if idle is not None:
                    idle.deadline = float("inf")
                    if not self._heard:
                        self._heard = True
                        self._driver.streaming.heard()
                self._slot.seen = self._clock()
                before = partition.pending_bytes + self._unclosed
                self._take(reader, chunk)
                if self._news:
                    return
                self._update_buffer(reader)
                buffer.learn(partition.pending_bytes + self._unclosed - before)
                self._idle_stream = bool(self._stream) and not reader.kept_bytes
                reader.check()
                self._deliver_in_time()
                await self._make_room(reader)
                if idle is not None:
                    now = self._clock()
                    if not reader.unclosed_events:
                        self._open_since = None
                    elif self._open_since is None:
                        self._open_since = now
                    since = now if self._open_since is None else self._open_since
                    idle.deadline = since + limits.stream_idle_timeout
                waits = True
        except TornResponseError:
            if not waits or not self._idle_stream:
                raise
            self._cut = True

    def _take(self, reader: PageReader, chunk: bytes) -> None:
        most = self._driver.limits.max_batch_events
        for part in _parts(chunk, most and max(most // _PARTS, 1)):
            for batch in self._feed(reader, part):
                self._receive(batch)

    def _feed(self, reader: PageReader, part: bytes) -> list[CheckpointedEvents]:
        if not self._driver.overlaps:
            return reader.feed(part)
        few = _parts(part, _LINES_BY_KEY)
        return _marked([batch for lines in few for batch in reader.feed(lines)])

    def _finish(self, reader: PageReader) -> Outcome:
        finished = reader.finish(self._clock())
        for batch in finished.batches:
            self._receive(batch)
        empty = self._partition.progress.empty
        if empty and empty % EMPTY_PAGES_REPORTED == 0 and finished.outcome is Outcome.PROGRESS:
            self._driver.report_failure(
                self._partition.id,
                f"{empty} responses in a row moved the cursor and held no event",
            )
        self._heard = True
        if self._partition.silent_stream and not self._stream:
            self._compare_with_stream()
        return Outcome.PROGRESS if self._news else finished.outcome

    def _note_silence(self) -> None:
        """A stream that brought nothing at all, for long: ask once without it (R14).

        So is one that was ended early because others wait for the slot: if a proxy holds streams
        back, each of them is ended before the proxy passes anything on.
        """
        limits, slot = self._driver.limits, self._slot
        if not self._stream or slot.stopped:
            return
        if self._cut and not self._heard:
            self._partition.stream_was_silent(cut_short=True)
            return
        if self._heard:
            since = self._open_since
            if since is not None and self._clock() >= since + limits.stream_idle_timeout:
                self._partition.stream_was_silent(cut_short=False)
            return
        cut_short = slot.age < min(limits.slot_timeout, limits.stream_idle_timeout)
        if not cut_short or (slot.given_back and slot.answering):
            self._partition.stream_was_silent(cut_short=cut_short)

    def _compare_with_stream(self) -> None:
        """Compare a response with the silent stream before it.

        A stream that was ended early proves nothing: events may have come since. Nor does one where
        partitions wait for slots, as this request did.
        """
        driver, partition = self._driver, self._partition
        shared = len(driver.partitions) > driver.limits.max_concurrent_fetches
        proves_nothing = partition.stream_cut_short or shared
        partition.asked_without_stream()
        if not self._brought_events:
            driver.streaming.stayed_silent(partition.id)
            return
        seconds = None if proves_nothing else driver.streaming.held_back(self._clock())
        if seconds is None:
            return
        driver.report(
            partition.id,
            "a streamed response brought nothing, and the same request without stream brought "
            "events at once: a proxy buffers responses (with nginx, proxy_buffering off ends "
            "that), or no checkpoint comes before their end. The feed is polled instead; a stream "
            "is tried again in "
            f"{seconds / 60:.0f} minutes",
        )

    def _close(self, reader: PageReader) -> None:
        """Keep checkpointed events, and drop the others: they are fetched again."""
        for batch in reader.rest():
            self._receive(batch)
        self._unreserve()
        self._driver.buffer.free(self._unclosed)
        self._unclosed = 0
        self._deliver()
        if reader.unknown_commands:
            self._partition.commands_came(reader.unknown_commands)
            self._driver.timer.perhaps()  # perhaps "list the partitions again" (R10)

    # ------------------------------------------------------------------ towards the application

    def _receive(self, batch: CheckpointedEvents) -> None:
        if self._slot.stopped or self._news:
            return  # the partition was stopped: it reads again from what was delivered
        if self._driver.watches and batch.events:
            self._news = True
            self._partition.received_news()
        else:
            self._partition.received(batch)
        self._brought_events |= bool(batch.events)
        self._slots.brought(self._slot)
        self._undelivered = (self._undelivered or 0) + batch.size

    def _deliver_in_time(self) -> None:
        if self._undelivered is None:
            return
        enough = bool(self._stream) or self._undelivered >= DELIVERY_BYTES
        if enough or self._clock() - self._delivered_at > DELIVERY_SECONDS:
            self._deliver()

    def _deliver(self) -> None:
        self._undelivered = None
        self._delivered_at = self._clock()
        self._driver.announce(self._partition)

    # ------------------------------------------------------------------ back-pressure (R16)

    def _update_buffer(self, reader: PageReader) -> None:
        """Update the count of bytes that no checkpoint closed yet."""
        self._unreserve()
        unclosed = reader.kept_bytes + reader.unclosed_events * EVENT_BYTES
        self._driver.buffer.add(unclosed - self._unclosed)
        self._unclosed = unclosed

    def _unreserve(self) -> None:
        self._driver.buffer.unreserve(self._reserved)
        self._reserved = 0

    async def _make_room(self, reader: PageReader) -> None:
        """Stop reading from the socket until there is room for one more read."""
        limits, buffer, partition = self._driver.limits, self._driver.buffer, self._partition
        while partition.pending_size >= limits.max_batch_bytes or not buffer.has_room:
            self._deliver()
            self._slot.waits_for_room = True
            await self._wait_for_room(reader)
            self._slot.waits_for_room = False
            self._slot.seen = self._clock()
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
        while partition.pending_size >= limits.max_batch_bytes:
            await partition.taken().wait()


def _marked(batches: list[CheckpointedEvents]) -> list[CheckpointedEvents]:
    """Return the batches as at most one, with their ends marked."""
    events, size, marks = [], 0, []
    for batch in batches:
        events += batch.events
        size += batch.size
        marks.append((len(events), batch.cursor))
    return [CheckpointedEvents(events, marks[-1][1], size, marks)] if marks else []


def _parts(chunk: bytes, lines: int | None) -> Iterator[bytes]:
    """Cut a chunk into parts of so many lines: what one part closes is one batch.

    Parts of an eighth of a batch's events are joined to batches that come close to it.
    """
    if lines is None:
        yield chunk
        return
    start = 0
    while start < len(chunk):
        end = start
        for _ in range(lines):
            end = chunk.find(b"\n", end) + 1
            if not end:
                end = len(chunk)
                break
        yield chunk[start:end]
        start = end
