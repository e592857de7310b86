"""The format in which a relay writes a stream exactly once: complete attempts. No I/O.

A batch of a feed is written as one or several messages. Headers say to which attempt at writing
it a message belongs, and that it is message i of n. When a crash interrupts an attempt, its
messages stay in the stream. The batch is then fetched and written again, and the second fetch may
return it with other boundaries. A reader therefore takes an attempt as a whole when its last
message is there, and ignores every incomplete attempt. With one message for a batch, every attempt
is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import msgspec

from feedapi_client.liftbridge.liftbridge_errors import StreamError
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.model import FeedKey, Position, Status

# The headers of the messages that a relay or the Spark sink publishes.
PARTITION = "feedapi-partition"
"""The partition of the feed. On every message of a relay."""
CURSOR = "feedapi-cursor"
"""The cursor that resumes after the message's batch. On every message of a relay."""
FORMAT = "feedapi-format"
"""A `MessageFormat`. On messages that are written exactly once, like the five headers below."""
ATTEMPT = "feedapi-attempt"
"""The id of the attempt to write a batch that the message belongs to."""
INDEX = "feedapi-index"
"""The position of the message in its attempt, from 0."""
COUNT = "feedapi-count"
"""The number of messages of the attempt."""
SNAPSHOT = "feedapi-snapshot"
"""The offset from which a relay has to read to know all positions."""
POSITIONS = "feedapi-positions"
"""JSON: the feed's key, and positions by partition. They are valid when the attempt is complete."""
QUERY = "feedapi-query"
"""The id of the Spark query that wrote the message."""
BATCH = "feedapi-batch"
"""The number of the query's micro-batch."""
ROW = "feedapi-row"
"""The number of the row within the micro-batch."""

_MOST = 2**63 - 1
"""The largest offset. int() refuses more than 4,300 digits, with an error of its own."""


class MessageFormat(StrEnum):
    BATCH = "batch"
    """A whole batch: its payloads, one a line."""
    EVENTS = "events"
    """One event of a batch."""
    POSITIONS = "positions"
    """Positions without an event, for relays only."""


MOST_BYTES = 1 << 29
"""Bytes of an attempt, which a reader keeps until it is complete. A relay writes no longer one."""
MESSAGE_BYTES = 1 << 10
"""What a message counts beside its value, key and headers: its object takes that (1.2 kB)."""
VERSION = 1
"""The version of what a ledger holds."""
_OVERHEAD = 320
"""Bytes that a message needs at most beside its value, its key and its own headers: the envelope,
the inbox of its ack, and the headers that say where it belongs."""
_HEADER_OVERHEAD = 16
"""Bytes of a header beside its name and value."""
_PART = 512 * 1024
"""Bytes of a message of positions: less than the default limits of the broker and of NATS."""


class LedgerFeed(msgspec.Struct, frozen=True):
    """The `FeedKey` of a ledger, as its snapshots name it."""

    url: str
    name: str
    filters: tuple[tuple[str, str], ...] = ()


