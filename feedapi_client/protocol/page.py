"""The rules of one response: what may be delivered, and what the response came to (R3, R6, R13).

No I/O. The async runtime, the clients and Spark feed a `PageReader` with the bytes of one response
and get batches back, and at the end the outcome.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from feedapi_client.errors import (
    BufferLimitError,
    FeedError,
    NoProgressError,
    TornResponseError,
)
from feedapi_client.model import FIRST, LAST
from feedapi_client.protocol.cursors import shown
from feedapi_client.protocol.decoder import (
    RECENT,
    CheckpointedEvents,
    PageDecoder,
    PassedCursors,
)

MOST_PASSED = 4096
"""Digests of passed cursors that one partition keeps, at most."""
_ALL_PASSED = 1 << 18
MIN_EMPTY_ANSWERS = 3
"""Sound empty answers that show the end of a closed partition without `lastCursor`, at least."""
MOVES_BELIEVED = 3
"""Empty answers in a row that lead away from where a reader began, at least: then it follows the
last one."""
_MOST_DOUBLINGS = 16
_ANSWERS = 8
"""Answers of a closed partition within `settle_time`, at least, once it seems to be at its end."""
_PARTS = 10
"""Of the time in which a feed's answers are counted."""


def passed_limit(partitions: int) -> int:
    """Return how many passed cursors each of so many partitions may remember (R13)."""
    return min(MOST_PASSED, _ALL_PASSED // max(1, partitions))


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


_SOUND = (Outcome.END, Outcome.SILENT, Outcome.EMPTY)


class Finished(NamedTuple):
    """The end of a complete response: the batches that its last line closed, and the outcome."""

    batches: list[CheckpointedEvents]
    outcome: Outcome


class Progress:
    """What the responses of one partition came to. Shared by all its readers, in turn.

    Arguments:
        limit: the number of responses in a row without progress that is an error (R13).
        passed: how many passed cursors are remembered beyond the last 8, as digests. One takes
            about 100 bytes. With at most 8 there are no digests.
        doubted_for: the seconds over which an empty answer that leads away from where it began to
            read, or from where the last events came, has to be repeated; None: it is not doubted. A
            replica that lags may name its own, older end, and as a cursor that was never passed: of
            two responses each has checkpoints of its own.
    """

    __slots__ = (
        "_began",
        "_cautious",
        "_doubted_for",
        "_moves",
        "_moves_since",
        "_moving",
        "empty",
        "left",
        "limit",
        "passed",
        "recent",
        "stuck",
    )

    def __init__(
        self, limit: int, *, passed: int = MOST_PASSED, doubted_for: float | None = None
    ) -> None:
        self._cautious = doubted_for is not None
        self._doubted_for = doubted_for or 0.0
        self._began: str | None = None
        """Where it began to read, or where the last events ended; None behind an empty answer."""
        self._moves = 0
        """Empty answers in a row that led away from there."""
        self._moves_since = 0.0
        """When the first of them came."""
        self._moving = False
        """Whether empty answers were believed: this publisher's cursors move without events."""
        self.limit = limit
        self.recent: list[str] = []
        """The last cursors that closed something, over all responses (see `PageDecoder`)."""
        self.passed = PassedCursors(passed) if passed > RECENT else None
        """All that were passed lately."""
        self.left: list[str] = []
        """The last cursors from which an empty response led away."""
        self.stuck = 0
        """Responses in a row without progress."""
        self.empty = 0
        """Responses in a row that moved the cursor and held no event. An end is not counted."""

    def asked(self, cursor: str, end: str | None = None) -> list[str]:
        """Note the cursor of a request. Return `recent`, which ends with it.

        `end` is the known end of a closed partition. To come back to it is always progress, because
        nothing is asked for behind it.
        """
        if self.recent[-1:] != [cursor]:  # a restart: what came after this cursor comes again
            self.recent[:] = [cursor]
            self.left.clear()
            if cursor != self._began:
                self._began = cursor if self._cautious and cursor not in (FIRST, LAST) else None
                self._moves = 0
            if self.passed is not None:
                self.passed.restart(cursor)
        if end is not None and end != cursor:
            if end in self.recent:
                self.recent.remove(end)
            if self.passed is not None:
                self.passed.forget(end)
        return self.recent

    def moved(self, cursor: str, *, events: bool) -> None:
        """Count a response that moved the cursor; `events` says whether it also held events."""
        self.stuck = 0
        self.empty = 0 if events else self.empty + 1
        self._began = cursor if events and self._cautious and not self._moving else None
        self._moves = 0

    def doubts(self, cursor: str) -> bool:
        """Whether an empty answer may lead to an older place: this is where the reader began."""
        return cursor == self._began

    def led_away(self, now: float) -> bool:
        """Count such an answer. Return whether there were enough of them to believe the last."""
        if not self._moves:
            self._moves_since = now
        self._moves += 1
        if self._moves < MOVES_BELIEVED or now < self._moves_since + self._doubted_for:
            return False
        self._moving = True
        return True

    def returned(self, cursor: str) -> None:
        """Note that the cursor goes back to one from which an empty response had led away."""
        self.recent[:] = [each for each in self.recent if each != cursor] + [cursor]
        self.empty = 0
        self._moving = False

    def at_end(self) -> None:
        """Count a response that said that the cursor asked with is the present end."""
        self.stuck = self._moves = 0

    def not_moved(self) -> bool:
        """Count a response without progress. Return whether there were too many in a row."""
        self.stuck += 1
        return self.stuck >= self.limit


class PageReader:
    """Reads one response of one partition.

    Any chunking of the same bytes gives the same events, the same last cursor and the same outcome.
    Only the division into batches depends on it: what one chunk closes is one batch. And the bound
    on bytes without a checkpoint applies to what is left after a chunk.

    A checkpoint that repeats the cursor asked with, or one of the last 8, closes nothing. The
    events before it would come again, so they are held until another checkpoint follows (R13).

    Arguments:
        decoder: a new one, for this response.
        feed, partition: for messages.
        asked: the cursor of the request.
        closed: whether the discovery before the request listed the partition as closed.
        last_cursor: the end that this discovery listed for a closed partition. None where it is
            not known, or where events are selected: it is then another place.
        progress: the counts of the partition. Without them each response stands alone, and there is
            never a `NoProgressError`.
        max_unclosed_bytes: the bytes that may come without a checkpoint that closes them.
    """

    __slots__ = (
        "_decoder",
        "_doubted",
        "_error",
        "_feed",
        "_max_unclosed",
        "_partition",
        "_progress",
        "asked",
        "closed",
        "cursor",
        "last_cursor",
    )

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
        self._feed = feed
        self._partition = partition
        self._progress = progress
        self._max_unclosed = max_unclosed_bytes
        self._error: FeedError | None = None
        self._doubted: str | None = None
        """A cursor without events, to which only further responses can lead."""
        self.asked = asked
        self.closed = closed
        self.last_cursor = last_cursor if closed else None
        decoder.asked = asked
        decoder.recent = [asked] if progress is None else progress.asked(asked, self.last_cursor)
        if progress is not None:
            decoder.passed = progress.passed
        self.cursor = asked
        """The cursor of the last batch given so far; at first the one asked with."""

    @property
    def unclosed_bytes(self) -> int:
        """Bytes that no checkpoint closed yet."""
        return self._decoder.tail_bytes

    @property
    def kept_bytes(self) -> int:
        """Those of events among these bytes, and of an incomplete line: what takes memory."""
        return self._decoder.kept_bytes

    @property
    def unclosed_events(self) -> int:
        """Events among these bytes."""
        return self._decoder.open_events

    @property
    def last_checkpoint(self) -> str | None:
        """The last cursor of the response so far, also when it is the one asked with; or None."""
        return self._decoder.cursor

    @property
    def unknown_commands(self) -> int:
        """Lines that were neither an event nor a checkpoint."""
        return self._decoder.unknown_commands

    @property
    def held(self) -> CheckpointedEvents | None:
        """The events that only a checkpoint with a recent cursor closes; None without any."""
        return self._decoder.held

    def feed(self, chunk: bytes) -> list[CheckpointedEvents]:
        """Read the next bytes. Return what a checkpoint closed, as at most one batch.

        Never raises for what the bytes hold, because the batches before a fault count: `check` and
        `finish` raise it afterwards. Bytes behind a fault are ignored.
        """
        if self._error is None:
            try:
                self._decoder.feed(chunk)
            except FeedError as error:
                self._error = error
        batches = self._take()
        if self._error is None and self.kept_bytes > self._max_unclosed:
            self._error = self.too_much_unclosed()
        return batches

    def check(self) -> None:
        """Raise the fault that `feed` found behind the batches it returned, if there was one.

        Raises:
            TornResponseError: a line is not a message of the protocol.
            LineTooLongError: a line is longer than `Limits.max_line_bytes`.
            ProtocolError: a payload, a partition or a cursor that the protocol forbids.
            BufferLimitError: more bytes without a checkpoint than `max_unclosed_bytes`.
        """
        if self._error is not None:
            raise self._error

    def finish(self, now: float = 0.0) -> Finished:
        """Note that the response is complete. A last line without ``\\n`` counts when it parses.

        Call it once. Every batch that was closed before is returned by `feed` already. `now` is the
        time, on any clock; it counts where the progress is `doubted_for` some.

        Raises:
            TornResponseError: the last line does not parse.
            NoProgressError: too many responses in a row made no progress (R13): they brought events
                and no new cursor, or returned to a recent one.
            FeedError: what `check` raises.
        """
        self.check()
        try:
            self._decoder.finish()
        except FeedError as error:
            self._error = error
            raise
        batches = self._take()
        if self._is_believed(now):
            assert self._doubted is not None
            self.cursor = self._doubted
            batches.append(CheckpointedEvents([], self.cursor, 0))
        outcome = self._classify()
        if outcome is Outcome.BEHIND and self._decoder.saw_events:
            assert self._progress is not None
            assert self._decoder.cursor is not None
            self.cursor = self._decoder.cursor
            self._progress.returned(self.cursor)
            batches.append(CheckpointedEvents([], self.cursor, 0))
        return Finished(batches, outcome)

    def rest(self) -> list[CheckpointedEvents]:
        """Return what a checkpoint closed and no call returned yet, after an error."""
        return self._take()

    def too_much_unclosed(self) -> BufferLimitError:
        """Return the error for bytes that no checkpoint closes and no buffer can hold."""
        return BufferLimitError(
            f"{self.kept_bytes} bytes came without a checkpoint to deliver them by. They hold "
            f"{self.unclosed_events} events, which take memory of their own, and "
            f"Limits.max_buffered_bytes is {self._max_unclosed}. Raise it, or ask the publisher "
            "for checkpoints more often",
            feed=self._feed,
            partition=self._partition,
        )

    def _take(self) -> list[CheckpointedEvents]:
        batch = self._decoder.take()
        if batch is None or (not batch.events and batch.cursor == self.cursor):
            return []
        if not batch.events and self._is_doubtful(batch.cursor):
            self._doubted = batch.cursor
            return []
        self.cursor = batch.cursor
        if self._progress is not None:
            self._progress.stuck = 0  # already here: the response may still break off
        return [batch]

    def _is_doubtful(self, cursor: str) -> bool:
        """Whether a cursor without events may be an older place than the one asked with (R13)."""
        progress = self._progress
        if progress is None or self.cursor != self.asked or cursor == self.last_cursor:
            return False
        return progress.doubts(self.asked)

    def _is_believed(self, now: float) -> bool:
        """Whether the doubted cursor of an empty response is followed after all."""
        if self._doubted is None or self.cursor != self.asked or self._decoder.saw_events:
            return False
        assert self._progress is not None
        return self._progress.led_away(now)

    def _classify(self) -> Outcome:
        decoder, progress = self._decoder, self._progress
        if self.cursor != self.asked:
            if progress is not None:
                if not decoder.saw_events and not progress.empty:
                    progress.left = [*progress.left, self.asked][-RECENT:]
                progress.moved(self.cursor, events=decoder.saw_events)
            return Outcome.PROGRESS
        if self._doubted is not None and not decoder.saw_events:
            return Outcome.DOUBTFUL
        if decoder.saw_events:
            if progress is not None and progress.not_moved():
                raise self._no_progress(progress.stuck)
            left = progress is not None and decoder.cursor in progress.left
            came_back = left and not decoder.open_behind
            return Outcome.BEHIND if came_back else Outcome.NO_PROGRESS
        return Outcome.BEHIND if self._returned() else self._end()

    def _returned(self) -> bool:
        """Whether an empty response names an older place, for no good reason.

        Two replicas may name the end of an open partition differently. Where every response of such
        a cycle was empty, it is the end; a lagging replica of a closed one is found by its end.
        """
        cursor, recent = self._decoder.cursor, self._decoder.recent
        if cursor in (None, self.asked) or self.last_cursor is not None:
            return False
        if self.closed or cursor not in recent:
            return True
        back = len(recent) - 1 - recent.index(cursor)
        return back > (0 if self._progress is None else self._progress.empty)

    def _end(self) -> Outcome:
        """Return what a response without events and without another cursor means (R6)."""
        silent = self._decoder.cursor is None
        if self.last_cursor is not None:
            outcome = Outcome.END if self.asked == self.last_cursor else Outcome.LAGGING
        elif silent and self._decoder.unknown_commands and not self._decoder.echoed:
            outcome = Outcome.UNRECOGNIZED
        elif self.closed:
            outcome = Outcome.EMPTY
        else:
            outcome = Outcome.SILENT if silent else Outcome.END
        if self._progress is not None and outcome in _SOUND:
            self._progress.at_end()
        return outcome

    def _no_progress(self, times: int) -> NoProgressError:
        what = (
            "brought events and no new cursor"
            if self._decoder.cursor in (None, self.asked)
            else "returned to a cursor that was asked with before, as in a cycle"
        )
        return NoProgressError(
            f"{times} responses in a row {what}. Asked with {shown(self.asked)}",
            feed=self._feed,
            partition=self._partition,
        )

    def __repr__(self) -> str:
        return (
            f"<PageReader of partition {self._partition}: asked {self.asked!r}, at {self.cursor!r},"
            f" {self.unclosed_bytes} bytes unclosed>"
        )


def lagging_error(asked: str, last_cursor: str | None, *, feed: str, partition: int) -> FeedError:
    """Return the error for a closed partition whose replica does not reach its end (R6).

    Arguments:
        asked: the cursor behind which nothing came.
        last_cursor: the end that discovery lists.
        feed, partition: for the message.
    """
    return NoProgressError(
        f"the partition is closed and ends at lastCursor {shown(last_cursor or '')}, but nothing "
        f"comes behind {shown(asked)}: the replica that answers may lag behind. If nothing is "
        f"missing, 'feedapi cursors drain {partition}' ends it here",
        feed=feed,
        partition=partition,
    )


def unrecognized_error(*, feed: str, partition: int) -> FeedError:
    """Return the error for a response that says nothing of the partition (R6)."""
    return TornResponseError(
        "the response holds only lines that are neither an event nor a checkpoint: a gateway on "
        "the way may have answered in the publisher's place",
        feed=feed,
        partition=partition,
    )


def behind_error(asked: str, *, feed: str, partition: int) -> FeedError:
    """Return the error for a response that leads back to an older place (R13)."""
    return NoProgressError(
        f"the response to a fetch from {shown(asked)} names an older place of the partition as its "
        "end: the replica that answers lags behind. It is asked again",
        feed=feed,
        partition=partition,
    )


class EndEvidence:
    """The empty answers of one closed partition whose end no discovery lists (R6).

    A moment's answer proves nothing: a replica that lags, a gateway and a page of maintenance
    answer 200 as well. Sound empty answers are an end once there were three, with a discovery in
    between that still lists the partition as closed, and nothing failed for a time.

    Arguments:
        settle_time: the seconds of that time.
        pause: seconds before the second answer is asked for; later pauses are longer.
    """

    __slots__ = ("_answers", "_info", "_pause", "_settle_time")

    def __init__(self, settle_time: float, pause: float) -> None:
        self._settle_time = settle_time
        self._pause = pause
        self._answers = 0
        self._info: object = None

    @property
    def answers(self) -> int:
        """Sound empty answers in a row."""
        return self._answers

    def reset(self) -> None:
        """Forget the answers: something else came, or a request failed."""
        self._answers, self._info = 0, None

    def lacks_discovery(self, info: object) -> bool:
        """Whether no discovery has succeeded since the first answer; `info` is the present one."""
        return self._info is None or info is self._info

    def add(self, info: object, *, now: float, since: float) -> float | None:
        """Count a sound empty answer.

        Arguments:
            info: the discovery before the request.
            now: the present time.
            since: when the partition was first seen closed, or when that failed last which lets its
                time begin anew.

        Returns:
            None when the end is shown; otherwise seconds until the next request.
        """
        if not self._answers:
            self._info = info
        self._answers += 1
        left = since + self._settle_time - now
        if left <= 0 and self._answers >= MIN_EMPTY_ANSWERS and not self.lacks_discovery(info):
            return None
        # Often enough that one partition which always fails is not half of a feed's answers.
        longest = max(self._pause, self._settle_time / _ANSWERS)
        pause = min(self._pause * float(2 ** min(self._answers - 1, _MOST_DOUBLINGS)), longest)
        return min(pause, left) if left > 0 else pause


class FeedAnswers:
    """How many of a feed's answers of the last `seconds` have failed (R6).

    They are counted in parts of that time, so that the memory does not grow with the requests.
    """

    __slots__ = ("_counts", "_seconds", "failed_at")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: dict[int, list[int]] = {}
        """Of each part of the time: all answers, and those that failed."""
        self.failed_at = float("-inf")
        """When half of them had failed last."""

    def add(self, now: float, *, failed: bool) -> None:
        """Count an answer."""
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
