"""Bytes to records to batches: the incremental decoder of one response.

One chunk's complete lines go through msgspec in a single call. What that call does not promise (one record a line, payloads of the right kind, cursors that
are one) is checked for the chunk as a whole, at a few nanoseconds a line; only a chunk that fails a check is looked at line by line, which also decides what
stays and which error it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
import orjson

from feedapi_client.errors import FeedError, LineTooLongError, ProtocolError, TornResponseError
from feedapi_client.model import Event, EventOrigin
from feedapi_client.protocol.dialects import Dialect, V1Line
from feedapi_client.protocol.text import excerpt

_NOTHING = msgspec.Raw()
# Between payloads: long, and made of a byte that JSON can't hold, so that counting it with the byte behind it skips through the payloads.
_FENCE = b"\x1e" * 16
_PIECE = 128  # payloads joined at a time
_LONGEST_KEY = 32  # bytes searched for the end of a payload's first key
_FEW = 16  # events in a block for which no head is learned
_MANY = 8  # fewer lines than this a checkpoint: these are not looked at one by one
_KINDS = {ord("["): "a list", ord("t"): "a boolean", ord("f"): "a boolean", ord("n"): "null"}


class CheckpointedEvents(NamedTuple):
    """Events closed by a checkpoint.

    `cursor` resumes after the last of them. `size` is the number of bytes that they and their
    checkpoints took in the response.
    """

    events: list[Event]
    cursor: str
    size: int

    def joined(self, later: CheckpointedEvents) -> CheckpointedEvents:
        """Both as one, closed by the later checkpoint."""
        return CheckpointedEvents(self.events + later.events, later.cursor, self.size + later.size)


@cache
def _decoder(line: type[Event]) -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(line)


class PageDecoder:
    """Decodes one response. Any chunking of the same bytes gives the same events, cursors and error.

    `decoder` is what the events' `json()` uses. `max_line_bytes` bounds a line, without its ``\\n``. `quote` makes an excerpt of a publisher's plain text
    for a message.
    """

    __slots__ = (
        "_dialect",
        "_error",
        "_feed",
        "_lines",
        "_max_line_bytes",
        "_open",
        "_open_bytes",
        "_origin",
        "_partition",
        "_quote",
        "_ready",
        "_run_cursor",
        "_shape",
        "_tail",
        "cursor",
        "ready_bytes",
        "saw_events",
        "unknown_commands",
    )

    def __init__(
        self,
        dialect: Dialect,
        *,
        feed: str,
        partition: int,
        decoder: Callable[[bytes], Any] = orjson.loads,
        max_line_bytes: int,
        quote: Callable[[bytes], str] = excerpt,
    ) -> None:
        self._dialect = dialect
        self._lines = _decoder(dialect.line)
        self._feed = feed
        self._partition = partition
        self._shape = _Shape(dialect, partition)
        self._origin = EventOrigin(partition, decoder)
        self._max_line_bytes = max_line_bytes
        self._quote = quote
        self._error: FeedError | None = None
        self._tail = bytearray()
        self._open: list[Event] = []
        self._open_bytes = 0
        self._ready: list[Event] = []
        self._run_cursor: str | None = None
        self.cursor: str | None = None
        """The last checkpoint of the response so far."""
        self.saw_events = False
        """Whether the response held an event so far, behind the last checkpoint or before it."""
        self.ready_bytes = 0
        """What `take` would hand over, in bytes of the response."""
        self.unknown_commands = 0
        """Lines that were neither an event nor a checkpoint."""

    @property
    def tail_bytes(self) -> int:
        """Bytes held behind the last checkpoint, the incomplete line included."""
        return self._open_bytes + len(self._tail)

    def feed(self, data: bytes) -> None:
        """Decode the next bytes of the response.

        Raises `TornResponseError` at a line that is no protocol message, `LineTooLongError`, and `ProtocolError` for a payload or a partition that the
        protocol forbids. What was checkpointed before that line stays, for `take`; feeding more raises the same error again.
        """
        self._check()
        cut = data.rfind(b"\n") + 1
        if cut:
            block = (
                b"".join((self._tail, memoryview(data)[:cut]))
                if self._tail or cut < len(data)
                else data
            )
            self._tail.clear()
            if not self._decode_block(block):
                self._decode_lines(block)
        if cut < len(data):
            self._tail += data[cut:] if cut else data
            if len(self._tail) > self._max_line_bytes:
                self._fail(self._too_long())

    def finish(self) -> None:
        """The response is complete: a last line without ``\\n`` counts when it parses.

        Raises as `feed` does; `TornResponseError` when the last line does not parse.
        """
        self._check()
        line = bytes(self._tail)
        self._tail.clear()
        self._decode_line(line, len(line), complete=False)

    def take(self) -> CheckpointedEvents | None:
        """All events up to the last checkpoint received since the last call; None without a new checkpoint. A run may hold no event."""
        if self._run_cursor is None:
            return None
        run = CheckpointedEvents(self._ready, self._run_cursor, self.ready_bytes)
        self._ready = []
        self._run_cursor = None
        self.ready_bytes = 0
        return run

    def _decode_block(self, block: bytes) -> bool:
        """Decode complete lines at once; False, with nothing changed, when one of them may need a closer look."""
        try:
            records = self._lines.decode_lines(block)
        except (ValueError, RecursionError):
            return False
        lines = BytesIO(
            block
        ).readlines()  # on b"\n" only; msgspec takes newlines as mere white space
        if len(records) != len(lines) or (
            len(block) > self._max_line_bytes and max(map(len, lines)) > self._max_line_bytes
        ):
            return False
        origin = self._origin
        marks = []
        for index, record in enumerate(records):
            record._origin = origin
            if record._cursor is not None:
                marks.append(index)
        if not self._shape.fits(block, lines, records, marks):
            return False
        self._add(records, marks, lines, len(block))
        return True

    def _add(self, records: list[Event], marks: list[int], lines: list[bytes], size: int) -> None:
        self.saw_events = self.saw_events or len(records) > len(marks)
        start = 0
        for index in marks:
            self._open += records[start:index]
            start = index + 1
        if marks:
            behind = sum(map(len, lines[start:]))
            self._checkpoint(records[start - 1]._cursor or "", size - behind)
            size = behind
        self._open += records[start:]
        self._open_bytes += size

    def _checkpoint(self, cursor: str, size: int) -> None:
        if self._ready:
            self._ready += self._open
        else:
            self._ready = self._open
        self._open = []
        self.ready_bytes += self._open_bytes + size
        self._open_bytes = 0
        self.cursor = self._run_cursor = cursor

    def _decode_lines(self, block: bytes) -> None:
        for line in block[:-1].split(b"\n"):
            self._decode_line(line, len(line) + 1)

    def _decode_line(self, line: bytes, size: int, *, complete: bool = True) -> None:
        if len(line) > self._max_line_bytes:
            self._fail(self._too_long())
        if not line or line.isspace():
            self._open_bytes += size
            return
        try:
            record = self._lines.decode(line)
        except (ValueError, RecursionError) as error:
            self._fail(self._torn(line, error, complete))
        if not self._shape.partitions_fit([record]):
            named = cast("V1Line", record)._line_partition
            self._fail(
                self._error_of(ProtocolError, f"the response holds a line of partition {named}")
            )
        self._accept(record, size)

    def _accept(self, record: Event, size: int) -> None:
        payload, cursor = bytes(record._payload), record._cursor
        if payload and payload[:1] not in (b"{", b'"'):
            kind = _KINDS.get(payload[0], "a number")
            self._fail(
                self._error_of(
                    ProtocolError,
                    f"an event's payload is {kind}: the protocol allows a JSON object or a string",
                )
            )
        if cursor == "":
            self._fail(self._error_of(TornResponseError, "the response holds an empty cursor"))
        if payload:
            record._origin = self._origin
            record._cursor = None
            self.saw_events = True
            self._open.append(record)
        elif cursor is None:
            self.unknown_commands += 1
        if cursor is None:
            self._open_bytes += size
        else:
            self._checkpoint(cursor, size)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: FeedError) -> NoReturn:
        self._error = error
        self._tail.clear()
        raise error

    def _error_of(self, kind: type[FeedError], message: str) -> FeedError:
        return kind(message, feed=self._feed, partition=self._partition)

    def _too_long(self) -> FeedError:
        limit = self._max_line_bytes
        return self._error_of(
            LineTooLongError,
            f"a line is longer than {limit} bytes: raise Limits.max_line_bytes if such events are to be expected",
        )

    def _torn(self, line: bytes, error: Exception, complete: bool) -> FeedError:
        what = (
            "holds a line that is no protocol message"
            if complete
            else "ended in the middle of a line"
        )
        torn = self._error_of(
            TornResponseError, f"the response {what} ({len(line)} bytes){self._shown(line)}"
        )
        # msgspec names fields and positions, never values; what it could not decode at all may be quoted, and is left out.
        torn.__cause__ = error if isinstance(error, msgspec.MsgspecError) else None
        return torn

    def _shown(self, line: bytes) -> str:
        """What to show of a line: plain text up to where JSON, and with it a payload, may begin."""
        text = line.lstrip(b"\xef\xbb\xbf \t\r")
        text = b"" if text[:1] in (b"[", b'"') else text.partition(b"{")[0]
        return f": '{self._quote(text)}'" if text else ""


class _Shape:
    """Checks a block of lines: each holds one record, an event whose payload is an object or a string, or a checkpoint. Errs on the side of doubt.

    A publisher writes its lines alike: when as many lines begin with the same head, up to a payload's first byte, as there are events, those lines are
    what they seem, and the few checkpoints are looked at one by one. (Between ``}`` and ``{`` a newline can only stand outside of a record.) The head that
    is tried first goes on to the end of the payload's first key, because a longer needle is found faster.
    """

    __slots__ = ("_dialect", "_needles", "_partition")

    def __init__(self, dialect: Dialect, partition: int) -> None:
        self._dialect = dialect
        self._partition = partition
        self._needles: list[bytes] = []

    def fits(
        self, block: bytes, lines: list[bytes], records: list[Event], marks: list[int]
    ) -> bool:
        alike = self._begin_alike(block, len(records) - len(marks))
        # Lines that begin alike name the partition there.
        if not self.partitions_fit([records[at] for at in marks] if alike else records):
            return False
        if alike and len(marks) * _MANY < len(lines):
            return all(self._is_mark(lines[at], records[at]) for at in marks)
        if block.count(b"}\n{") != len(lines) - 1 or block[:1] != b"{" or block[-2:] != b"}\n":
            return False
        if not all(records[at]._cursor and records[at]._payload == _NOTHING for at in marks):
            return False
        return alike or _payloads_fit(
            [record._payload for record in records if record._cursor is None]
        )

    def partitions_fit(self, records: list[Event]) -> bool:
        """Whether no line names another partition than the one asked for (only v1's name any)."""
        if not self._dialect.names_partition:
            return True
        named = {line._line_partition for line in cast("list[V1Line]", records)}
        return named <= {None, self._partition, str(self._partition)}

    def _begin_alike(self, block: bytes, events: int) -> bool:
        needles = self._needles or (self._learn(block) if events > _FEW else [])
        for index, needle in enumerate(needles):
            if block.count(needle) + block.startswith(needle[2:]) == events:
                self._needles = needles[index:]
                return True
        self._needles = []
        return False

    def _is_mark(self, line: bytes, record: Event) -> bool:
        if line == b'{"cursor":%b}\n' % orjson.dumps(record._cursor):
            return bool(record._cursor)
        try:
            alone = _decoder(self._dialect.line).decode(line)
        except (ValueError, RecursionError):
            return False
        return (
            bool(alone._cursor) and alone._cursor == record._cursor and alone._payload == _NOTHING
        )

    def _learn(self, block: bytes) -> list[bytes]:
        heads = self._dialect.heads(self._partition)
        for start in (0, block.find(b"\n") + 1):
            for head in heads:
                if block.startswith(head, start):
                    begin = start + len(head)
                    end = block.find(b'":', begin, begin + _LONGEST_KEY) + 1
                    return [b"}\n" + block[start : max(begin, end)], b"}\n" + head]
        return []


def _payloads_fit(payloads: list[msgspec.Raw]) -> bool:
    """Whether every payload is an object, or every one a string: their first bytes are counted, some payloads at a time.

    (Joined all at once they take so much memory that the allocator gives it back to the system each time, which costs more than the count.)
    """
    if not payloads:
        return True
    first = bytes(payloads[0])[:1]
    if first not in (b"{", b'"'):
        return False
    needle = _FENCE + first
    return len(payloads) == sum(
        _FENCE.join([b"", *payloads[at : at + _PIECE]]).count(needle)
        for at in range(0, len(payloads), _PIECE)
    )
