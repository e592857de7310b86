"""The rules of one response: what may be delivered, and what the response came to (R3, R6, R13).

No I/O. The async runtime, the clients and Spark feed a `PageReader` with the bytes of one response
and get batches back, and at the end the outcome.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError
from feedapi_client.protocol.cursors import shown
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder


class Outcome(Enum):
    """What a complete response came to."""

    PROGRESS = "the cursor moved"
    END = "no event and no other cursor than the one asked with"
    SILENT = "no event and no cursor at all, of a closed partition, for the first time"
    LAGGING = "no event and no other cursor, of a closed partition that ends at another one"
    NO_PROGRESS = "no other cursor than the one asked with, although that is not the end"


class Finished(NamedTuple):
    """The end of a complete response: the batches that its last line closed, and the outcome."""

    batches: list[CheckpointedEvents]
    outcome: Outcome


class Progress:
    """Counts what the responses of one partition came to. Shared by all its readers, in turn.

    Arguments:
        limit: the number of responses in a row without progress that is an error (R13).
    """

    __slots__ = ("empty", "limit", "recent", "silent", "stuck")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.recent: list[str] = []
        """The last cursors that closed something, over all responses (see `PageDecoder`)."""
        self.silent = False
        """Whether the last response of a closed partition held no cursor and no event."""
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
        if end in self.recent[:-1]:
            self.recent.remove(end)
        return self.recent

    def moved(self, *, events: bool) -> None:
        """Count a response that moved the cursor; `events` says whether it also held events."""
        self.stuck = 0
        self.silent = False
        self.empty = 0 if events else self.empty + 1

    def at_end(self) -> None:
        """Count a response that said that the cursor asked with is the present end."""
        self.stuck = 0
        self.silent = False

    def was_silent(self) -> bool:
        """Count a response without a cursor. Return whether the one before was silent too."""
        before, self.silent = self.silent, True
        return before

    def not_moved(self) -> bool:
        """Count a response without progress. Return whether there were too many in a row."""
        self.silent = False
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
        self.asked = asked
        self.closed = closed
        self.last_cursor = last_cursor if closed else None
        decoder.recent = [asked] if progress is None else progress.asked(asked, self.last_cursor)
        self.cursor = asked
        """The cursor of the last batch given so far; at first the one asked with."""

    @property
    def unclosed_bytes(self) -> int:
        """Bytes kept because no checkpoint closed them yet."""
        return self._decoder.tail_bytes

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
        if self._error is None and self.unclosed_bytes > self._max_unclosed:
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

    def finish(self) -> Finished:
        """Note that the response is complete. A last line without ``\\n`` counts when it parses.

        Call it once. Every batch that was closed before is returned by `feed` already.

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
        return Finished(self._take(), self._classify())

    def rest(self) -> list[CheckpointedEvents]:
        """Return what a checkpoint closed and no call returned yet, after an error."""
        return self._take()

    def too_much_unclosed(self) -> BufferLimitError:
        """Return the error for bytes that no checkpoint closes and no buffer can hold."""
        return BufferLimitError(
            f"{self.unclosed_bytes} bytes came without a checkpoint to deliver them by. They hold "
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
        self.cursor = batch.cursor
        if self._progress is not None:
            self._progress.stuck = 0  # already here: the response may still break off
        return [batch]

    def _classify(self) -> Outcome:
        decoder, progress = self._decoder, self._progress
        if self.cursor != self.asked:
            if progress is not None:
                progress.moved(events=decoder.saw_events)
            return Outcome.PROGRESS
        if decoder.saw_events or self._returned():
            if progress is not None and progress.not_moved():
                raise self._no_progress(progress.stuck)
            return Outcome.NO_PROGRESS
        return self._end()

    def _returned(self) -> bool:
        """Whether the cursor went back to a recent one, for no good reason.

        Two replicas may name the end of an open partition differently. Where every response of such
        a cycle was empty, it is the end; a lagging replica of a closed one is found by its end.
        """
        cursor, recent = self._decoder.cursor, self._decoder.recent
        if cursor in (None, self.asked) or self.last_cursor is not None:
            return False
        back = len(recent) - 1 - recent.index(cursor)
        empty = 0 if self._progress is None else self._progress.empty
        return self.closed or back > empty

    def _end(self) -> Outcome:
        """Return what a response without events and without another cursor means (R6)."""
        progress = self._progress
        if self.last_cursor is not None and self.last_cursor != self.asked:
            return Outcome.LAGGING
        if self.closed and self.last_cursor is None and self._decoder.cursor is None:
            # An empty body may be a fault on the way, and two of them are not.
            if progress is None or not progress.was_silent():
                return Outcome.SILENT
        elif progress is not None:
            progress.at_end()
        return Outcome.END

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
