"""The format in which a relay writes a stream exactly once: complete attempts. No I/O.

A batch of a feed is written as one or several messages. Headers say to which attempt at writing
it a message belongs, and that it is message i of n. When a crash interrupts an attempt, its
messages stay in the stream. The batch is then fetched and written again, and the second fetch may
return it with other boundaries. A reader therefore takes an attempt as a whole when its last
message is there, and ignores every incomplete attempt. With one message for a batch, every attempt
is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from feedapi_client.liftbridge.headers import (
    ATTEMPT,
    COUNT,
    FORMAT,
    INDEX,
    POSITIONS,
    SNAPSHOT,
    number_header,
    text_header,
)
from feedapi_client.liftbridge.liftbridge_errors import StreamError
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.model import FeedKey, Position, Status


class MessageFormat(StrEnum):
    """What one message holds."""

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
"""The version of what a ledger holds. 0 had neither a version nor the name of its feed."""


class LedgerFeed(msgspec.Struct, frozen=True):
    """The `FeedKey` of a ledger, as its snapshots name it."""

    url: str
    name: str
    filters: tuple[tuple[str, str], ...] = ()


class SavedPositions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the header `POSITIONS`.

    Attributes:
        feed: the id of the feed's key.
        positions: (cursor, status, revision) by partition.
        version: `VERSION` of the writer.
        key: the feed's key, in snapshots.
    """

    feed: str
    positions: dict[str, tuple[str, Status, int]]
    version: int = 0
    key: LedgerFeed | None = None

    def decoded(self) -> dict[int, Position]:
        """Return the positions by partition."""
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
        """The format of its messages; a `MessageFormat` unless a newer version wrote them."""
        return text_header(self.messages[0], FORMAT)

    def saved_positions(self, stream: str) -> list[SavedPositions]:
        """Return the positions that it saves.

        Raises:
            StreamError: they can't be decoded, or a newer version wrote them.
        """
        found = [
            _decode(message.headers[POSITIONS], message.offset, stream)
            for message in self.messages
            if POSITIONS in message.headers
        ]
        newest = max((saved.version for saved in found), default=0)
        if newest > VERSION:
            raise StreamError(
                f"a newer version of feedapi-client wrote the positions at offset "
                f"{self.messages[0].offset} (ledger format {newest}, this one reads up to "
                f"{VERSION}): update feedapi-client here",
                stream=stream,
            )
        return found


class AttemptAssembler:
    """Assembles a partition's messages, in the order of their offsets, into complete attempts.

    It keeps the messages of at most one attempt. A relay's messages have consecutive offsets, so a
    message of another attempt means that the one before stays incomplete.
    """

    def __init__(self) -> None:
        self._id = ""
        self._messages: list[Message] = []
        self._bytes = 0

    def feed(self, message: Message) -> Attempt | None:
        """Return the attempt that `message` completes, if any.

        A message that belongs to no attempt is ignored, and ends an incomplete attempt.
        """
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


class SettledAttempts:
    """Complete attempts that stay.

    A broker that is killed between its write to the log and the one to its index hands out the
    offset of the last message a second time when it starts (seen on Liftbridge 1.9.0). Whoever
    reads on gets two messages with one offset, and the second one counts: only that was acked. An
    attempt is therefore kept until the message after it is there, or its reader knows that there is
    none. A relay that does not know whether an attempt was stored writes it again under the same
    id. When both are there, the second one is ignored.
    """

    def __init__(self) -> None:
        self._assembler = AttemptAssembler()
        self._held: Attempt | None = None
        self._last_id = ""

    @property
    def holds_one(self) -> bool:
        """Whether a complete attempt waits for the message after it."""
        return self._held is not None

    def feed(self, message: Message) -> Attempt | None:
        """Return the attempt before `message`, if it was complete and is not taken back by it."""
        if self._held is not None and message.offset <= self._held.messages[-1].offset:
            self._held = None
        settled = self.settle()
        complete = self._assembler.feed(message)
        if complete is not None and complete.id != self._last_id:
            self._held = complete
        return settled

    def repeats(self, message: Message) -> bool:
        """Whether the message belongs to the attempt that was returned last."""
        return bool(self._last_id) and text_header(message, ATTEMPT) == self._last_id

    def settle(self) -> Attempt | None:
        """Return the attempt that is held, when no message after it takes it back."""
        settled, self._held = self._held, None
        if settled is not None:
            self._last_id = settled.id
        return settled


def positions_header(
    feed: FeedKey, positions: Mapping[int, Position], *, named: bool = False
) -> dict[str, bytes]:
    """Return the header that saves positions; with `named` it says whose they are, in full."""
    key = LedgerFeed(feed.url, feed.name, feed.filters) if named else None
    rows = {str(partition): _row(position) for partition, position in positions.items()}
    return {POSITIONS: msgspec.json.encode(SavedPositions(feed.id, rows, VERSION, key))}


def position_bytes(partition: int, position: Position) -> int:
    """Return the bytes that a position takes in the header."""
    return len(msgspec.json.encode({str(partition): _row(position)}))


def _row(position: Position) -> tuple[str, Status, int]:
    return position.cursor, position.status, position.revision


def _decode(header: bytes, offset: int, stream: str) -> SavedPositions:
    try:
        saved = msgspec.json.decode(header, type=SavedPositions)
        saved.decoded()
        return saved
    except ValueError as error:  # of msgspec, or of a partition that is no number
        raise StreamError(
            f"the positions at offset {offset} can't be decoded", stream=stream
        ) from error


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
    return (
        (attempt, index, count, snapshot) if index < count and snapshot <= message.offset else None
    )
