"""The rules of one response: what may be delivered, and what the response came to (R3, R6, R13).

No I/O. The async runtime, the clients and Spark feed a `PageReader` with the bytes of one response
and get batches back, and at the end the outcome.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder


class Outcome(Enum):
    """What a complete response came to."""

    PROGRESS = "the cursor moved"
    END = "no event and no other cursor than the one asked with"
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

    __slots__ = ("empty", "limit", "stuck")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stuck = 0
        """Responses in a row without progress."""
        self.empty = 0
        """Responses in a row that moved the cursor and held no event. An end is not counted."""

    def moved(self, *, events: bool) -> None:
        """Count a response that moved the cursor; `events` says whether it also held events."""
        self.stuck = 0
        self.empty = 0 if events else self.empty + 1

    def at_end(self) -> None:
        """Count a response that said that the cursor asked with is the present end."""
        self.stuck = 0

    def not_moved(self) -> bool:
        """Count a response without progress. Return whether there were too many in a row."""
        self.stuck += 1
        return self.stuck >= self.limit


class PageReader:
    """Reads one response of one partition.

    Any chunking of the same bytes gives the same events, the same last cursor and the same outcome.
    Only the division into batches depends on it: what one chunk closes is one batch. And the bound
    on bytes without a checkpoint applies to what is left after a chunk.

    A checkpoint that repeats the cursor asked with closes nothing. The events before it would come
    again with the next request, so they are held until another checkpoint follows.

    Arguments:
        decoder: a new one, for this response.
        feed, partition: for messages.
        asked: the cursor of the request.
        closed: whether the discovery before the request listed the partition as closed.
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
    )

    def __init__(
        self,
        decoder: PageDecoder,
        *,
        feed: str,
        partition: int,
        asked: str,
        closed: bool = False,
        progress: Progress | None = None,
        max_unclosed_bytes: int,
    ) -> None:
        self._decoder = decoder
        self._feed = feed
        self._partition = partition
        self._progress = progress
        self._max_unclosed = max_unclosed_bytes
        self._error: FeedError | None = None
        decoder.asked = asked
        self.asked = asked
        self.closed = closed
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
        """The events that only a checkpoint with the cursor asked with closes; None without any."""
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
            ProtocolError: a payload or a partition that the protocol forbids.
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
                and no new cursor, or for a closed partition neither an event nor a cursor.
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
        # A closed partition has to repeat the cursor: an empty body may be a fault on the way (R6).
        silent = decoder.cursor is None and self.closed
        if not decoder.saw_events and not silent:
            if progress is not None:
                progress.at_end()
            return Outcome.END
        if progress is not None and progress.not_moved():
            raise self._no_progress(progress.stuck)
        return Outcome.NO_PROGRESS

    def _no_progress(self, times: int) -> NoProgressError:
        what = (
            "brought events and no new cursor"
            if self._decoder.saw_events
            else "of a closed partition brought neither an event nor a cursor"
        )
        return NoProgressError(
            f"{times} responses in a row {what}", feed=self._feed, partition=self._partition
        )

    def __repr__(self) -> str:
        return (
            f"<PageReader of partition {self._partition}: asked {self.asked!r}, at {self.cursor!r},"
            f" {self.unclosed_bytes} bytes unclosed>"
        )
