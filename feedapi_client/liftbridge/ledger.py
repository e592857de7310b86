"""A partition of a stream that holds positions beside events: how it is read and written.

Every message is published with the offset that it must get, so the broker refuses what a second
relay writes. What is written together is an attempt (`stream_format`). A relay that starts finds
the newest snapshot, which the newest message names, and reads on from there.

A broker deletes old messages: by count, by size, or by age, which is its default. A snapshot is
therefore written after so many messages, after so many bytes, and after some time, also while
nothing else is written.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.brokers import NoMessageError
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.headers import ATTEMPT, COUNT, FORMAT, INDEX, SNAPSHOT, text_header
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    IncorrectOffsetError,
    MessageTooLargeError,
    NoStreamError,
    PublishRefusedError,
    RelayFencedError,
    StreamError,
    StreamGapError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.message_publisher import LedgerPublisher
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.stream_format import (
    MESSAGE_BYTES,
    MOST_BYTES,
    Attempt,
    AttemptAssembler,
    MessageFormat,
    Row,
    SavedPositions,
    message_bytes,
    place_in_attempt,
    positions_rows,
)
from feedapi_client.liftbridge.stream_model import SNAPSHOT_MESSAGES, PartitionMetadata, Stream
from feedapi_client.model import FeedKey, Position
from feedapi_client.retry import Backoff, retry

logger = logging.getLogger(__name__)

_READ_TIMEOUT = 60.0
# The first message comes within milliseconds, unless retention has removed it.
_FIRST_TIMEOUT = 3.0
_WINDOW_GROWTH = 16
_RETRY_BASE_DELAY = 0.02
_RETRY_MAX_DELAY = 1.0
_SMALLEST_LIMIT = 4096
_NANOSECONDS = 1e9
_IMPOSSIBLE_OFFSET = 2**62
# While replicas catch up, messages are hidden for a moment.
_COMMITTED_AFTER = 0.2
_RETRIED = (
    IncorrectOffsetError,
    AckTimeoutError,
    NoStreamError,
    PublishRefusedError,
    BrokerUnavailableError,
)
_WAY_OUT = (
    "Its relay can't know where to go on. Give it its positions with 'feedapi cursors import' or "
    "'feedapi cursors set' (the newest event that you have carries its partition and cursor), or "
    "let it begin again with a new stream"
)
# A broker that starts may think that it still leads the partition, and have fewer messages. It
# learns better within seconds.
_LOST_AFTER = 10.0


async def writable(api: LiftbridgeApi, stream: str, partition: int) -> PartitionMetadata:
    """Wake a partition where it is paused. Raises `StreamReadonlyError`: it takes no messages."""
    found = await api.resume_partition(stream, partition)
    if found.readonly:
        raise readonly(stream, partition)
    return found


def readonly(stream: str, partition: int) -> StreamReadonlyError:
    return StreamReadonlyError(
        f"partition {partition} is read-only: nothing can be relayed to it", stream=stream
    )


async def reveal_newest(
    publisher: LedgerPublisher, api: LiftbridgeApi, stream: Stream | str, *, partition: int = 0
) -> bool:
    """Let readers see the newest messages of a partition after its broker crashed.

    A broker that starts lets nobody read them until something is appended. Appends a message
    without content (header ``feedapi-format: no-op``), with the next offset as its expected one,
    when that is so; after the broker lost messages as many as it takes. A relay that is exactly
    once does this by itself.

    Returns: whether a message was appended.

    Raises:
        PublishError: it could not be appended, or somebody else has just appended one.
        StreamError: the stream is missing or read-only.
        BrokerUnavailableError: no broker answered in time.
    """
    target = Stream(stream) if isinstance(stream, str) else stream
    return (await StreamEnd(publisher, api, target, partition).find()).appended


@dataclass(frozen=True, slots=True)
class EndOffsets:
    """The newest offset that can be read, -1 where there is none; and that of the next message."""

    newest: int
    next: int
    appended: bool = False


class StreamEnd:
    """The end of a partition with optimistic concurrency control. Each method tries once.

    `written_to` is the offset after the newest message that was acked, as far as is known. Where
    the partition ends before it, nothing is appended: the broker lost messages, or it does not know
    yet that it no longer leads the partition.
    """

    def __init__(
        self, publisher: LedgerPublisher, api: LiftbridgeApi, stream: Stream, partition: int
    ) -> None:
        self._publisher = publisher
        self._api = api
        self._stream = stream
        self._partition = partition

    async def find(self, written_to: int = 0, *, extend: bool = False) -> EndOffsets:
        """Return the end of the partition, when all up to it can be read.

        A broker that starts knows an old high watermark, above which nothing can be read, and
        raises it when something is appended. When it is too low, a message without content is
        appended. It has the next offset as its expected one, so it can't come between the messages
        of another relay unnoticed. With `extend` it is appended in any case.
        """
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await writable(self._api, self._stream.name, self._partition)
            if not extend and _needs_no_message(found, written_to):
                return EndOffsets(found.newest_offset, found.newest_offset + 1)
            if extend:
                break
        # A broker that lost messages may have a high watermark above its newest message, and then
        # lets nobody read until it has as many messages as before.
        count = max(1, found.high_watermark - found.newest_offset)
        await self._publisher.publish_many(
            self._stream,
            [b""] * count,
            partition=self._partition,
            ack_policy=AckPolicy.ALL,
            expected_offset=found.newest_offset + 1,
            headers={FORMAT: b"no-op"},
        )
        newest = found.newest_offset + count
        return EndOffsets(newest, newest + 1, appended=True)

    async def visible(self) -> EndOffsets:
        """Return the newest offset that can be read, and the next one. Appends nothing.

        Nothing can be read while a high watermark is above the newest message, after a loss.
        """
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await self._api.resume_partition(self._stream.name, self._partition)
            if found.high_watermark == found.newest_offset:
                break
        is_readable = found.high_watermark <= found.newest_offset
        return EndOffsets(found.high_watermark if is_readable else -1, found.newest_offset + 1)

    async def hides(self, written_to: int) -> bool:
        """Whether the newest messages can't be read, as far as a broker answers at once."""
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await self._api.glance(self._stream.name, self._partition)
            if found is None or _needs_no_message(found, written_to):
                return False
        return True

    async def require_concurrency_control(self) -> None:
        """Raise `StreamError` when the stream does not check offsets.

        A second relay would not be noticed. The probe is a message with an impossible offset.
        """
        await writable(self._api, self._stream.name, self._partition)
        if not await self._refuses_offset(b""):
            raise StreamError(
                "it has no optimistic concurrency control, without which nothing is exactly once",
                stream=self._stream.name,
            )

    async def takes(self, size: int) -> bool:
        """Whether the broker takes a value of so many bytes. Nothing is stored.

        A broker looks at the size of a message before its offset, which is an impossible one here.
        """
        try:
            return await self._refuses_offset(bytes(size))
        except MessageTooLargeError:
            return False

    async def _refuses_offset(self, value: bytes) -> bool:
        try:
            await self._publisher.publish_many(
                self._stream,
                [value],
                partition=self._partition,
                expected_offset=_IMPOSSIBLE_OFFSET,
                headers={FORMAT: b"probe"},
            )
        except IncorrectOffsetError:
            return True
        return False


