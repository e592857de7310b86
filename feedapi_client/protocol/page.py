"""The rules of one response: what may be delivered, and what the response came to (R3, R6, R13).

No I/O. The async runtime, the clients and Spark feed a `PageReader` with the bytes of one response
and get batches back, and at the end the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError, TornResponseError
from feedapi_client.model import FIRST, LAST, Event
from feedapi_client.protocol.decoder import Decoded, PageDecoder
from feedapi_client.protocol.text import shown

# Cursors in a row that every partition remembers: the longest cycle that is always found (R13).
RECENT = 8
MOST_PASSED = 4096  # digests of passed cursors of one partition; for a moment twice as many
_ALL_PASSED = 1 << 18
# Sound empty answers that show the end of a closed partition without `lastCursor`, at least.
MIN_EMPTY_ANSWERS = 3
# Empty answers in a row that lead away from where a reader began: then it follows the last one.
MOVES_BELIEVED = 3
_MOST_DOUBLINGS = 16
_ANSWERS = 8  # of a closed partition within `settle_time`, once it seems to be at its end
_PARTS = 10  # of the time in which a feed's answers are counted


def passed_limit(partitions: int) -> int:
    return min(MOST_PASSED, _ALL_PASSED // max(1, partitions))


class CheckpointedEvents(NamedTuple):
    """Events closed by a checkpoint; `size` is what their lines took, in bytes. `marks` are the
    checkpoints among them, where somebody asked for these: events before each, and its cursor.
    """

    events: list[Event]
    cursor: str
    size: int
    marks: Sequence[tuple[int, str]] = ()


class Outcome(Enum):
    """What a complete response came to."""

    PROGRESS = "the cursor moved"
    END = "no event and no other cursor than the one asked with"
    SILENT = "no event and no cursor at all, of an open partition"
    EMPTY = "no event and no other cursor, of a closed partition whose end is not listed"
    LAGGING = "no event and no other cursor, of a closed partition that ends at another one"
    BEHIND = "an older place of the partition: the replica that answered lags behind"
    DOUBTFUL = "no event and another cursor, where a reader began: perhaps an older place"
    UNRECOGNIZED = "only lines that are neither an event nor a checkpoint"
    NO_PROGRESS = "no other cursor than the one asked with, although that is not the end"


class Finished(NamedTuple):
    batches: list[CheckpointedEvents]
    outcome: Outcome


class Progress:
    """What the responses of one partition came to. Shared by all its readers, in turn. After
    `limit` responses in a row without progress there is an error, `passed` cursors are remembered
    (R13). An empty answer that leads away from where it began to read, or from where the last
    events came, has to be repeated for `doubted_for` seconds: a replica that lags may name its own,
    older end.
    """

    __slots__ = (  # there is one for each of 32,768 partitions
        *("_began", "_doubted_for", "_moves", "_moves_since", "_moving", "_most", "_passed"),
        *("empty", "left", "limit", "stuck"),
    )

    def __init__(
        self, limit: float, *, passed: int = MOST_PASSED, doubted_for: float | None = None
    ) -> None:
        self.limit = limit
        self.stuck = 0  # responses in a row without progress
        self.empty = 0  # responses in a row that moved the cursor and held no event
        self.left: list[str] = []  # the last cursors from which an empty response led away
        self._most = max(passed, RECENT)
        self._passed: dict[int, None] = {}  # digests, in their order: the last is asked with
        self._doubted_for = doubted_for
        # Where it began to read, or where the last events ended; None behind an empty answer.
        self._began: str | None = None
        # Empty answers in a row that led away from there, and when the first of them came.
        self._moves, self._moves_since = 0, 0.0
        # Whether empty answers were believed: this publisher's cursors move without events.
        self._moving = False

    def asked(self, cursor: str, end: str | None = None) -> None:
        """Note the cursor of a request. To come back to the known `end` is always progress."""
        passed, digest = self._passed, hash(cursor)
        if next(reversed(passed), None) != digest:  # what came after this cursor comes again
            if digest not in passed:
                passed.clear()
                passed[digest] = None
            while next(reversed(passed)) != digest:
                passed.popitem()
            self.left.clear()
            if cursor != self._began:
                doubted = self._doubted_for is not None and cursor not in (FIRST, LAST)
                self._began, self._moves = cursor if doubted else None, 0
        if end is not None and end != cursor:
            passed.pop(hash(end), None)

    def passes(self, cursors: Sequence[str]) -> bool:
        """Note checkpoints. False, and nothing, if one of them was passed before."""
        passed, new = self._passed, list(map(hash, cursors))
        if not passed.keys().isdisjoint(new) or len(set(new)) < len(new):
            return False
        passed.update(dict.fromkeys(new[-self._most :]))
        if len(passed) > 2 * self._most:
            for old in list(islice(passed, len(passed) - self._most)):
                del passed[old]
        return True

    def leads_back(self, cursor: str) -> bool:
        """Whether a passed cursor lies before responses of which one brought an event."""
        recent = list(islice(reversed(self._passed), RECENT))
        return hash(cursor) not in recent[: self.empty + 1]

    def moved(self, cursor: str, *, events: bool) -> None:
        self.stuck = 0
        self.empty = 0 if events else self.empty + 1
        doubted = events and self._doubted_for is not None and not self._moving
        self._began, self._moves = cursor if doubted else None, 0

    def doubts(self, cursor: str) -> bool:
        """Whether an empty answer may lead to an older place: this is where the reader began."""
        return cursor == self._began

    def led_away(self, now: float) -> bool:
        """Count such an answer. Return whether there were enough of them to believe the last."""
        if not self._moves:
            self._moves_since = now
        self._moves += 1
        long = now >= self._moves_since + (self._doubted_for or 0.0)
        self._moving = self._moving or (long and self._moves >= MOVES_BELIEVED)
        return long and self._moves >= MOVES_BELIEVED

    def returned(self, cursor: str) -> None:
        """Note that the cursor goes back to one from which an empty response had led away."""
        self._passed.pop(hash(cursor), None)
        self._passed[hash(cursor)] = None
        self.empty, self._moving = 0, False

    def at_end(self) -> None:
        self.stuck = self._moves = 0

    def not_moved(self) -> bool:
        """Count a response without progress. Return whether there were too many in a row."""
        self.stuck += 1
        return self.stuck >= self.limit


class PageReader:
    """Reads one response of one partition, by a decoder of its own. Any chunking of the same bytes
    gives the same events, last cursor and outcome. A checkpoint that repeats the cursor asked with,
    or one of those passed lately, closes nothing. The events before it would come again, so they
    are held until another checkpoint follows (R13). `closed` and `last_cursor` are what the
    discovery before the request listed; where events are selected, `last_cursor` is another place,
    and None.
    """

    def __init__(
        self,
        decoder: PageDecoder,
        *,
        feed: str,
        partition: int,
        asked: str,
        closed: bool = False,
        last_cursor: str | None = None,
        progress: Progress | None = None,
        max_unclosed_bytes: int,
    ) -> None:
        self._decoder = decoder
        self._where: dict[str, Any] = {"feed": feed, "partition": partition}
        self._max_unclosed = max_unclosed_bytes
        self._error: FeedError | None = None
        self._open: list[Event] = []
        self._open_bytes = 0
        self._held = 0  # of `_open`: how many events are before the last checkpoint
        self._ready: list[Event] = []
        self._ready_bytes = 0
        self._closed_by: str | None = None  # the cursor that closes `_ready`
        self._doubted: str | None = None  # without events; only further responses can lead to it
        self.asked = decoder.asked = asked
        self.closed = closed
        self.last_cursor = last_cursor if closed else None
        self._progress = progress or Progress(math.inf, passed=RECENT)
        self._progress.asked(asked, self.last_cursor)
        self.cursor = asked  # of the last batch given so far; at first the one asked with
        self.last_checkpoint: str | None = None  # also when it is the one asked with

    @property
    def kept_bytes(self) -> int:
        """Bytes of events that no checkpoint closed yet, and of the incomplete line. Lines that
        nobody keeps may come for weeks, and don't count (R15).
        """
        return self._open_bytes + self._decoder.tail_bytes

    @property
    def unclosed_events(self) -> int:
        return len(self._open)

    @property
    def unknown_commands(self) -> int:
        return self._decoder.unknown_commands

    @property
    def held(self) -> CheckpointedEvents | None:
        """The events that only a checkpoint with a recent cursor closes; None without any."""
        if not self._held:
            return None
        return CheckpointedEvents(self._open[: self._held], self.last_checkpoint or "", 0)

    def feed(self, chunk: bytes | list[bytes]) -> list[CheckpointedEvents]:
        """Read the next bytes, or lines. Return what a checkpoint closed, as at most one batch.
        Never raises for what they hold, because the batches before a fault count: `check` and
        `finish` raise it afterwards.
        """
        if self._error is None:
            try:
                self._decoder.feed(chunk, self._receive)
            except FeedError as error:
                self._error = error
        batches = self.rest()
        if self._error is None and self.kept_bytes > self._max_unclosed:
            self._error = self.too_much_unclosed()
        return batches

    def parts(self, chunk: bytes) -> Iterator[list[bytes]]:
        """Cut a chunk into lines, as many as take a millisecond or two to `feed`."""
        return self._decoder.parts(chunk)

    def check(self) -> None:
        """Raise the fault that `feed` found behind the batches it returned, if there was one."""
        if self._error is not None:
            raise self._error

    def finish(self, now: float = 0.0) -> Finished:
        """Note, once, that the response is complete at the time `now`, on any clock. Raises what
        `check` does, and `NoProgressError` after too many responses in a row with events and no new
        cursor (R13).
        """
        self.check()
        try:
            self._decoder.finish(self._receive)
        except FeedError as error:
            self._error = error
            raise
        batches, progress = self.rest(), self._progress
        empty = self.cursor == self.asked and not self._decoder.saw_events
        if empty and self._doubted is not None and progress.led_away(now):
            batches.append(self._led_to(self._doubted))
        outcome = self._classify()
        if outcome is Outcome.BEHIND and self._decoder.saw_events:
            batches.append(self._led_to(self.last_checkpoint or ""))
            progress.returned(self.cursor)
        return Finished(batches, outcome)

    def rest(self) -> list[CheckpointedEvents]:
        """Return what a checkpoint closed and no call returned yet, after an error."""
        cursor, progress = self._closed_by, self._progress
        if cursor is None:
            return []
        batch = CheckpointedEvents(self._ready, cursor, self._ready_bytes)
        self._ready, self._ready_bytes, self._closed_by = [], 0, None
        if not batch.events:
            if cursor == self.cursor:
                return []
            # Without events it may be an older place than the one asked with (R13).
            began = self.cursor == self.asked and cursor != self.last_cursor
            if began and progress.doubts(self.asked):
                self._doubted = cursor
                return []
        self.cursor = cursor
        progress.stuck = 0  # already here: the response may still break off
        return [batch]

    def too_much_unclosed(self) -> BufferLimitError:
        return BufferLimitError(
            f"{self.kept_bytes} bytes came without a checkpoint to deliver them by. They hold "
            f"{self.unclosed_events} events, which take memory of their own, and "
            f"Limits.max_buffered_bytes is {self._max_unclosed}. Raise it, or ask the publisher "
            "for checkpoints more often",
            **self._where,
        )

    # ------------------------------------------------------------------ checkpoints

    def _receive(self, decoded: Decoded) -> None:
        lines, events, checkpoints, cursors, size = decoded
        unseen = [len(lines[at]) for at in checkpoints]
        for at in reversed(checkpoints):
            del events[at]
        self._open_bytes += size - sum(unseen)
        closing = self._last_closing(cursors) if cursors else -1
        if closing >= 0:
            end = checkpoints[closing] - closing
            behind = events[end:]
            del events[end:]
            before = self._ready + self._open
            self._ready, self._open = before + events if before else events, behind
            self._closed_by = cursors[closing]
            left = sum(map(len, lines[checkpoints[closing] + 1 :])) - sum(unseen[closing + 1 :])
            self._ready_bytes += self._open_bytes - left
            self._open_bytes, self._held = left, 0
        else:
            self._open += events
        if cursors:
            self.last_checkpoint = cursors[-1]
            if closing < len(cursors) - 1:  # all but what is behind the last checkpoint
                self._held = len(self._open) - (len(lines) - 1 - checkpoints[-1])

    def _last_closing(self, cursors: list[str]) -> int:
        """Return the index of the last cursor that closes something; -1 without one."""
        passes = self._progress.passes
        if passes(cursors):
            return len(cursors) - 1
        closing = -1
        for at, cursor in enumerate(cursors if len(cursors) > 1 else ()):
            if passes([cursor]):
                closing = at
        return closing

    def _led_to(self, cursor: str) -> CheckpointedEvents:
        """Read on from a cursor of this response that closed nothing."""
        self.cursor = cursor
        return CheckpointedEvents([], cursor, 0)

    # ------------------------------------------------------------------ outcomes

    def _classify(self) -> Outcome:
        progress, saw_events = self._progress, self._decoder.saw_events
        if self.cursor != self.asked:
            if not saw_events and not progress.empty:
                progress.left = [*progress.left, self.asked][-RECENT:]
            progress.moved(self.cursor, events=saw_events)
            return Outcome.PROGRESS
        if saw_events:
            if progress.not_moved():
                raise self._no_progress()
            whole = len(self._open) == self._held  # no event is behind the last checkpoint
            came_back = self.last_checkpoint in progress.left and whole
            return Outcome.BEHIND if came_back else Outcome.NO_PROGRESS
        if self._doubted is not None:
            return Outcome.DOUBTFUL
        return Outcome.BEHIND if self._returned() else self._end()

    def _returned(self) -> bool:
        """Whether an empty response names an older place. Two replicas may name the end of an open
        partition differently. Where every response of such a cycle was empty, it is the end.
        """
        cursor = self.last_checkpoint
        if cursor is None or cursor == self.asked or self.last_cursor is not None:
            return False
        return self.closed or self._progress.leads_back(cursor)

    def _end(self) -> Outcome:
        """Return what a response without events and without another cursor means (R6)."""
        silent = self.last_checkpoint is None
        if self.last_cursor not in (None, self.asked):
            return Outcome.LAGGING
        if self.last_cursor is not None:
            outcome = Outcome.END
        elif silent and self._decoder.unknown_commands and not self._decoder.echoed:
            return Outcome.UNRECOGNIZED
        elif self.closed:
            outcome = Outcome.EMPTY
        else:
            outcome = Outcome.SILENT if silent else Outcome.END
        self._progress.at_end()
        return outcome

    def _no_progress(self) -> NoProgressError:
        what = (
            "brought events and no new cursor"
            if self.last_checkpoint in (None, self.asked)
            else "returned to a cursor that was asked with before, as in a cycle"
        )
        return NoProgressError(
            f"{self._progress.stuck} responses in a row {what}. Asked with {shown(self.asked)}",
            **self._where,
        )


_FAULTS = {
    Outcome.LAGGING: (
        "the partition is closed and ends at lastCursor {last}, but nothing comes behind {asked}: "
        "the replica that answers may lag behind. If nothing is missing, 'feedapi cursors drain "
        "{partition}' ends it here"
    ),
    Outcome.BEHIND: (
        "the response to a fetch from {asked} names an older place of the partition as its end: "
        "the replica that answers lags behind. It is asked again"
    ),
    Outcome.UNRECOGNIZED: (
        "the response holds only lines that are neither an event nor a checkpoint: a gateway on "
        "the way may have answered in the publisher's place"
    ),
}


def outcome_error(
    outcome: Outcome, asked: str, last_cursor: str | None, *, feed: str, partition: int
) -> FeedError:
    """Return the error for a response that shows neither progress nor an end (R6, R13)."""
    kind = TornResponseError if outcome is Outcome.UNRECOGNIZED else NoProgressError
    text = _FAULTS.get(outcome, outcome.value)
    text = text.format(last=shown(last_cursor or ""), asked=shown(asked), partition=partition)
    return kind(text, feed=feed, partition=partition)


class EndEvidence:
    """The sound empty answers of one closed partition whose end no discovery lists (R6). `pause`
    comes before the second answer is asked for; later pauses are longer.
    """

    __slots__ = ("_info", "_pause", "_settle_time", "answers")

    def __init__(self, settle_time: float, pause: float) -> None:
        self._settle_time = settle_time
        self._pause = pause
        self.answers = 0  # sound ones in a row
        self._info: object = None

    def reset(self) -> None:
        self.answers, self._info = 0, None

    def lacks_discovery(self, info: object) -> bool:
        """Whether no discovery has succeeded since the first answer; `info` is the present one."""
        return self._info is None or info is self._info

    def add(self, info: object, *, now: float, since: float) -> float | None:
        """Count an answer of a request after the discovery `info`. Since `since` the partition is
        seen closed, and nothing failed. Return the seconds until the next request; None: the end is
        shown.
        """
        if not self.answers:
            self._info = info
        self.answers += 1
        left = since + self._settle_time - now
        if left <= 0 and self.answers >= MIN_EMPTY_ANSWERS and not self.lacks_discovery(info):
            return None
        # Often enough that one partition which always fails is not half of a feed's answers.
        longest = max(self._pause, self._settle_time / _ANSWERS)
        pause = min(self._pause * float(2 ** min(self.answers - 1, _MOST_DOUBLINGS)), longest)
        return min(pause, left) if left > 0 else pause


class FeedAnswers:
    """How many of a feed's answers of the last `seconds` have failed (R6)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: dict[int, list[int]] = {}  # of each part: all answers, and those that failed
        self.failed_at = float("-inf")  # when half of them had failed last

    def add(self, now: float, *, failed: bool) -> None:
        part = int(now * _PARTS / self._seconds)
        if part not in self._counts:
            self._counts = {at: n for at, n in self._counts.items() if at > part - _PARTS}
            self._counts[part] = [0, 0]
        counts = self._counts[part]
        counts[0] += 1
        counts[1] += failed
        if failed and 2 * sum(n[1] for n in self._counts.values()) >= sum(
            n[0] for n in self._counts.values()
        ):
            self.failed_at = now
