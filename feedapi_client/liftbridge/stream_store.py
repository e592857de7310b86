"""A cursor store that is the Liftbridge stream: events and their cursor are written together.

The stream needs optimistic concurrency control. Every message is published with the offset that it
must get, so the broker refuses what a second relay writes. All that a relay writes is in one
partition of the stream: that gives one order, and one place to recover from.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from feedapi_client.errors import StoreError
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    IncorrectOffsetError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
    RelayFencedError,
    StreamError,
    StreamGapError,
)
from feedapi_client.liftbridge.headers import ATTEMPT, COUNT, INDEX, SNAPSHOT
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.publishing import StreamPublisher
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.liftbridge.stream_end import EndOffsets, StreamEnd, write_backoff
from feedapi_client.liftbridge.stream_format import (
    Attempt,
    MessageFormat,
    SettledAttempts,
    snapshot_offset,
)
from feedapi_client.liftbridge.stream_rows import OutgoingBatch, Row, batch_rows, positions_rows
from feedapi_client.liftbridge.stream_state import StreamState
from feedapi_client.model import FeedKey, Position, Status
from feedapi_client.retry import retry
from feedapi_client.stores.base import check_predecessor

logger = logging.getLogger(__name__)

_READ_TIMEOUT = 60.0
_WINDOW_GROWTH = 16


class StreamCursorStore:
    """Keeps positions in a stream with optimistic concurrency control, beside their events.

    One store serves one feed key. `save` takes an `OutgoingBatch` as its transaction. A batch whose
    acks are lost is looked up in the stream, and written again when it is not there.

    Arguments:
        publisher: an open publisher.
        api: an open connection to the broker's gRPC API.
        stream: the stream.
        partition: the stream's partition that holds everything.
        format: what one message holds. ``"batch"``: a whole batch, which any reader sees exactly
            once. ``"events"``: one event, which `RelayReader` returns exactly once, and which any
            other reader may see again after a crash.
        snapshot_every: number of messages after which all positions are written again, so that a
            start reads no more than that. The stream's retention has to keep as many.
        attempts: number of attempts to write a batch. With the ack timeout of the publisher they
            have to outlast a restart of the broker, or the election of a new leader.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        publisher: StreamPublisher,
        api: LiftbridgeApi,
        stream: Stream | str,
        *,
        partition: int = 0,
        format: str = "batch",
        snapshot_every: int = 10_000,
        attempts: int = 10,
    ) -> None:
        if format not in (MessageFormat.BATCH, MessageFormat.EVENTS):
            raise ValueError(f"format is 'batch' or 'events', not {format!r}")
        if snapshot_every < 1 or attempts < 1:
            raise ValueError("snapshot_every and attempts must be positive")
        self.stream = Stream(stream) if isinstance(stream, str) else stream
        self.format = MessageFormat(format)
        self._publisher = publisher
        self._api = api
        self._partition = partition
        self._snapshot_every = snapshot_every
        self._attempts = attempts
        self._end = StreamEnd(publisher, api, self.stream, partition, attempts)
        self._writer_id = secrets.token_hex(8)
        self._attempt_number = 0
        self._loaded_feed: FeedKey | None = None
        self._state = StreamState()
        self._attempts_read = SettledAttempts()
        self._lock = asyncio.Lock()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """Return all positions in the stream.

        Raises:
            StreamError: the stream can't keep them: it has no concurrency control, it belongs to
                another feed, or it is missing.
            StreamGapError: retention or compaction removed some.
            StreamReadonlyError: the partition takes no messages. A paused one is woken.
            BrokerUnavailableError: no broker answered in time.
            PublishError: the broker acked nothing.
        """
        async with self._lock:
            self._loaded_feed = None
            self._attempts_read = SettledAttempts()
            # First, because finding the end may append a message.
            await self._end.require_concurrency_control()
            end = await self._end.find()
            snapshot = await self._find_snapshot(end)
            self._state = StreamState(snapshot, snapshot)
            await self._read_positions(feed, end)
            self._loaded_feed = feed
            return dict(self._state.positions)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Write the positions, and the events of an `OutgoingBatch`, as one complete attempt.

        Raises:
            RelayFencedError: another relay wrote to the stream.
            FencedError: a position is not the successor of the stored one.
            StoreError: the attempt could not be completed. It may be complete or not, so the store
                has to be loaded again. Also raised when the store was not loaded for `feed`.
            StreamGapError: the broker lost messages that it had acked. A store that is loaded again
                knows the positions before them, so that their events are written again.

        Cancellation: as a `StoreError`.
        """
        if transaction is not None and not isinstance(transaction, OutgoingBatch):
            raise StoreError(
                "the stream is the store: it takes no transaction except an OutgoingBatch",
                feed=feed.url,
            )
        async with self._lock:
            self._check_loaded(feed)
            if not positions and transaction is None:
                return
            for partition, position in positions.items():
                stored = self._state.positions.get(partition)
                check_predecessor(feed, partition, position, stored.revision if stored else None)
            # Nothing else may be written before the result of this write is known. After a failure
            # the store stays closed until it is loaded again.
            self._loaded_feed = None
            try:
                await self._write_snapshot_if_due(feed)
                await self._write(batch_rows(feed, positions, transaction, self.format))
            except (PublishError, BrokerUnavailableError) as error:
                self._state.raise_if_lost(self.stream.name)
                raise StoreError(
                    f"the batch could not be written: {error}", feed=feed.url
                ) from error
            self._state.positions.update(positions)
            self._loaded_feed = feed

    async def reveal(self) -> bool:
        """Let readers see the newest messages after a crash of the broker, as `reveal_newest`.

        Does nothing while the store is not loaded. Returns whether a message was appended.
        """
        async with self._lock:
            if self._loaded_feed is None:
                return False
            # The next save finds out that its offset was taken, also when no ack comes.
            return await self._end.reveal(self._state.next_offset)

    def _check_loaded(self, feed: FeedKey) -> None:
        if self._loaded_feed != feed:
            raise StoreError(
                "one StreamCursorStore serves one feed, name and set of filters, "
                "and has to be loaded first",
                feed=feed.url,
            )

    async def _write_snapshot_if_due(self, feed: FeedKey) -> None:
        state = self._state
        start = state.next_offset
        if start - state.snapshot >= max(self._snapshot_every, len(state.positions)):
            await self._write(positions_rows(feed, state.positions))
            state.snapshot = start

    async def _write(self, rows: list[Row]) -> None:
        """Write the rows as one attempt, which is complete in the stream when this returns."""
        attempt, tried = self._next_attempt(), False

        async def look_up_and_write() -> None:
            nonlocal tried
            if tried and await self._find_complete(attempt):
                return
            tried = True
            await self._publish(rows, attempt)
            self._state.wrote(len(rows))

        backoff = write_backoff(
            self._attempts, IncorrectOffsetError, AckTimeoutError, PublishRefusedError
        )
        await retry(look_up_and_write, backoff, sleep=asyncio.sleep, on_retry=self._on_retry)

    async def _publish(self, rows: list[Row], attempt: str) -> None:
        shared = {
            ATTEMPT: attempt.encode(),
            COUNT: str(len(rows)).encode(),
            SNAPSHOT: str(self._state.snapshot).encode(),
        }
        offset = self._state.next_offset
        # The first message is published alone. When another relay wrote to the stream, it is the
        # only one that is sent: it is refused, and no message after it can get through.
        for part, at in ((rows[:1], offset), (rows[1:], offset + 1)):
            try:
                await self._publisher.publish_many(
                    self.stream,
                    [row.value for row in part],
                    keys=[row.key for row in part],
                    partition=self._partition,
                    headers=shared,
                    headers_each=[
                        {**row.headers, INDEX: str(at - offset + i).encode()}
                        for i, row in enumerate(part)
                    ],
                    ack_policy=AckPolicy.ALL,
                    expected_offset=at,
                )
            except MessageTooLargeError as error:
                raise self._with_advice(error) from error

    def _with_advice(self, error: MessageTooLargeError) -> MessageTooLargeError:
        if self.format is MessageFormat.EVENTS:
            return error
        return MessageTooLargeError(
            f"{error.message.partition(': ')[2]}; a batch has to fit into one message: lower "
            "Limits.max_batch_bytes of the consumer, or use format='events'",
            stream=error.stream,
            correlation_id=error.correlation_id,
        )

    def _next_attempt(self) -> str:
        self._attempt_number += 1
        return f"{self._writer_id}.{self._attempt_number}"

    def _on_retry(self, error: Exception, attempt: int, pause: float) -> None:
        logger.info(
            "looking up in the stream whether a batch was written: %s",
            error,
            extra={"stream": self.stream.name, "attempt": attempt, "pause": pause},
        )

    async def _find_snapshot(self, end: EndOffsets) -> int:
        """Return the offset from which all positions can be read.

        The last message of a relay says it. The search reads a growing part of the stream's end
        until it finds such a message.
        """
        size, start = 1, end.newest
        while end.newest >= 0:
            found: int | None = None
            first: int | None = None
            async with aclosing(self._messages(max(start, 0), end.newest)) as messages:
                async for message in messages:
                    first = message.offset if first is None else first
                    snapshot = snapshot_offset(message)
                    found = found if snapshot is None else snapshot
            if found is not None:
                return found
            if start <= 0 or (first is not None and first > start):
                break
            size *= _WINDOW_GROWTH
            start = end.newest - size
        return end.next

    async def _read_positions(self, feed: FeedKey, end: EndOffsets) -> None:
        """Apply the positions in the stream up to its end."""
        async with aclosing(self._attempts_until(end)) as attempts:
            async for attempt in attempts:
                self._apply_positions(feed, attempt)

    async def _find_complete(self, tried: str) -> bool:
        """Read on to the end of the stream; True when the attempt `tried` is complete there.

        Raises:
            RelayFencedError: another relay completed an attempt.
            StreamError: the stream is missing, read-only, or incomplete.
        """
        found, end = False, await self._end.find(self._state.next_offset)
        self._state.check_end(end.next, self.stream.name)
        async with aclosing(self._attempts_until(end)) as attempts:
            async for attempt in attempts:
                if attempt.id == tried:
                    found = True
                elif not attempt.id.startswith(self._writer_id):
                    raise RelayFencedError(
                        f"another relay wrote at offset {attempt.messages[0].offset}: "
                        "run one relay for a stream",
                        stream=self.stream.name,
                    )
        return found

    async def _attempts_until(self, end: EndOffsets) -> AsyncGenerator[Attempt, None]:
        """Return the complete attempts between the offset read last and the end of the stream."""
        state = self._state
        async with aclosing(self._messages(state.next_offset, end.newest)) as messages:
            async for message in messages:
                self._check_complete(message)
                attempt = self._attempts_read.feed(message)
                state.next_offset = message.offset + 1
                if attempt is not None:
                    yield attempt
        if (attempt := self._attempts_read.settle()) is not None:
            yield attempt
        state.next_offset = max(state.next_offset, end.next)

    def _check_complete(self, message: Message) -> None:
        if message.offset > self._state.next_offset:
            raise StreamGapError(
                f"the positions from offset {self._state.next_offset} on are needed, and retention "
                "or compaction has removed messages: keep more and compact nothing, or start again "
                "with a new stream",
                stream=self.stream.name,
                offset=self._state.next_offset,
            )

    def _messages(self, start: int, newest: int) -> AsyncGenerator[Message, None]:
        return self._api.subscribe(
            self.stream.name,
            start,
            partition=self._partition,
            until=newest,
            idle_timeout=_READ_TIMEOUT,
            resume=True,
        )

    def _apply_positions(self, feed: FeedKey, attempt: Attempt) -> None:
        positions = self._state.positions
        for saved in attempt.saved_positions(self.stream.name):
            if saved.feed != feed.id:
                raise StreamError(
                    "a relay of another feed, name or set of filters writes to it: "
                    "give each a stream of its own",
                    stream=self.stream.name,
                )
            for text, (cursor, status, revision) in saved.positions.items():
                partition = int(text)
                known = positions.get(partition)
                if known is None or known.revision <= revision:
                    positions[partition] = Position(cursor, cast("Status", status), revision)