def _needs_no_message(found: PartitionMetadata, written_to: int) -> bool:
    """Whether all can be read, or nothing may be appended."""
    is_short = found.newest_offset + 1 < written_to
    return is_short or found.high_watermark == found.newest_offset


@dataclass(slots=True)
class StreamState:
    """What is known of a partition of a stream.

    Attributes:
        snapshot: the offset from which all positions can be read.
        bytes_since: bytes that were written after the snapshot, about.
        owner: whose positions these are, by the id of the key.
        named: whether the stream names the key.
        lost_from: the end of the stream, while that is before `next_offset`.
    """

    next_offset: int = 0
    snapshot: int = 0
    snapshot_time: float = field(default_factory=time.time)
    bytes_since: int = 0
    owner: str | None = None
    key: FeedKey | None = None
    named: bool = False
    positions: dict[int, Position] = field(default_factory=dict)
    lost_from: int | None = None
    _short_since: float = 0.0

    def check_end(self, end: int, stream: str) -> None:
        """Compare with the broker's next offset; an error when it was too low for some seconds."""
        if end >= self.next_offset:
            self.lost_from = None
            return
        now = time.monotonic()
        if self.lost_from is None:
            self._short_since = now
        self.lost_from = end
        if now - self._short_since >= _LOST_AFTER:
            self.raise_if_lost(stream)

    def raise_if_lost(self, stream: str) -> None:
        if self.lost_from is not None:
            raise StreamGapError(
                f"the broker lost the messages from offset {self.lost_from} on, which it had "
                "acked: start the relay again, which then writes their events again",
                stream=stream,
                offset=self.lost_from,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    every: int
    bytes: int
    seconds: float

    def is_due(self, state: StreamState) -> bool:
        if not state.positions:
            return False
        # Not so often that most of the stream is snapshots, and as often as its retention needs.
        seldom = min(len(state.positions), SNAPSHOT_MESSAGES)
        return (
            state.next_offset - state.snapshot >= max(self.every, seldom)
            or state.bytes_since >= self.bytes
            or time.time() - state.snapshot_time >= self.seconds
        )


class Ledger:
    """One partition of a stream with optimistic concurrency control.

    Concurrency: one call at a time, but `hides_messages`.
    """

    def __init__(
        self,
        publisher: LedgerPublisher,
        api: LiftbridgeApi,
        stream: Stream,
        partition: int,
        snapshots: SnapshotPolicy,
    ) -> None:
        self.stream = stream
        self.state = StreamState()
        self.give_up_after: float | None = None
        self._publisher = publisher
        self._api = api
        self._partition = partition
        self._snapshots = snapshots
        self._end = StreamEnd(publisher, api, stream, partition)
        self._writer_id = secrets.token_hex(8)
        self._attempt_number = 0
        self._attempts_read = AttemptAssembler()
        self._limit: int | None = None
        self._checks_offsets = False
        # Whether something was sent whose fate is unknown: the end has to be looked up first.
        self._unsure = False
        # What another relay wrote was read past: without this a second write would not meet it.
        self._fenced: RelayFencedError | None = None

    @property
    def limit(self) -> int:
        known = self._publisher.message_limit
        return known if self._limit is None else min(self._limit, known)

    async def read(self, *, look_only: bool = False) -> None:
        """Read all positions into `state`. With `look_only` nothing is appended.

        Messages that a broker hides after a crash are then not read; that is a warning. Without it,
        a message is appended where need be, and one is sent that the stream has to refuse.
        """
        read = partial(self._read, look_only=look_only)
        await retry(read, self._backoff(), sleep=asyncio.sleep, on_retry=self._on_retry)

    async def write(self, rows: list[Row], *, is_snapshot: bool = False) -> None:
        """Write the rows as one attempt, which is complete in the stream when this returns.

        Raises:
            RelayFencedError: another relay wrote to the stream. So does each further write.
            MessageTooLargeError: nothing counts of the attempt, and another one may be written.
            PublishError, BrokerUnavailableError: no success for `give_up_after` seconds. The
                attempt may be complete or not.
        """
        if self._fenced is not None:
            raise self._fenced
        size = sum(message_bytes(row.value, row.key, row.headers) for row in rows)
        if size + len(rows) * MESSAGE_BYTES > MOST_BYTES:
            raise StreamError(
                f"a batch of {len(rows)} messages, {size} bytes, is not written: readers keep "
                f"{MOST_BYTES} bytes. The feed has no checkpoint within it: relay it at least "
                "once, with a store of another kind",
                stream=self.stream.name,
            )
        self._attempt_number += 1
        attempt = f"{self._writer_id}.{self._attempt_number}"
        start = 0

        async def look_up_and_write() -> None:
            nonlocal start
            await self._require_checked_offsets()
            if self._unsure and await self._find_complete(attempt):
                return
            start, self._unsure = self.state.next_offset, True
            await self._publish(rows, attempt, is_snapshot=is_snapshot)
            self.state.next_offset += len(rows)
            self.state.lost_from = None

        await retry(
            look_up_and_write, self._backoff(), sleep=asyncio.sleep, on_retry=self._on_retry
        )
        self._unsure = False
        state = self.state
        if is_snapshot:
            state.snapshot, state.snapshot_time = start, time.time()
            state.bytes_since = 0
        else:
            state.bytes_since += size

    async def write_positions(
        self, feed: FeedKey, positions: Mapping[int, Position], *, is_snapshot: bool = False
    ) -> None:
        """Write positions; after a snapshot, of all, nothing before it is needed."""
        while True:
            rows = positions_rows(feed, positions, self.limit)
            try:
                return await self.write(rows, is_snapshot=is_snapshot)
            except MessageTooLargeError:
                # The broker, or NATS behind it, takes less than was known.
                if len(rows) >= len(positions) or self.limit <= _SMALLEST_LIMIT:
                    raise
                self._limit = self.limit // 2

    async def write_snapshot_if_due(self, feed: FeedKey) -> bool:
        if not self._snapshots.is_due(self.state):
            return False
        await self.write_positions(feed, self.state.positions, is_snapshot=True)
        return True

    async def skip_to_end(self) -> None:
        """Forget what is left of a stream whose positions are gone, and go on at its end."""
        await self._require_checked_offsets()
        end = await self._end.find(extend=True)
        self.state = StreamState(end.next, end.next)
        self._attempts_read, self._unsure, self._fenced = AttemptAssembler(), False, None

    async def hides_messages(self) -> bool:
        """Whether readers can't see the newest messages, as far as a broker answers at once."""
        return not self._unsure and await self._end.hides(self.state.next_offset)

    async def reveal(self) -> bool:
        """Append a message without content, so that readers see all before it, if need be."""
        # The next write finds out that its offset was taken, also when no ack comes.
        return (await self._end.find(self.state.next_offset)).appended

    async def takes(self, size: int) -> bool:
        ask = partial(self._end.takes, size)
        return await retry(ask, self._backoff(), sleep=asyncio.sleep, on_retry=self._on_retry)

    async def _publish(self, rows: list[Row], attempt: str, *, is_snapshot: bool) -> None:
        offset = self.state.next_offset
        shared = {ATTEMPT: attempt.encode(), COUNT: str(len(rows)).encode()}
        headers = [
            {**row.headers, INDEX: str(i).encode(), SNAPSHOT: str(self.state.snapshot).encode()}
            for i, row in enumerate(rows)
        ]
        if is_snapshot:
            # Only the message that completes it says that nothing before it is needed.
            headers[-1][SNAPSHOT] = str(offset).encode()
        # The first message is published alone. When another relay wrote to the stream, it is the
        # only one that is sent: it is refused, and no message after it can get through.
        for part in (slice(0, 1), slice(1, None)):
            try:
                await self._publisher.publish_many(
                    self.stream,
                    [row.value for row in rows[part]],
                    keys=[row.key for row in rows[part]],
                    partition=self._partition,
                    headers=shared,
                    headers_each=headers[part],
                    ack_policy=AckPolicy.ALL,
                    expected_offset=offset + part.start,
                )
            except MessageTooLargeError as error:
                error.index += part.start
                raise

    def _backoff(self) -> Backoff:
        return Backoff(
            base_delay=_RETRY_BASE_DELAY,
            max_delay=_RETRY_MAX_DELAY,
            give_up_after=self.give_up_after,
            retry_if=lambda error: isinstance(error, _RETRIED),
        )

    def _on_retry(self, error: Exception, attempt: int, pause: float) -> None:
        level = logging.WARNING if attempt == 2 else logging.INFO
        logger.log(
            level,
            "stream %s: trying again in %.1f s: %s",
            self.stream.name,
            pause,
            error,
            extra={"stream": self.stream.name, "attempt": attempt, "pause": pause},
        )

    # ------------------------------------------------------------------ reading

    async def _read(self, *, look_only: bool) -> None:
        self._attempts_read = AttemptAssembler()
        # Nothing may be appended to a stream that turns out to be no ledger.
        end = await self._end.visible()
        snapshot = await self._look_for_snapshot(end)
        if not look_only:
            await self._require_checked_offsets()
            seen, end = end, await self._end.find()
            if snapshot is None:
                # Are they gone, or is the broker slow? What is appended can be read for certain.
                end = await self._end.find(extend=True)
            if snapshot is None or seen != end:
                snapshot = await self._find_snapshot(end, _READ_TIMEOUT)
        elif snapshot is None:
            raise self._emptied(end.next)
        elif end.newest + 1 < end.next:
            logger.warning(
                "stream %s: the messages from offset %d to %d can't be read before its relay "
                "starts, which is usual after a crash of the broker. The positions are those "
                "before them",
                self.stream.name,
                end.newest + 1,
                end.next - 1,
                extra={"stream": self.stream.name, "offset": end.newest + 1},
            )
        self.state = StreamState(snapshot, snapshot)
        first = True
        async with aclosing(self._attempts_until(end)) as attempts:
            async for attempt in attempts:
                if first:
                    self.state.snapshot_time = attempt.messages[0].timestamp / _NANOSECONDS
                    first = False
                for saved in attempt.saved_positions(self.stream.name):
                    self._apply(saved)
        self._unsure, self._fenced = False, None

    async def _require_checked_offsets(self) -> None:
        if not self._checks_offsets:
            await self._end.require_concurrency_control()
            self._checks_offsets = True

    def _apply(self, saved: SavedPositions) -> None:
        state = self.state
        if saved.feed != state.owner:
            # An operator has moved the positions to another key.
            state.owner, state.key, state.named, state.positions = saved.feed, None, False, {}
        if saved.key is not None:
            state.key = FeedKey(saved.key.url, saved.key.name, saved.key.filters)
            state.named = True
        for partition, position in saved.decoded().items():
            known = state.positions.get(partition)
            if known is None or known.revision <= position.revision:
                state.positions[partition] = position

    async def _look_for_snapshot(self, end: EndOffsets) -> int | None:
        try:
            return await self._find_snapshot(end, _FIRST_TIMEOUT)
        except NoMessageError:
            return None

    async def _find_snapshot(self, end: EndOffsets, timeout: float) -> int:
        """Return the offset from which all positions can be read.

        The last complete attempt of a relay says it. The search reads a growing part of the
        stream's end until it finds one.
        """
        size, start = 1, end.newest
        while end.newest >= 0:
            attempts, found = AttemptAssembler(), None
            first: int | None = None
            foreign: int | None = None
            has_begun = False
            async with aclosing(self._messages(max(start, 0), end.newest, timeout)) as messages:
                async for message in messages:
                    first = message.offset if first is None else first
                    found = attempts.feed(message) or found
                    foreign = foreign if FORMAT in message.headers else message.offset
                    has_begun = has_begun or place_in_attempt(message) is not None
            found = attempts.settle() or found
            if found is not None:
                return found.snapshot
            is_all = start <= 0 or (first is not None and first > start)
            if is_all and foreign is not None and not has_begun:
                raise self._no_ledger(foreign)
            if first is not None and first > max(start, 0):
                raise self._emptied(first)
            if is_all:
                break
            size *= _WINDOW_GROWTH
            start = end.newest - size
        return end.next

    def _no_ledger(self, offset: int) -> StreamError:
        return StreamError(
            f"it has messages, such as the one at offset {offset}, and no relay wrote any of them "
            "exactly once: it keeps no positions. Is this the right stream? A relay that is "
            "exactly once needs a stream of its own",
            stream=self.stream.name,
        )

    def _emptied(self, first: int) -> StreamGapError:
        return StreamGapError(
            f"all messages before offset {first} were removed, and with them the positions of the "
            "relay: by the retention of the stream, which the brokers' default makes 7 days. "
            f"{_WAY_OUT}",
            stream=self.stream.name,
            offset=0,
        )

    async def _find_complete(self, tried: str) -> bool:
        """Read on to the end of the stream; True when the attempt `tried` is complete there."""
        found, end = False, await self._end.find(self.state.next_offset)
        self.state.check_end(end.next, self.stream.name)
        async with aclosing(self._attempts_until(end)) as attempts:
            async for attempt in attempts:
                if attempt.id == tried:
                    found = True
                elif not attempt.id.startswith(self._writer_id):
                    self._fenced = RelayFencedError(
                        f"another relay wrote at offset {attempt.messages[0].offset}: "
                        "run one relay for a stream",
                        stream=self.stream.name,
                    )
                    raise self._fenced
        return found

    async def _attempts_until(self, end: EndOffsets) -> AsyncGenerator[Attempt, None]:
        state = self.state
        messages = self._messages(state.next_offset, end.newest, _READ_TIMEOUT)
        async with aclosing(messages):
            async for message in messages:
                self._check_complete(message)
                attempt = self._attempts_read.feed(message)
                state.next_offset = message.offset + 1
                if text_header(message, FORMAT) != MessageFormat.POSITIONS:
                    # Also what earlier relays wrote: each may have written too little for a
                    # snapshot.
                    state.bytes_since += message_bytes(message.value, message.key, message.headers)
                if attempt is not None:
                    yield attempt
        if (attempt := self._attempts_read.settle()) is not None:
            yield attempt
        state.next_offset = max(state.next_offset, end.next)

    def _check_complete(self, message: Message) -> None:
        if message.offset > self.state.next_offset:
            raise StreamGapError(
                f"the positions from offset {self.state.next_offset} on are needed, and the "
                f"messages before offset {message.offset} were removed: by the retention of the "
                f"stream, or by compaction. {_WAY_OUT}",
                stream=self.stream.name,
                offset=self.state.next_offset,
            )

    def _messages(self, start: int, newest: int, timeout: float) -> AsyncGenerator[Message, None]:
        return self._api.subscribe(
            self.stream.name,
            start,
            partition=self._partition,
            until=newest,
            idle_timeout=timeout,
            resume=True,
        )
