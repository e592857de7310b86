"""A cursor store that is the Liftbridge stream itself: a batch's events and its cursor are written together, or not at all.

The stream needs optimistic concurrency control. Every message is published with the offset that it must get, so a second relay on the same stream is found
out by the broker. One Liftbridge partition holds everything that a relay writes: that makes one order, and one place to recover from.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from feedapi_client.errors import StoreError
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.attempts import (
    ATTEMPT,
    COUNT,
    CURSOR,
    FORMAT,
    INDEX,
    PARTITION,
    SNAPSHOT,
    Attempt,
    AttemptAssembler,
    Format,
    save_header,
    snapshot_of,
)
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    PublishError,
    RelayFencedError,
    StreamError,
)
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.streams import Stream
from feedapi_client.model import FeedKey, Position, Status
from feedapi_client.stores.base import check_predecessor

logger = logging.getLogger(__name__)

_POSITIONS_A_MESSAGE = 1000
_IMPOSSIBLE = 2**62
_READ_SECONDS = 10.0
_WINDOW_GROWTH = 16


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """The events to write together with their batch's cursor: what `StreamCursorStore.save` takes as its transaction."""

    partition: int
    cursor: str
    values: Sequence[bytes]
    keys: Sequence[bytes | None] = ()
    headers: Sequence[Mapping[str, bytes]] = ()


@dataclass(slots=True)
class _Tail:
    """What is known of the stream: its next offset, the positions, and from where on they can be read."""

    next_offset: int = 0
    snapshot: int = 0
    positions: dict[int, Position] = field(default_factory=dict)


