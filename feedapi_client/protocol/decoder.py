"""The bytes of one response in, events and cursors out (R3), in any chunking.

Complete lines are decoded many at a time (`fast_lines.py`) where all of them are what they should
be, and otherwise one by one, which also decides which error it is and what is kept before it.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
import orjson

from feedapi_client.errors import FeedError, LineTooLongError, ProtocolError, TornResponseError
from feedapi_client.model import Event, EventOrigin, without_lone_surrogates
from feedapi_client.protocol import cursors
from feedapi_client.protocol.dialects import Dialect, V1Line
from feedapi_client.protocol.fast_lines import Block, BlockDecoder, line_decoder, may_hold_event
from feedapi_client.protocol.text import excerpt

RECENT = 8
"""Cursors that are remembered: so long is the longest cycle that is found (R13)."""
_NULL = b"null"
_OTHER_KEYS = ("data", "event", "cursor", "headers", "partition", "partitions")
"""The keys that are looked for in lines that seem to be nothing, without regard to case."""
_any_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_KINDS = {ord("["): "a list", ord("t"): "a boolean", ord("f"): "a boolean", ord("n"): "null"}


_DISCOVERY = (
    "a fetch is answered with a discovery: a redirect, gateway or cache on the way drops the path "
    "or the query of requests"
)


class CheckpointedEvents(NamedTuple):
    """Events closed by a checkpoint.

    Attributes:
        events: oldest first; may be empty.
        cursor: resumes after the last of them.
        size: bytes of the response that they and their checkpoints took.
        marks: checkpoints among them, the last one included, where somebody asked for these: how
            many events are before each, and its cursor.
    """

    events: list[Event]
    cursor: str
    size: int
    marks: Sequence[tuple[int, str]] = ()

    def joined(self, later: CheckpointedEvents) -> CheckpointedEvents:
        """Return these events and the `later` ones as one, closed by the later checkpoint."""
        return CheckpointedEvents(self.events + later.events, later.cursor, self.size + later.size)


class PassedCursors:
    """Digests of the cursors that were passed lately, oldest first.

    Arguments:
        most: how many are remembered; for a moment there may be twice as many.
    """

    __slots__ = ("_digests", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._digests: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def holds_none_of(self, cursors: Sequence[str]) -> bool:
        """Return whether none of the cursors was passed."""
        return self._digests.keys().isdisjoint(map(hash, cursors))

    def add(self, cursors: Sequence[str]) -> None:
        """Note that these were passed, in this order."""
        digests = self._digests
        digests.update(dict.fromkeys(map(hash, cursors[-self._most :])))
        if len(digests) > 2 * self._most:
            for old in list(islice(digests, len(digests) - self._most)):
                del digests[old]

    def restart(self, cursor: str) -> None:
        """Forget what was passed behind the cursor: it comes again. All, where that is unknown."""
        digests, digest = self._digests, hash(cursor)
        if digest not in digests:
            digests.clear()
            digests[digest] = None
        while next(reversed(digests)) != digest:
            digests.popitem()

    def forget(self, cursor: str) -> None:
        """Let the cursor count as new."""
        self._digests.pop(hash(cursor), None)


class PageDecoder:
    """Decodes one response. Any chunking of the same bytes gives the same events and errors.

    Arguments:
        dialect: of the feed.
        feed, partition: for messages; the partition also for the events.
        decoder: what the events' `json()` uses.
        max_line_bytes: bytes of a line, without its ``\\n``.
        quote: makes an excerpt of a publisher's plain text for a message.
        any_payload: deliver also payloads that are neither an object nor a string. The protocol
            forbids them: without this they are an error.
    """

    __slots__ = (
        "_any_payload",
        "_begun",
        "_blocks",
        "_closed_by",
        "_dialect",
        "_error",
        "_feed",
        "_held_by",
        "_held_bytes",
        "_held_events",
        "_kept_bytes",
        "_lines",
        "_max_line_bytes",
        "_open",
        "_open_bytes",
        "_origin",
        "_partition",
        "_quote",
        "_ready",
        "_tail",
        "asked",
        "cursor",
        "echoed",
        "passed",
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
        any_payload: bool = False,
    ) -> None:
        self._any_payload = any_payload
        self._lines = line_decoder(dialect.line)
        self._origin = EventOrigin(partition, decoder)
        self._dialect = dialect
        self._blocks = BlockDecoder(dialect, self._origin)
        self._feed = feed
        self._partition = partition
        self._max_line_bytes = max_line_bytes
        self._quote = quote
        self._error: FeedError | None = None
        self._begun = False
        self._tail = bytearray()
        self._open: list[Event] = []
        self._open_bytes = 0
        self._kept_bytes = 0
        self._ready: list[Event] = []
        self._closed_by: str | None = None  # the cursor that closes `_ready`
        self._held_events = 0  # of `_open`: how many are before the last checkpoint
        self._held_bytes = 0
        self._held_by = ""
        self.recent: list[str] = []
        """The last cursors that closed something, the one asked with included. A checkpoint that
        repeats one of them closes nothing, because the events before it would come again (R13)."""
        self.asked: str | None = None
        """The cursor of the request, where it is known. See `_is_echo`."""
        self.passed: PassedCursors | None = None
        """Older cursors, which close nothing either."""
        self.cursor: str | None = None
        """The last checkpoint of the response so far, whether it closed something or not."""
        self.echoed = False
        """Whether the response echoed the ``_first`` or ``_last`` that it was asked for."""
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
    def kept_bytes(self) -> int:
        """Bytes of events that no checkpoint closed yet, and of the incomplete line.

        Not those of lines that nobody keeps, which may come for weeks: blank lines, unknown
        commands, checkpoints that close nothing (R15).
        """
        return self._kept_bytes + len(self._tail)

    @property
    def open_events(self) -> int:
        """Events that no checkpoint closed yet."""
        return len(self._open)

    @property
    def open_behind(self) -> int:
        """Events behind the last checkpoint."""
        return len(self._open) - self._held_events

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
        if not self._tail and data[:cut].isspace():
            # Heartbeats, or a bomb of them, which would take minutes line by line.
            self._begun, self._open_bytes = True, self._open_bytes + cut
        elif cut:
            whole = cut == len(data) and not self._tail
            block = data if whole else b"".join((self._tail, memoryview(data)[:cut]))
            self._tail.clear()
            decoded = self._blocks.decode(block, max_line_bytes=self._max_line_bytes)
            self._begun = self._begun or decoded is not None
            if decoded is None or not self._add(decoded, len(block)):
                for line in block[:-1].split(b"\n"):
                    self._decode_line(line, len(line) + 1)
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

    def _add(self, block: Block, size: int) -> bool:
        """Take a block. False for one with a special cursor, which is decoded line by line."""
        lines, records, checkpoints, cursors_found = block
        new = set(cursors_found)
        if not cursors.SPECIAL.isdisjoint(new):
            return False
        self.saw_events = self.saw_events or len(records) > len(checkpoints)
        closing = self._last_closing(cursors_found, new)
        # Of all that close something only the last counts, and so it is with those behind it.
        counting = {closing, len(checkpoints) - 1}
        start = 0
        for number, index in enumerate(checkpoints):
            self._open += records[start:index]
            start = index + 1
            if number in counting:
                after = sum(map(len, lines[start:]))
                self._checkpoint(cursors_found[number], size - after, closes=number == closing)
                size = after
        self._open += records[start:]
        self._open_bytes += size
        events = slice(checkpoints[closing] + 1 if closing >= 0 else 0, None)
        others = sum(len(lines[at]) for at in checkpoints[closing + 1 :])
        self._kept_bytes += sum(map(len, lines[events])) - others
        return True

    def _last_closing(self, found: list[str], new: set[str]) -> int:
        """Return the index of the last cursor that closes something; -1 without one.

        `new` are the cursors that were `found`.
        """
        passed = self.passed
        fresh = len(new) == len(found) and new.isdisjoint(self.recent)
        if fresh and (passed is None or passed.holds_none_of(found)):
            if passed is not None:
                passed.add(found)
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
        if self.passed is not None:
            if not self.passed.holds_none_of((cursor,)):
                return False
            self.passed.add((cursor,))
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
        self._open, self._open_bytes, self._kept_bytes = [], 0, 0
        self._held_events = self._held_bytes = 0
        self._closed_by = cursor

    def _decode_line(self, line: bytes, size: int, *, complete: bool = True) -> None:
        if len(line) > self._max_line_bytes:
            self._fail(self._too_long())
        if not self._begun:
            self._begun, line = True, line.removeprefix(BOM_UTF8)
        if not line or line.isspace():
            self._open_bytes += size
            return
        try:
            record = self._lines.decode(line)
        except (ValueError, RecursionError) as error:
            record = self._decode_text(line, error, complete)
        cursor = record._cursor
        if not bytes(record._payload) and (not cursor or may_hold_event(line, cursor)):
            self._look_closer(record, line)
        if self._dialect.names_partition:
            self._check_partition(record)
        self._accept(record, size)

    def _look_closer(self, record: Event, line: bytes) -> None:
        """Fill in what a line holds under other keys than those of its dialect (R3).

        Go's JSON decoder finds keys without regard to case, and publishers in the field were tried
        with nothing else. A response may also be of another dialect than the last discovery.
        """
        mended = without_lone_surrogates(line)
        try:
            given = _any_object(mended)
        except (ValueError, RecursionError):
            return  # of nothing that could be delivered: an unknown command
        found = {
            key: value for name, value in given.items() if (key := name.lower()) in _OTHER_KEYS
        }
        if "partitions" in found and bytes(found["partitions"])[:1] in (b"[", b"n"):
            self._fail(self._error_of(TornResponseError, _DISCOVERY))
        payload = found.get("data", found.get("event"))
        if payload is not None:
            at = mended.rfind(bytes(payload))
            record._payload = msgspec.Raw(line[at : at + len(bytes(payload))])
        self._read_text(record, found)

    def _read_text(self, record: Event, found: dict[str, msgspec.Raw]) -> None:
        """Fill in cursor, headers and partition from `found`. A value of a wrong type is torn."""
        kept = {
            key: bytes(found[key]) for key in ("cursor", "headers", "partition") if key in found
        }
        line = b"{%s}" % b",".join(b'"%s":%s' % (key.encode(), raw) for key, raw in kept.items())
        try:
            text = self._lines.decode(line)
        except ValueError as error:
            self._fail(self._torn(line, error, complete=True))
        record._cursor = text._cursor
        if self._dialect.names_partition:
            record._headers = text._headers
            v1, named = cast("V1Line", record), cast("V1Line", text)
            v1._line_partition = named._line_partition

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
        except (ValueError, RecursionError):
            self._fail(self._unreadable(mended, error, complete))
        payload = bytes(record._payload)
        if payload:
            at = mended.rfind(payload)  # of a payload that is given twice the last one counts
            record._payload = msgspec.Raw(line[at : at + len(payload)])
        return record

    def _unreadable(self, line: bytes, error: Exception, complete: bool) -> FeedError:
        """Return the error for a line that only its text makes unreadable, or that it is torn.

        Of what type msgspec's error is for bytes that are not UTF-8 depends on its version.
        """
        try:
            self._lines.decode(line.decode("utf-8", "replace").encode())
        except (ValueError, RecursionError):
            return self._torn(line, error, complete)
        return self._error_of(
            ProtocolError, "the response holds a cursor or a header that is not valid UTF-8"
        )

    def _accept(self, record: Event, size: int) -> None:
        payload, cursor = bytes(record._payload), record._cursor
        if payload == _NULL and cursor:
            payload = b""  # as Go's encoder writes a checkpoint that has room for an event
        elif payload and cursor == "":
            cursor = None  # and an event that has room for a checkpoint
        if payload and payload[:1] not in (b"{", b'"') and not self._any_payload:
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
        echo = cursor in cursors.SPECIAL and self._is_echo(cursor, payload)
        if echo:
            self.echoed, cursor = True, None
        if payload:
            record._origin = self._origin
            record._cursor = None
            self.saw_events = True
            self._open.append(record)
            self._kept_bytes += size
        elif cursor is None and not echo:
            self.unknown_commands += 1
        if cursor is None:
            self._open_bytes += size
        else:
            self._checkpoint(cursor, size, closes=self._closes(cursor))

    def _is_echo(self, cursor: str | None, payload: bytes) -> bool:
        """Whether `_first` or `_last` only echoes the cursor asked with: that is no cursor (R3).

        Behind events it is a checkpoint that closes nothing (R13), and another one is an error.
        """
        if cursor != self.asked:
            problem = f"the response holds the cursor {cursor}, which only a request may use"
            self._fail(self._error_of(ProtocolError, problem))
        return not payload and not self.saw_events

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
            TornResponseError,
            f"the response {what} ({len(line)} bytes){self._shown(line)}{_reason(error)}",
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


def _reason(error: Exception) -> str:
    """What is wrong with a line, as far as that quotes nothing of it."""
    if isinstance(error, msgspec.MsgspecError):
        return f". {error}"
    if isinstance(error, UnicodeDecodeError):
        return f". It is not UTF-8: {error.reason} at byte {error.start}"
    return ". It is nested too deeply" if isinstance(error, RecursionError) else ""
