"""The bytes of one response in, events and cursors out (R3), in any chunking.

Complete lines are decoded many at a time (`fast_lines.py`) where all of them are what they should
be, and otherwise one by one, which also decides which error it is and what is kept before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
import orjson

from feedapi_client.errors import FeedError, LineTooLongError, ProtocolError, TornResponseError
from feedapi_client.model import Event, EventOrigin, without_lone_surrogates
from feedapi_client.protocol import cursors
from feedapi_client.protocol.dialects import Dialect, V1Line
from feedapi_client.protocol.fast_lines import Block, BlockDecoder, line_decoder
from feedapi_client.protocol.text import excerpt

RECENT = 8
"""Cursors that are remembered: so long is the longest cycle that is found (R13)."""
_KINDS = {ord("["): "a list", ord("t"): "a boolean", ord("f"): "a boolean", ord("n"): "null"}


class CheckpointedEvents(NamedTuple):
    """Events closed by a checkpoint.

    Attributes:
        events: oldest first; may be empty.
        cursor: resumes after the last of them.
        size: bytes of the response that they and their checkpoints took.
    """

    events: list[Event]
    cursor: str
    size: int

    def joined(self, later: CheckpointedEvents) -> CheckpointedEvents:
        """Return these events and the `later` ones as one, closed by the later checkpoint."""
        return CheckpointedEvents(self.events + later.events, later.cursor, self.size + later.size)


class PageDecoder:
    """Decodes one response. Any chunking of the same bytes gives the same events and errors.

    Arguments:
        dialect: of the feed.
        feed, partition: for messages; the partition also for the events.
        decoder: what the events' `json()` uses.
        max_line_bytes: bytes of a line, without its ``\\n``.
        quote: makes an excerpt of a publisher's plain text for a message.
    """

    __slots__ = (
        "_blocks",
        "_closed_by",
        "_dialect",
        "_error",
        "_feed",
        "_held_by",
        "_held_bytes",
        "_held_events",
        "_lines",
        "_max_line_bytes",
        "_open",
        "_open_bytes",
        "_origin",
        "_partition",
        "_quote",
        "_ready",
        "_tail",
        "cursor",
        "ready_bytes",
        "recent",
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
        self._lines = line_decoder(dialect.line)
        self._origin = EventOrigin(partition, decoder)
        self._dialect = dialect
        self._blocks = BlockDecoder(dialect, self._origin)
        self._feed = feed
        self._partition = partition
        self._max_line_bytes = max_line_bytes
        self._quote = quote
        self._error: FeedError | None = None
        self._tail = bytearray()
        self._open: list[Event] = []
        self._open_bytes = 0
        self._ready: list[Event] = []
        self._closed_by: str | None = None  # the cursor that closes `_ready`
        self._held_events = 0  # of `_open`: how many are before the last checkpoint
        self._held_bytes = 0
        self._held_by = ""
        self.recent: list[str] = []
        """The last cursors that closed something, the one asked with included. A checkpoint that
        repeats one of them closes nothing, because the events before it would come again (R13)."""
        self.cursor: str | None = None
        """The last checkpoint of the response so far, whether it closed something or not."""
        self.saw_events = False
        """Whether the response held an event so far, before or after the last checkpoint."""
        self.ready_bytes = 0
        """Bytes of the response that `take` would return."""
        self.unknown_commands = 0
        """Lines that were neither an event nor a checkpoint."""

    @property
    def tail_bytes(self) -> int:
        """Bytes that no checkpoint closed yet, the incomplete line included."""
        return self._open_bytes + len(self._tail)

    @property
    def open_events(self) -> int:
        """Events that no checkpoint closed yet."""
        return len(self._open)

    @property
    def held(self) -> CheckpointedEvents | None:
        """Events before a checkpoint that repeats a recent one, with no other behind; or None."""
        if not self._held_events:
            return None
        return CheckpointedEvents(self._open[: self._held_events], self._held_by, self._held_bytes)

    def feed(self, data: bytes) -> None:
        """Decode the next bytes of the response.

        What a checkpoint closed before the line of an error is kept for `take`. To feed more raises
        the same error again.

        Raises:
            TornResponseError: a line is not a message of the protocol.
            LineTooLongError: a line is longer than `max_line_bytes`.
            ProtocolError: a payload, a partition or a cursor that the protocol forbids.
        """
        self._check()
        cut = data.rfind(b"\n") + 1
        if cut:
            whole = cut == len(data) and not self._tail
            block = data if whole else b"".join((self._tail, memoryview(data)[:cut]))
            self._tail.clear()
            decoded = self._blocks.decode(block, max_line_bytes=self._max_line_bytes)
            if decoded is None:
                for line in block[:-1].split(b"\n"):
                    self._decode_line(line, len(line) + 1)
            else:
                self._add(decoded, len(block))
        if cut < len(data):
            self._tail += data[cut:] if cut else data
            if len(self._tail) > self._max_line_bytes:
                self._fail(self._too_long())

    def finish(self) -> None:
        """Note that the response is complete. A last line without ``\\n`` counts when it parses.

        Raises as `feed` does; TornResponseError when the last line does not parse.
        """
        self._check()
        if not self._tail:
            return
        line = bytes(self._tail)
        self._tail.clear()
        self._decode_line(line, len(line), complete=False)

    def take(self) -> CheckpointedEvents | None:
        """Return all events up to the last checkpoint; None without one since the last call."""
        if self._closed_by is None:
            return None
        taken = CheckpointedEvents(self._ready, self._closed_by, self.ready_bytes)
        self._ready = []
        self._closed_by = None
        self.ready_bytes = 0
        return taken

    def _add(self, block: Block, size: int) -> None:
        lines, records, checkpoints, cursors = block
        self.saw_events = self.saw_events or len(records) > len(checkpoints)
        closing = self._last_closing(cursors)
        # Of all that close something only the last counts, and so it is with those behind it.
        counting = {closing, len(checkpoints) - 1}
        start = 0
        for number, index in enumerate(checkpoints):
            self._open += records[start:index]
            start = index + 1
            if number in counting:
                after = sum(map(len, lines[start:]))
                self._checkpoint(cursors[number], size - after, closes=number == closing)
                size = after
        self._open += records[start:]
        self._open_bytes += size

    def _last_closing(self, found: list[str]) -> int:
        """Return the index of the last cursor that closes something; -1 without one."""
        new = set(found)
        if len(new) == len(found) and new.isdisjoint(self.recent):  # as it should be
            self.recent += found[-RECENT:]
            del self.recent[:-RECENT]
            return len(found) - 1
        closing = -1
        for index, cursor in enumerate(found):
            if self._closes(cursor):
                closing = index
        return closing

    def _closes(self, cursor: str) -> bool:
        """Note a checkpoint. Return whether it closes what is before it."""
        if cursor in self.recent:
            return False
        self.recent.append(cursor)
        del self.recent[:-RECENT]
        return True

    def _checkpoint(self, cursor: str, size: int, *, closes: bool) -> None:
        self._open_bytes += size
        self.cursor = cursor
        if not closes:
            self._held_events, self._held_bytes = len(self._open), self._open_bytes
            self._held_by = cursor
            return
        if self._ready:
            self._ready += self._open
        else:
            self._ready = self._open
        self.ready_bytes += self._open_bytes
        self._open, self._open_bytes = [], 0
        self._held_events = self._held_bytes = 0
        self._closed_by = cursor

    def _decode_line(self, line: bytes, size: int, *, complete: bool = True) -> None:
        if len(line) > self._max_line_bytes:
            self._fail(self._too_long())
        if not line or line.isspace():
            self._open_bytes += size
            return
        try:
            record = self._lines.decode(line)
        except (ValueError, RecursionError) as error:
            record = self._decode_text(line, error, complete)
        if self._dialect.names_partition:
            self._check_partition(record)
        self._accept(record, size)

    def _check_partition(self, record: Event) -> None:
        named = cast("V1Line", record)._line_partition
        if named == self._partition or self._blocks.names_partition([record]):
            return
        self._fail(self._error_of(ProtocolError, f"the response holds a line of partition {named}"))

    def _decode_text(self, line: bytes, error: Exception, complete: bool) -> Event:
        """Decode a line that msgspec refuses, if only its text is to blame.

        The escape of a surrogate without a partner is valid JSON, and the event is delivered as it
        was sent. A cursor or header that is not UTF-8 is an error of the publisher's that no retry
        mends.
        """
        mended = without_lone_surrogates(line)
        try:
            record = self._lines.decode(mended)
        except UnicodeDecodeError:
            self._fail(self._not_utf8(mended, error, complete))
        except (ValueError, RecursionError):
            self._fail(self._torn(line, error, complete))
        payload = bytes(record._payload)
        if payload:
            at = mended.rfind(payload)  # of a payload that is given twice the last one counts
            record._payload = msgspec.Raw(line[at : at + len(payload)])
        return record

    def _not_utf8(self, line: bytes, error: Exception, complete: bool) -> FeedError:
        """Return the error for text that is not UTF-8: the line's own, or that it is torn."""
        try:
            self._lines.decode(line.decode("utf-8", "replace").encode())
        except (ValueError, RecursionError):
            return self._torn(line, error, complete)
        return self._error_of(
            ProtocolError, "the response holds a cursor or a header that is not valid UTF-8"
        )

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
        if cursor is not None and not cursors.is_valid(cursor):
            problem = f"the response holds a cursor that is {cursors.problem(cursor)}"
            self._fail(self._error_of(ProtocolError, problem))
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
            self._checkpoint(cursor, size, closes=self._closes(cursor))

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
            f"a line is longer than {limit} bytes: raise Limits.max_line_bytes if such events are "
            "to be expected",
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
        # msgspec's errors name fields and positions, never values. Other errors may quote what they
        # could not decode, and are left out (R19).
        torn.__cause__ = error if isinstance(error, msgspec.MsgspecError) else None
        return torn

    def _shown(self, line: bytes) -> str:
        """Return what to show of a line: plain text, up to where a JSON payload may begin."""
        text = line.lstrip(b"\xef\xbb\xbf \t\r")
        text = b"" if text[:1] in (b"[", b'"') else text.partition(b"{")[0]
        return f": '{self._quote(text)}'" if text else ""