class SavedPositions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the header `POSITIONS`. `key` is there in snapshots."""

    feed: str
    positions: dict[str, tuple[str, Status, int]]
    version: int = 0
    key: LedgerFeed | None = None

    def decoded(self) -> dict[int, Position]:
        return {
            int(text): Position(cursor, status, revision)
            for text, (cursor, status, revision) in self.positions.items()
        }


@dataclass(frozen=True, slots=True)
class Attempt:
    """A complete attempt: its id, its messages, and the offset from which to read all positions."""

    id: str
    messages: tuple[Message, ...]
    snapshot: int

    @property
    def format(self) -> str:
        return text_header(self.messages[0], FORMAT)

    def saved_positions(self, stream: str) -> list[SavedPositions]:
        found = [
            _decode(message.headers[POSITIONS], message.offset, stream)
            for message in self.messages
            if POSITIONS in message.headers
        ]
        for version in {saved.version for saved in found} - {VERSION}:
            raise StreamError(
                f"{'a newer' if version > VERSION else 'an unreleased'} version of feedapi-client "
                f"wrote the positions at offset {self.messages[0].offset} (ledger format {version},"
                f" this one reads {VERSION}): update feedapi-client, or use a new stream",
                stream=stream,
            )
        return found


class AttemptAssembler:
    """Assembles a partition's messages, in the order of their offsets, into attempts that stay.

    It keeps the messages of at most one attempt. A relay's messages have consecutive offsets, so a
    message of another attempt means that the one before stays incomplete.

    A broker that is killed between its write to the log and the one to its index hands out the
    offset of the last message a second time when it starts (seen on Liftbridge 1.9.0). Whoever
    reads on gets two messages with one offset, and the second one counts: only that was acked. A
    complete attempt is therefore held until the message after it is there, or its reader knows that
    there is none. A relay that does not know whether an attempt was stored writes it again under
    the same id. When both are there, the second one is ignored.
    """

    def __init__(self) -> None:
        self._id = ""
        self._messages: list[Message] = []
        self._bytes = 0
        self._held: Attempt | None = None
        self._last_id = ""

    @property
    def holds_one(self) -> bool:
        return self._held is not None

    def feed(self, message: Message) -> Attempt | None:
        """Return the attempt before `message`, if it was complete and is not taken back by it."""
        if self._held is not None and message.offset <= self._held.messages[-1].offset:
            self._held = None
        settled = self.settle()
        complete = self._complete(message)
        if complete is not None and complete.id != self._last_id:
            self._held = complete
        return settled

    def settle(self) -> Attempt | None:
        """Return the attempt that is held, when no message after it takes it back."""
        settled, self._held = self._held, None
        if settled is not None:
            self._last_id = settled.id
        return settled

    def repeats(self, message: Message) -> bool:
        """Whether the message belongs to the attempt that was returned last."""
        return bool(self._last_id) and text_header(message, ATTEMPT) == self._last_id

    def _complete(self, message: Message) -> Attempt | None:
        """Return the attempt that `message` completes, if any. Foreign messages complete none."""
        found = place_in_attempt(message)
        if found is None:
            self._reset()
            return None
        attempt, index, count, snapshot = found
        if attempt != self._id or index != len(self._messages):
            self._reset()
            if index:
                return None
            self._id = attempt
        self._messages.append(message)
        self._bytes += MESSAGE_BYTES + len(message.value) + len(message.key)
        self._bytes += sum(map(len, message.headers.values()))
        if self._bytes > MOST_BYTES:
            self._reset()
            return None
        if len(self._messages) < count:
            return None
        complete = Attempt(attempt, tuple(self._messages), snapshot)
        self._reset()
        return complete

    def _reset(self) -> None:
        self._id, self._messages, self._bytes = "", [], 0


def place_in_attempt(message: Message) -> tuple[str, int, int, int] | None:
    """Return attempt, index, count and snapshot of a message; None when no relay wrote it.

    Others may write to the stream. A relay's messages have all of them, and none names a snapshot
    that comes after it.
    """
    attempt = text_header(message, ATTEMPT)
    index, count = number_header(message, INDEX), number_header(message, COUNT)
    snapshot = number_header(message, SNAPSHOT)
    if not attempt or FORMAT not in message.headers:
        return None
    if index is None or count is None or snapshot is None:
        return None
    if index >= count or snapshot > message.offset:
        return None
    return attempt, index, count, snapshot


def _decode(header: bytes, offset: int, stream: str) -> SavedPositions:
    try:
        saved = msgspec.json.decode(header, type=SavedPositions)
        saved.decoded()
        return saved
    except ValueError as error:  # of msgspec, or of a partition that is no number
        raise StreamError(
            f"the positions at offset {offset} can't be decoded", stream=stream
        ) from error


def number_header(message: Message, name: str) -> int | None:
    """Return a header as a number; None when it is missing, or holds none that an offset can be."""
    text = text_header(message, name)
    is_number = len(text) <= len(str(_MOST)) and text.isascii() and text.isdecimal()
    return int(text) if is_number and int(text) <= _MOST else None


def text_header(message: Message, name: str) -> str:
    return message.headers[name].decode(errors="replace") if name in message.headers else ""


class RowId(NamedTuple):
    """The row of a Spark query that a message holds. A row that is written again has the same."""

    query: str
    batch: int
    row: int


def row_id(message: Message) -> RowId | None:
    """Return the row that the Spark sink wrote as this message; None for any other message."""
    query = text_header(message, QUERY)
    batch, row = number_header(message, BATCH), number_header(message, ROW)
    if not query or batch is None or row is None:
        return None
    return RowId(query, batch, row)


# ------------------------------------------------------------------ what is written


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """The events to write together with their batch's cursor: the transaction of `save`.

    Attributes:
        partition: the partition of the feed.
        cursor: the feed's cursor after the batch.
        values: the payloads.
        keys: the keys of the messages, with format ``"events"``.
        headers: additional headers of the messages, with format ``"events"``.
        places: the place of each event in the feed's batch, where some of it were left out.
    """

    partition: int
    cursor: str
    values: Sequence[bytes]
    keys: Sequence[bytes | None] = ()
    headers: Sequence[Mapping[str, bytes]] = ()
    places: Sequence[int] = ()

    def place(self, index: int) -> int:
        return self.places[index] if self.places else index

    def without(self, indices: Collection[int]) -> OutgoingBatch:
        """Return the batch without the events at these indices."""
        return self._only([i for i in range(len(self.values)) if i not in indices])

    def starting_at(self, index: int) -> OutgoingBatch:
        """Return the batch with only the events from this index on."""
        return self._only(range(index, len(self.values)))

    def message_bytes(self, index: int) -> int:
        return message_bytes(
            self.values[index],
            self.keys[index] if self.keys else None,
            self.headers[index] if self.headers else None,
        )

    def _only(self, kept: Sequence[int]) -> OutgoingBatch:
        return replace(
            self,
            values=[self.values[i] for i in kept],
            keys=[self.keys[i] for i in kept] if self.keys else (),
            headers=[self.headers[i] for i in kept] if self.headers else (),
            places=[self.place(i) for i in kept],
        )


@dataclass(frozen=True, slots=True)
class Row:
    value: bytes
    key: bytes | None
    headers: dict[str, bytes]


def message_bytes(
    value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None
) -> int:
    """Return the bytes that a message takes on the wire, at most."""
    own = sum(len(name) + len(each) + _HEADER_OVERHEAD for name, each in (headers or {}).items())
    return len(value) + len(key or b"") + own + _OVERHEAD


def batch_rows(
    feed: FeedKey,
    positions: Mapping[int, Position],
    batch: OutgoingBatch,
    format: MessageFormat,
    limit: int,
    *,
    named: bool,
) -> list[Row]:
    """Return the messages that hold the events of a batch and save the positions.

    No message that holds positions beside an event is longer than `limit` bytes because of them.
    With `named` they say whose positions these are, in full.
    """
    saved = _positions_header(feed, positions, named=named)
    shared = {
        PARTITION: str(batch.partition).encode(),
        CURSOR: batch.cursor.encode(),
        FORMAT: format.encode(),
    }
    if format is MessageFormat.BATCH:
        return [Row(b"\n".join(batch.values), None, shared | saved)]
    keys = batch.keys or [None] * len(batch.values)
    extra = batch.headers or [{}] * len(batch.values)
    rows = [
        Row(value, key, {**own, **shared})
        for value, key, own in zip(batch.values, keys, extra, strict=True)
    ]
    last = rows[-1]
    if message_bytes(last.value, last.key, last.headers | saved) > limit:
        return rows + positions_rows(feed, positions, limit)
    last.headers.update(saved)
    return rows


def positions_rows(feed: FeedKey, positions: Mapping[int, Position], limit: int) -> list[Row]:
    """Return messages of at most `limit` bytes that save positions and hold no event.

    A single position that is longer has a message of its own.
    """
    room = min(_PART, limit) - _OVERHEAD - len(str(feed))
    parts: list[dict[int, Position]] = [{}]
    size = 0
    for partition, position in positions.items():
        own = len(msgspec.json.encode(_row(position))) + len(str(partition)) + 4
        if parts[-1] and size + own > room:
            parts.append({})
            size = 0
        parts[-1][partition] = position
        size += own
    return [
        Row(
            b"",
            None,
            {
                FORMAT: MessageFormat.POSITIONS.encode(),
                **_positions_header(feed, part, named=True),
            },
        )
        for part in parts
    ]


def _positions_header(
    feed: FeedKey, positions: Mapping[int, Position], *, named: bool
) -> dict[str, bytes]:
    key = LedgerFeed(feed.url, feed.name, feed.filters) if named else None
    rows = {str(partition): _row(position) for partition, position in positions.items()}
    return {POSITIONS: msgspec.json.encode(SavedPositions(feed.id, rows, VERSION, key))}


def _row(position: Position) -> tuple[str, Status, int]:
    return position.cursor, position.status, position.revision
