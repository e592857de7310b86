"""A cursor store that is the Liftbridge stream: events and their cursor are written together.

All is in one partition of a stream with optimistic concurrency control: that gives one order, and
one place to recover from. Every message is published with the offset that it must get, so the
broker refuses what a second relay writes. What is written together is an attempt (`stream_format`).
A relay that starts finds the newest snapshot, which the newest message names, and reads on from
there.

A broker deletes old messages: by count, by size, or by age, which is its default. A snapshot is
therefore written after so many messages, after so many bytes, and after some time, also while
nothing else is written.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from feedapi_client.errors import StoreError
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.brokers import NoMessageError
from feedapi_client.liftbridge.ledger import EndOffsets, PartitionLog
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
    RelayFencedError,
    StreamError,
    StreamGapError,
)
from feedapi_client.liftbridge.message_publisher import LiftbridgePublisher
from feedapi_client.liftbridge.stream_format import (
    ATTEMPT,
    COUNT,
    FORMAT,
    INDEX,
    MESSAGE_BYTES,
    MOST_BYTES,
    SNAPSHOT,
    Attempt,
    AttemptAssembler,
    MessageFormat,
    OutgoingBatch,
    Row,
    SavedPositions,
    batch_rows,
    message_bytes,
    place_in_attempt,
    positions_rows,
    text_header,
)
from feedapi_client.liftbridge.stream_model import (
    REPLICATION_LIMIT,
    SNAPSHOT_BYTES,
    SNAPSHOT_MESSAGES,
    SNAPSHOT_SECONDS,
    Stream,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.retry import Backoff, retry
from feedapi_client.stores.base import check_replaces, in_place_of
from feedapi_client.stores.moving import check_moves, moved_positions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_PATIENCE = 300.0
_READ_TIMEOUT = 60.0
# The first message comes within milliseconds, unless retention has removed it.
_FIRST_TIMEOUT = 3.0
_WINDOW_GROWTH = 16
_RETRY_BASE_DELAY = 0.02
_RETRY_MAX_DELAY = 1.0
_SMALLEST_LIMIT = 4096
_NANOSECONDS = 1e9
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
_LOST_POLL = 0.2


@dataclass(slots=True)
class _Facts:
    """What is known of the partition.

    Attributes:
        snapshot: the offset from which all positions can be read.
        bytes_since: bytes that were written after the snapshot, about.
        short_since: since when the stream ends before `next_offset`, on the monotonic clock.
        owner: whose positions these are, by the id of the key.
        key: that key, once the stream names it.
    """

    next_offset: int = 0
    snapshot: int = 0
    snapshot_time: float = field(default_factory=time.time)
    bytes_since: int = 0
    short_since: float | None = None
    owner: str | None = None
    key: FeedKey | None = None
    positions: dict[int, Position] = field(default_factory=dict)

    def apply(self, saved: SavedPositions) -> None:
        if saved.feed != self.owner:
            # An operator has moved the positions to another key.
            self.owner, self.key, self.positions = saved.feed, None, {}
        if saved.key is not None:
            self.key = FeedKey(saved.key.url, saved.key.name, saved.key.filters)
        for partition, position in saved.decoded().items():
            known = self.positions.get(partition)
            if known is None or known.revision <= position.revision:
                self.positions[partition] = position


class StreamCursorStore:
    """Keeps positions in a stream with optimistic concurrency control, beside their events.

    One store serves one feed key. `save` takes an `OutgoingBatch` as its transaction. A batch whose
    acks are lost is looked up in the stream, and written again when it is not there. Operators can
    work on it as on any other store: see `AdministrableStore`.

    Arguments:
        publisher: an open publisher; None: each message is a call of the gRPC API, which is enough
            for operators.
        api: an open connection to the broker's gRPC API.
        stream: the stream.
        partition: the stream's partition that holds everything.
        format: what one message holds. ``"batch"``: a whole batch, which any reader sees exactly
            once. ``"events"``: one event, which `RelayReader` returns exactly once, and which any
            other reader may see again after a crash.
        snapshot_every, snapshot_bytes, snapshot_seconds: messages, bytes and seconds after which
            all positions are written again, also while nothing else is written. The retention of
            the stream has to keep more than that, by each of its limits.
        give_up_after: seconds for which a broker that is away is waited for; by default those of
            the consumer, `RetryPolicy.give_up_after`.
        look_only: whether `load` appends nothing, for operators who only look. A relay has to know
            what its broker hides after a crash.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        publisher: LiftbridgePublisher | None,
        api: LiftbridgeApi,
        stream: Stream | str,
        *,
        partition: int = 0,
        format: str = "batch",
        snapshot_every: int = SNAPSHOT_MESSAGES,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
        give_up_after: float | None = None,
        look_only: bool = False,
    ) -> None:
        if format not in (MessageFormat.BATCH, MessageFormat.EVENTS):
            raise ValueError(f"format is 'batch' or 'events', not {format!r}")
        if snapshot_every < 1 or snapshot_bytes < 1 or snapshot_seconds <= 0:
            raise ValueError("snapshot_every, snapshot_bytes and snapshot_seconds must be positive")
        if give_up_after is not None and give_up_after < 0:
            raise ValueError("give_up_after must not be negative")
        self.stream = Stream(stream) if isinstance(stream, str) else stream
        self.format = MessageFormat(format)
        self._log = PartitionLog(publisher, api, self.stream, partition)
        self._snapshots = (snapshot_every, snapshot_bytes, snapshot_seconds)
        self._look_only = look_only
        self._is_patient = give_up_after is not None
        self._patience: float | None = give_up_after if self._is_patient else _DEFAULT_PATIENCE
        self._facts = _Facts()
        self._loaded_feed: FeedKey | None = None
        self._lock = asyncio.Lock()
        self._saved_at = time.monotonic()
        self._writer_id = secrets.token_hex(8)
        self._attempt_numbers = itertools.count(1)
        self._attempts_read = AttemptAssembler()
        self._checks_offsets = False
        # Whether something was sent whose fate is unknown: the end has to be looked up first.
        self._unsure = False
        # What another relay wrote was read past: without this a second write would not meet it.
        self._fenced: RelayFencedError | None = None
        self._most_bytes = REPLICATION_LIMIT  # of a message, as far as is known

    def wait_for_server(self, seconds: float | None) -> None:
        if not self._is_patient:
            self._patience = seconds

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """Return all positions in the stream.

        Raises:
            StreamError: the stream can't keep them: it has no concurrency control, it belongs to
                another feed, it has only messages of others, or it is missing.
            StreamGapError: retention or compaction removed some.
            StreamReadonlyError: the partition takes no messages. A paused one is woken.
            BrokerUnavailableError: no broker answered in time.
            PublishError: the broker acked nothing.
        """
        async with self._lock:
            await self._read(feed, look_only=self._look_only)
            self._loaded_feed = feed
            return dict(self._facts.positions)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Write the positions, and the events of an `OutgoingBatch`, as one complete attempt.

        Raises:
            RelayFencedError: another relay wrote to the stream.
            FencedError: a position replaces another one than the stored one.
            MessageTooLargeError: an event, or the batch, does not fit into a message. Nothing is
                saved, and the store can be used on. `index` is the place of the event.
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
            if self._loaded_feed != feed:
                raise StoreError(
                    "one StreamCursorStore serves one feed, name and set of filters, "
                    "and has to be loaded first",
                    feed=feed.url,
                )
            if not positions and transaction is None:
                return
            facts = self._facts
            for partition, position in positions.items():
                check_replaces(feed, partition, position.replaces, facts.positions.get(partition))
            # Nothing else may be written before the result of this write is known. After a failure
            # the store stays closed until it is loaded again.
            self._loaded_feed = None
            try:
                await self._write_snapshot_if_due(feed)
                if transaction is None or not transaction.values:
                    await self._write_positions(feed, positions)
                else:
                    named = facts.key is None
                    rows = batch_rows(
                        feed, positions, transaction, self.format, self._limit, named=named
                    )
                    await self._write(rows)
            except MessageTooLargeError:
                self._loaded_feed = feed
                raise
            except (PublishError, BrokerUnavailableError) as error:
                raise StoreError(
                    f"the batch could not be written: {error}", feed=feed.url
                ) from error
            facts.owner, facts.key = feed.id, feed
            facts.positions.update(positions)
            self._loaded_feed = feed
            self._saved_at = time.monotonic()

    async def keep(self, *, idle_seconds: float = 4.0) -> bool:
        """Do what a stream needs to which nothing was saved for so many seconds.

        A snapshot is written when it is due, so that retention can't remove the last one. After a
        crash of the broker a message without content lets readers see the newest messages. A broker
        that does not answer at once is left alone. Does nothing while the store is not loaded.

        Returns whether something was written.

        Raises:
            RelayFencedError: another relay wrote to the stream. The store has to be loaded again.
            LiftbridgeError: it was not written. The store can be used on.
        """
        idle = time.monotonic() - self._saved_at >= idle_seconds
        if not idle or self._lock.locked() or (feed := self._loaded_feed) is None:
            return False
        # Outside the lock: while the gRPC API is away, the relay goes on over NATS.
        hides = not self._unsure and await self._log.hides(self._facts.next_offset)
        if self._lock.locked() or self._loaded_feed != feed:
            return False
        async with self._lock:
            if hides:
                # The next write finds out that its offset was taken, also when no ack comes.
                return (await self._log.end(self._facts.next_offset)).appended
            return await self._write_snapshot_if_due(feed)

    async def takes(self, size: int) -> bool:
        """Whether the broker takes a message with a value of so many bytes. Nothing is stored."""
        async with self._lock:
            return await self._retry(partial(self._log.takes, size))

    # ------------------------------------------------------------------ for operators

    async def feeds(self) -> list[FeedKey]:
        """Return the key of the positions; none for a stream without positions."""
        async with self._lock:
            if self._loaded_feed is None:
                await self._read(look_only=self._look_only)
            key = self._facts.key
            return [key] if self._facts.positions and key is not None else []

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """Delete the positions of the partitions, or of all."""
        async with self._lock:
            await self._read(feed)
            left = dict(self._facts.positions)
            for partition in list(left) if partitions is None else partitions:
                left.pop(partition, None)
            await self._replace_all(feed, left)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """Replace the positions of these partitions, or give a new stream its positions.

        Of a stream that retention has cut, the positions that are left are replaced as a whole.

        Raises:
            StreamError: the stream holds the positions of another key.
        """
        async with self._lock:
            try:
                await self._read(feed)
            except StreamGapError as gap:
                logger.warning(
                    "%s. Now only these partitions have a position: %s. Any other one that the "
                    "feed lists is relayed from its first event again, unless you set its "
                    "position, too, before the relay starts",
                    gap,
                    ", ".join(map(str, sorted(positions))),
                )
                await self._skip_to_end()
            stored = self._facts.positions
            replaced = in_place_of(stored, positions)
            await self._replace_all(feed, {**stored, **replaced})
            return replaced

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """Move all positions to another key. `overwrite` makes no difference: there is one key."""
        check_moves(keys)
        async with self._lock:
            await self._read()
            facts = self._facts
            for old, new in keys.items():
                if facts.owner == old.id and facts.positions:
                    moved = moved_positions(new, facts.positions, {}, overwrite=overwrite)
                    await self._replace_all(new, moved)
                    return {new: moved}
            return {}

    async def _replace_all(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        try:
            await self._write_snapshot(feed, positions)
        except LiftbridgeError as error:
            if isinstance(error, StreamError):
                raise
            raise StoreError(
                f"the positions could not be written: {error}", feed=feed.url
            ) from error
        facts = self._facts
        facts.owner, facts.key, facts.positions = feed.id, feed, dict(positions)

    # ------------------------------------------------------------------ writing

    async def _write_snapshot_if_due(self, feed: FeedKey) -> bool:
        facts, (every, most_bytes, seconds) = self._facts, self._snapshots
        # Not so often that most of the stream is snapshots, and as often as its retention needs.
        seldom = min(len(facts.positions), SNAPSHOT_MESSAGES)
        is_due = (
            facts.next_offset - facts.snapshot >= max(every, seldom)
            or facts.bytes_since >= most_bytes
            or time.time() - facts.snapshot_time >= seconds
        )
        if not facts.positions or not is_due:
            return False
        await self._write_snapshot(feed, facts.positions)
        return True

    async def _write_snapshot(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        """Write all positions. Nothing before them is needed then."""
        await self._write_positions(feed, positions, is_snapshot=True)

    async def _write_positions(
        self, feed: FeedKey, positions: Mapping[int, Position], *, is_snapshot: bool = False
    ) -> None:
        while True:
            rows = positions_rows(feed, positions, self._limit)
            try:
                return await self._write(rows, is_snapshot=is_snapshot)
            except MessageTooLargeError:
                # The broker, or NATS behind it, takes less than was known.
                if len(rows) >= len(positions) or self._limit <= _SMALLEST_LIMIT:
                    raise
                self._most_bytes = self._limit // 2

    @property
    def _limit(self) -> int:
        return min(self._most_bytes, self._log.limit)

    async def _write(self, rows: list[Row], *, is_snapshot: bool = False) -> None:
        """Write the rows as one attempt, which is complete in the stream when this returns.

        Raises:
            RelayFencedError: another relay wrote to the stream. So does each further write.
            MessageTooLargeError: nothing counts of the attempt, and another one may be written.
            PublishError, BrokerUnavailableError: no success while it is patient. The attempt may be
                complete or not.
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
        facts, start = self._facts, 0
        attempt = f"{self._writer_id}.{next(self._attempt_numbers)}"

        async def look_up_and_write() -> None:
            nonlocal start
            await self._require_checked_offsets()
            if self._unsure and await self._is_complete(attempt):
                return
            start, self._unsure = facts.next_offset, True
            await self._append(rows, attempt, is_snapshot=is_snapshot)
            facts.next_offset += len(rows)

        await self._retry(look_up_and_write)
        self._unsure = False
        if is_snapshot:
            facts.snapshot, facts.snapshot_time, facts.bytes_since = start, time.time(), 0
        else:
            facts.bytes_since += size

    async def _append(self, rows: list[Row], attempt: str, *, is_snapshot: bool) -> None:
        offset, snapshot = self._facts.next_offset, str(self._facts.snapshot).encode()
        rows = [
            replace(row, headers={**row.headers, INDEX: str(i).encode(), SNAPSHOT: snapshot})
            for i, row in enumerate(rows)
        ]
        if is_snapshot:
            # Only the message that completes it says that nothing before it is needed.
            rows[-1].headers[SNAPSHOT] = str(offset).encode()
        shared = {ATTEMPT: attempt.encode(), COUNT: str(len(rows)).encode()}
        # The first message is published alone. When another relay wrote to the stream, it is the
        # only one that is sent: it is refused, and no message after it can get through.
        for part in (slice(0, 1), slice(1, None)):
            try:
                await self._log.append(rows[part], offset + part.start, shared)
            except MessageTooLargeError as error:
                error.index += part.start
                raise

    async def _is_complete(self, tried: str) -> bool:
        """Read on to the end of the stream; True when the attempt `tried` is complete there."""
        found = False
        async with aclosing(self._attempts_until(await self._end_of_written())) as attempts:
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

    async def _end_of_written(self) -> EndOffsets:
        """Return the end of the stream, when it has all that was acked."""
        facts, written_to = self._facts, self._facts.next_offset
        patience = min(_LOST_AFTER, math.inf if self._patience is None else self._patience)
        while (end := await self._log.end(written_to)).next < written_to:
            # Kept where a look fails: one that fails now and then must not begin this anew.
            if facts.short_since is None:
                facts.short_since = time.monotonic()
            if time.monotonic() - facts.short_since >= patience:
                raise StreamGapError(
                    f"the broker lost the messages from offset {end.next} on, which it had "
                    "acked: start the relay again, which then writes their events again",
                    stream=self.stream.name,
                    offset=end.next,
                )
            await asyncio.sleep(_LOST_POLL)
        facts.short_since = None
        return end

    async def _require_checked_offsets(self) -> None:
        if not self._checks_offsets:
            await self._log.require_concurrency_control()
            self._checks_offsets = True

    async def _skip_to_end(self) -> None:
        """Forget what is left of a stream whose positions are gone, and go on at its end."""
        await self._require_checked_offsets()
        self._begin_at((await self._log.end(extend=True)).next)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        backoff = Backoff(
            base_delay=_RETRY_BASE_DELAY,
            max_delay=_RETRY_MAX_DELAY,
            give_up_after=self._patience,
            retry_if=lambda error: isinstance(error, _RETRIED),
        )
        return await retry(attempt, backoff, sleep=asyncio.sleep, on_retry=self._on_retry)

    def _on_retry(self, error: Exception, attempt: int, pause: float) -> None:
        logger.log(
            logging.WARNING if attempt == 2 else logging.INFO,
            "stream %s: trying again in %.1f s: %s",
            self.stream.name,
            pause,
            error,
            extra={"stream": self.stream.name, "attempt": attempt, "pause": pause},
        )

    # ------------------------------------------------------------------ reading

    async def _read(self, feed: FeedKey | None = None, *, look_only: bool = False) -> None:
        """Read all positions. They have to be those of `feed`, where it is given.

        With `look_only` nothing is appended. Messages that a broker hides after a crash are then
        not read; that is a warning. Without it, a message is appended where need be, and one is
        sent that the stream has to refuse.
        """
        self._loaded_feed = None
        await self._retry(partial(self._read_once, look_only=look_only))
        facts = self._facts
        if feed is not None and facts.positions and facts.owner != feed.id:
            whose = facts.key or "another feed, name or set of filters"
            raise StreamError(
                f"it holds the positions of {whose}, not of {feed}. If that is the same feed, give "
                "its name (feed_name=, --feed-name), or stop the relay and run 'feedapi cursors "
                "move OLD_URL NEW_URL --store liftbridge://HOST:PORT/STREAM'. Otherwise give each "
                "relay a stream of its own",
                stream=self.stream.name,
            )

    async def _read_once(self, *, look_only: bool) -> None:
        # Nothing may be appended to a stream that turns out to be no ledger.
        end = await self._log.visible()
        snapshot: int | None = None
        try:
            snapshot = await self._find_snapshot(end, _FIRST_TIMEOUT)
        except NoMessageError as error:
            if look_only:
                raise self._emptied(end.next) from error
        if not look_only:
            await self._require_checked_offsets()
            seen, end = end, await self._log.end()
            if snapshot is None:
                # Are they gone, or is the broker slow? What is appended can be read for certain.
                end = await self._log.end(extend=True)
            if snapshot is None or seen != end:
                snapshot = await self._find_snapshot(end, _READ_TIMEOUT)
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
        assert snapshot is not None
        self._begin_at(snapshot)
        first = True
        async with aclosing(self._attempts_until(end)) as attempts:
            async for attempt in attempts:
                if first:
                    self._facts.snapshot_time = attempt.messages[0].timestamp / _NANOSECONDS
                    first = False
                for saved in attempt.saved_positions(self.stream.name):
                    self._facts.apply(saved)

    def _begin_at(self, offset: int) -> None:
        self._facts = _Facts(offset, offset)
        self._attempts_read, self._unsure, self._fenced = AttemptAssembler(), False, None

    async def _find_snapshot(self, end: EndOffsets, timeout: float) -> int:
        """Return the offset from which all positions can be read.

        The last complete attempt of a relay says it. The search reads a growing part of the
        stream's end until it finds one.
        """
        size, start = 1, end.newest
        while end.newest >= 0:
            attempts, found = AttemptAssembler(), None
            first, foreign, has_begun = end.next, None, False
            async with aclosing(self._log.messages(max(start, 0), end.newest, timeout)) as messages:
                async for message in messages:
                    first = min(first, message.offset)
                    found = attempts.feed(message) or found
                    foreign = foreign if FORMAT in message.headers else message.offset
                    has_begun = has_begun or place_in_attempt(message) is not None
            found = attempts.settle() or found
            if found is not None:
                return found.snapshot
            is_all = start <= 0 or first > start
            if is_all and foreign is not None and not has_begun:
                raise StreamError(
                    f"it has messages, such as the one at offset {foreign}, and no relay wrote any "
                    "of them exactly once: it keeps no positions. Is this the right stream? A "
                    "relay that is exactly once needs a stream of its own",
                    stream=self.stream.name,
                )
            if first > max(start, 0):
                raise self._emptied(first)
            if is_all:
                break
            size *= _WINDOW_GROWTH
            start = end.newest - size
        return end.next

    async def _attempts_until(self, end: EndOffsets) -> AsyncGenerator[Attempt, None]:
        facts = self._facts
        messages = self._log.messages(facts.next_offset, end.newest, _READ_TIMEOUT)
        async with aclosing(messages):
            async for message in messages:
                if message.offset > facts.next_offset:
                    raise self._gap(
                        f"the positions from offset {facts.next_offset} on are needed, and the "
                        f"messages before offset {message.offset} were removed: by the retention "
                        "of the stream, or by compaction",
                        facts.next_offset,
                    )
                attempt = self._attempts_read.feed(message)
                facts.next_offset = message.offset + 1
                if text_header(message, FORMAT) != MessageFormat.POSITIONS:
                    # Also what earlier relays wrote: each may have written too little for a
                    # snapshot.
                    facts.bytes_since += message_bytes(message.value, message.key, message.headers)
                if attempt is not None:
                    yield attempt
        if (attempt := self._attempts_read.settle()) is not None:
            yield attempt
        facts.next_offset = max(facts.next_offset, end.next)

    def _emptied(self, first: int) -> StreamGapError:
        return self._gap(
            f"all messages before offset {first} were removed, and with them the positions of the "
            "relay: by the retention of the stream, which the brokers' default makes 7 days",
            0,
        )

    def _gap(self, what: str, offset: int) -> StreamGapError:
        return StreamGapError(f"{what}. {_WAY_OUT}", stream=self.stream.name, offset=offset)
