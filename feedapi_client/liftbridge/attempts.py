"""How a relay marks what it writes exactly once, and how that is read: attempts, each complete or void. No I/O.

A batch of a feed is written in one or several messages. Headers say which attempt at writing it a message belongs to, and that it is message i of n. An
attempt that a crash cut off stays in the stream for ever; the batch is fetched and written again, and the second fetch may cut it differently. So a reader
takes an attempt as a whole when its last message is there, and never any part of an incomplete one. With one message for a batch every attempt is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from feedapi_client.liftbridge.errors import StreamError
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.model import FeedKey, Position

PARTITION = "feedapi-partition"
"""The partition of the feed, on every message of a relay."""
CURSOR = "feedapi-cursor"
"""The cursor that resumes behind the batch that the message belongs to, on every message of a relay."""
FORMAT = "feedapi-format"
"""A `Format`, on what is written exactly once, as all the headers below."""
ATTEMPT = "feedapi-attempt"
INDEX = "feedapi-index"
COUNT = "feedapi-count"
SNAPSHOT = "feedapi-snapshot"
"""The offset from which a relay has to read to know all positions."""
POSITIONS = "feedapi-positions"
"""JSON: the feed's key, and positions by partition. They hold once the attempt is complete."""


class Format(StrEnum):
    """What one message holds."""

    BATCH = "batch"
    """A whole batch: the payloads, a line each."""
    EVENTS = "events"
    """One event of a batch."""
    POSITIONS = "positions"
    """Positions and no event: for relays only."""


class Saved(msgspec.Struct, frozen=True):
    """What stands in the header `POSITIONS`."""

    feed: str
    positions: dict[str, tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A complete attempt: its id and its messages."""

    id: str
    messages: tuple[Message, ...]

    @property
    def format(self) -> str:
        """What its messages hold."""
        return header(self.messages[0], FORMAT)

    def saved(self, stream: str) -> list[Saved]:
        """The positions that it saves. Raises `StreamError` when they can't be read."""
        try:
            return [
                msgspec.json.decode(message.headers[POSITIONS], type=Saved)
                for message in self.messages
                if POSITIONS in message.headers
            ]
        except msgspec.MsgspecError as error:
            raise StreamError(
                f"the positions at offset {self.messages[0].offset} can't be read", stream=stream
            ) from error


class AttemptAssembler:
    """Takes a partition's messages in order of their offsets, gives back attempts that are complete.

    It holds one incomplete attempt at most: a relay's messages have consecutive offsets, so a message of another attempt ends the one before.
    """

    def __init__(self) -> None:
        self._id = ""
        self._messages: list[Message] = []
        self.void = 0

    @property
    def held(self) -> int:
        """Messages of an attempt that is not complete yet."""
        return len(self._messages)

    def feed(self, message: Message) -> Attempt | None:
        """The attempt that `message` completes. Messages that are not part of any attempt end the one before and are ignored."""
        found = _place(message)
        if found is None:
            self._drop()
            return None
        attempt, index, count = found
        if attempt != self._id or index != len(self._messages):
            self._drop()
            if index:
                self.void += 1
                return None
            self._id = attempt
        self._messages.append(message)
        if len(self._messages) < count:
            return None
        complete = Attempt(attempt, tuple(self._messages))
        self._messages = []
        return complete

    def _drop(self) -> None:
        self.void += len(self._messages)
        self._id, self._messages = "", []


def header(message: Message, name: str) -> str:
    """A header as text; empty when it is missing or no text."""
    return message.headers[name].decode(errors="replace") if name in message.headers else ""


def save_header(feed: FeedKey, positions: Mapping[int, Position]) -> dict[str, bytes]:
    """The header that saves positions."""
    rows: dict[str, tuple[str, str, int]] = {
        str(partition): (position.cursor, position.status, position.revision)
        for partition, position in positions.items()
    }
    return {POSITIONS: msgspec.json.encode(Saved(feed.id, rows))}


def snapshot_of(message: Message) -> int | None:
    """Where a message says that its relay's positions start; None when a relay did not write it."""
    text = header(message, SNAPSHOT)
    return int(text) if text.isdecimal() and text.isascii() else None


def _place(message: Message) -> tuple[str, int, int] | None:
    attempt, index, count = header(message, ATTEMPT), header(message, INDEX), header(message, COUNT)
    if (
        not attempt
        or not (index.isascii() and index.isdecimal())
        or not (count.isascii() and count.isdecimal())
    ):
        return None
    return (attempt, int(index), int(count)) if int(index) < int(count) else None