class StreamCursorStore:
    """Positions kept in a stream with optimistic concurrency control, beside the events that they account for.

    `format` says what one message holds: ``"batch"`` a whole batch, which any reader sees exactly once, ``"events"`` one event, which `RelayReader` hands on
    exactly once and any other reader sees again after a crash. After `snapshot_every` messages all positions are written anew, so that a start reads no
    more than that. The stream's retention has to keep as much.

    One store serves one feed key. `save` takes an `OutgoingBatch` as its transaction. A batch whose acks are lost is looked up in the stream, and written
    again, up to `attempts` times, when it is not there.
    """

    def __init__(
        self,
        publisher: LiftbridgePublisher,
        api: LiftbridgeApi,
        stream: Stream | str,
        *,
        partition: int = 0,
        format: str = "batch",
        snapshot_every: int = 10_000,
        attempts: int = 5,
    ) -> None:
        if format not in (Format.BATCH, Format.EVENTS):
            raise ValueError(f"format is 'batch' or 'events', not {format!r}")
        if snapshot_every < 1 or attempts < 1:
            raise ValueError("snapshot_every and attempts must be positive")
        self.stream = Stream(stream) if isinstance(stream, str) else stream
        self.format = Format(format)
        self._publisher = publisher
        self._api = api
        self._partition = partition
        self._snapshot_every = snapshot_every
        self._attempts = attempts
        self._run = secrets.token_hex(8)
        self._tries = 0
        self._feed: FeedKey | None = None
        self._tail = _Tail()
        self._assembler = AttemptAssembler()
        self._lock = asyncio.Lock()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """All positions in the stream. Raises `StreamError` when the stream can't keep them: no concurrency control, another feed's, expired."""
        async with self._lock:
            self._feed = feed
            self._assembler = AttemptAssembler()
            newest = (
                await self._api.partition_metadata(self.stream.name, self._partition)
            ).newest_offset
            snapshot = await self._find_snapshot(newest)
            self._tail = _Tail(snapshot, snapshot)
            await self._read_to(newest, mine=None)
            await self._require_concurrency_control()
            return dict(self._tail.positions)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Write the positions, and the events of the `OutgoingBatch` given as transaction, as one complete attempt.

        Raises `RelayFencedError` when another relay wrote to the stream, `StoreError` when the attempt could not be completed, or was cancelled: then it
        may be complete or not, and the store has to be loaded again.
        """
        if transaction is not None and not isinstance(transaction, OutgoingBatch):
            raise StoreError(
                "the stream is the store: it takes part in no transaction but an OutgoingBatch",
                feed=feed.url,
            )
        async with self._lock:
            if self._feed != feed:
                raise StoreError(
                    "one StreamCursorStore serves one feed, name and set of filters, and has to be loaded first",
                    feed=feed.url,
                )
            if not positions and transaction is None:
                return
            for partition, position in positions.items():
                stored = self._tail.positions.get(partition)
                check_predecessor(feed, partition, position, stored.revision if stored else None)
            # Until it is known what became of this write nothing else may be written: a failure asks for another load.
            self._feed = None
            try:
                if self._tail.next_offset - self._tail.snapshot >= max(
                    self._snapshot_every, len(self._tail.positions)
                ):
                    await self._write_snapshot(feed)
                await self._write(self._rows(feed, positions, transaction))
            except (PublishError, BrokerUnavailableError) as error:
                raise StoreError(
                    f"the batch could not be written: {error}", feed=feed.url
                ) from error
            self._tail.positions.update(positions)
            self._feed = feed

    async def _write_snapshot(self, feed: FeedKey) -> None:
        start = self._tail.next_offset
        await self._write(list(_positions_rows(feed, self._tail.positions)))
        self._tail.snapshot = start

    def _rows(
        self, feed: FeedKey, positions: Mapping[int, Position], batch: OutgoingBatch | None
    ) -> list[_Row]:
        if batch is None or not batch.values:
            return list(_positions_rows(feed, positions))
        saved = save_header(feed, positions)
        shared = {PARTITION: str(batch.partition).encode(), CURSOR: batch.cursor.encode()}
        if self.format is Format.BATCH:
            return [_Row(b"\n".join(batch.values), None, shared | saved | {FORMAT: b"batch"})]
        keys = batch.keys or [None] * len(batch.values)
        extra = batch.headers or [{}] * len(batch.values)
        rows = [
            _Row(value, key, {**own, **shared, FORMAT: b"events"})
            for value, key, own in zip(batch.values, keys, extra, strict=True)
        ]
        rows[-1].headers.update(saved)
        return rows

    async def _write(self, rows: list[_Row]) -> None:
        """Write the rows as one attempt that is complete in the stream when this returns."""
        mine: set[str] = set()
        failure: LiftbridgeError | None = None
        for _ in range(self._attempts):
            if failure is not None:
                await self._read_to(
                    (
                        await self._api.partition_metadata(self.stream.name, self._partition)
                    ).newest_offset,
                    mine=mine,
                )
                if not mine:
                    return
            attempt = self._next_attempt()
            mine.add(attempt)
            try:
                await self._publish(rows, attempt)
            except (IncorrectOffsetError, AckTimeoutError) as error:
                logger.info("an attempt at a batch has to be looked up in the stream: %s", error)
                failure = error
                continue
            self._tail.next_offset += len(rows)
            return
        assert failure is not None
        raise failure

    async def _publish(self, rows: list[_Row], attempt: str) -> None:
        shared = {
            ATTEMPT: attempt.encode(),
            COUNT: str(len(rows)).encode(),
            SNAPSHOT: str(self._tail.snapshot).encode(),
        }
        offset = self._tail.next_offset
        # The first message alone: when another relay was here, nothing but that one publish is refused, and none behind it gets through.
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
                raise self._too_large(error) from error

    def _too_large(self, error: MessageTooLargeError) -> MessageTooLargeError:
        if self.format is Format.EVENTS:
            return error
        advice = "a batch has to fit into one message: lower Limits.max_batch_bytes of the consumer, or use format='events'"
        return MessageTooLargeError(
            f"{error.message.partition(': ')[2]}; {advice}",
            stream=error.stream,
            correlation_id=error.correlation_id,
        )

    def _next_attempt(self) -> str:
        self._tries += 1
        return f"{self._run}.{self._tries}"

    async def _find_snapshot(self, newest: int) -> int:
        """The offset to read from to know all positions: what the last message of a relay says. Looks at more and more of the tail until there is one."""
        size, start = 1, newest
        while newest >= 0:
            found: int | None = None
            first: int | None = None
            async with aclosing(self._messages(max(start, 0), newest)) as messages:
                async for message in messages:
                    first = message.offset if first is None else first
                    said = snapshot_of(message)
                    found = found if said is None else said
            if found is not None:
                return found
            if start <= 0 or (first is not None and first > start):
                break
            size *= _WINDOW_GROWTH
            start = newest - size
        return newest + 1

    async def _read_to(self, newest: int, *, mine: set[str] | None) -> None:
        """Take in the stream up to the offset `newest`. `mine` are the attempts of the write under way: a complete one empties it."""
        start = self._tail.next_offset
        async with aclosing(self._messages(start, newest)) as messages:
            async for message in messages:
                if message.offset > self._tail.next_offset and mine is None:
                    raise StreamError(
                        f"the positions from offset {start} on are needed and retention has dropped some: keep more, or start over with a new stream",
                        stream=self.stream.name,
                    )
                self._tail.next_offset = message.offset + 1
                attempt = self._assembler.feed(message)
                if attempt is not None:
                    self._take(attempt, mine)
        self._tail.next_offset = max(self._tail.next_offset, newest + 1)

    def _messages(self, start: int, newest: int) -> AsyncGenerator[Message, None]:
        return self._api.subscribe(
            self.stream.name,
            start,
            partition=self._partition,
            until=newest,
            idle_timeout=_READ_SECONDS,
        )

    def _take(self, attempt: Attempt, mine: set[str] | None) -> None:
        if mine is None:
            self._fold(attempt)
        elif attempt.id in mine:
            mine.clear()
        elif not attempt.id.startswith(self._run):
            raise RelayFencedError(
                f"another relay wrote at offset {attempt.messages[0].offset}: run one relay for a stream",
                stream=self.stream.name,
            )

    def _fold(self, attempt: Attempt) -> None:
        for saved in attempt.saved(self.stream.name):
            if self._feed is None or saved.feed != self._feed.id:
                raise StreamError(
                    "a relay of another feed, name or set of filters writes to it: give each a stream of its own",
                    stream=self.stream.name,
                )
            for partition, (cursor, status, revision) in saved.positions.items():
                known = self._tail.positions.get(int(partition))
                if known is None or known.revision <= revision:
                    self._tail.positions[int(partition)] = Position(
                        cursor, cast("Status", status), revision
                    )

    async def _require_concurrency_control(self) -> None:
        """Without it nothing would be fenced, silently. A stream with it refuses an offset that can't be."""
        failure: AckTimeoutError | None = None
        for _ in range(self._attempts):
            try:
                await self._publisher.publish(
                    self.stream,
                    b"",
                    partition=self._partition,
                    expected_offset=_IMPOSSIBLE,
                    headers={FORMAT: b"probe"},
                )
            except IncorrectOffsetError:
                return
            except AckTimeoutError as error:
                failure = error
            else:
                raise StreamError(
                    "it has no optimistic concurrency control, without which nothing is exactly once",
                    stream=self.stream.name,
                )
        assert failure is not None
        raise failure


@dataclass(frozen=True, slots=True)
class _Row:
    """One message to be."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes]


def _positions_rows(feed: FeedKey, positions: Mapping[int, Position]) -> Iterator[_Row]:
    items = list(positions.items())
    for start in range(0, max(len(items), 1), _POSITIONS_A_MESSAGE):
        yield _Row(
            b"",
            None,
            {
                FORMAT: b"positions",
                **save_header(feed, dict(items[start : start + _POSITIONS_A_MESSAGE])),
            },
        )
