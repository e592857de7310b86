"""`PageReader`: the rules of one response (R3, R6, R13), without I/O.

Whoever drives it, the async runtime, the clients or Spark, feeds it the bytes of one response and
gets batches back, and at the end what the response came to.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder


class Outcome(Enum):
    """What a complete response came to."""

    PROGRESS = "the cursor moved"
    END = "no event, and the cursor asked with"
    NO_PROGRESS = "events, or nothing at all, and no new cursor"


class Finished(NamedTuple):
    """The end of a complete response: the batches that its last bytes closed, and the outcome."""

    batches: list[CheckpointedEvents]
    outcome: Outcome


class Progress:
    """What the responses of one partition came to, one after the other. Outlives them.

    `limit` is the number of responses in a row without progress that are too many (R13).
    """

    __slots__ = ("empty", "limit", "stuck")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stuck = 0
        """Responses in a row without progress."""
        self.empty = 0
        """Responses in a row that moved the cursor and held no event."""

    def moved(self, *, events: bool) -> None:
        """The cursor moved; `events` says whether the response also held events."""
        self.stuck = 0
        self.empty = 0 if events else self.empty + 1

    def at_end(self) -> None:
        """The response said that the cursor asked with is the present end."""
        self.stuck = 0

    def none(self) -> bool:
        """Nothing moved. Return whether that is too often now."""
        self.stuck += 1
        return self.stuck >= self.limit


class PageReader:
    """Reads one response of one partition. Any chunking of its bytes gives the same events.

    Arguments:
        decoder: of this response.
        feed, partition: for messages.
        asked: the cursor asked with.
        closed: whether the discovery before the request listed the partition as closed.
        progress: of the partition; without it the responses before this one don't matter.
        max_unclosed_bytes: the bytes that may come without a checkpoint.
    """

    __slots__ = (
        "_decoder",
        "_error",
        "_feed",
        "_held",
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
        self._held: CheckpointedEvents | None = None
        self._error: FeedError | None = None
        self.asked = asked
        self.closed = closed
        self.cursor = asked
        """The cursor behind all batches given so far."""

    @property
    def unclosed_bytes(self) -> int:
        """Bytes held back because no checkpoint allows to deliver them yet."""
        return self._decoder.tail_bytes + (self._held.size if self._held else 0)

    @property
    def last_checkpoint(self) -> str | None:
        """The last cursor of the response so far, moved or not; None when there was none."""
        return self._decoder.cursor

    @property
    def unknown_commands(self) -> int:
        """Lines that were neither an event nor a checkpoint."""
        return self._decoder.unknown_commands

    @property
    def held(self) -> CheckpointedEvents | None:
        """Events closed only by the cursor asked with: not delivered, they would come again."""
        return self._held

    def feed(self, chunk: bytes) -> list[CheckpointedEvents]:
        """Read the next bytes and return what a checkpoint closed: at most one batch, coalesced.

        A fault in the bytes never takes batches before it along: `check` and `finish` raise it.
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
        """Raise the fault that `feed` found behind the batches it returned.

        Raises:
            TornResponseError: a line is not a protocol message.
            LineTooLongError: a line is longer than `Limits.max_line_bytes`.
            ProtocolError: a payload or a partition that the protocol forbids.
            BufferLimitError: too many bytes without a checkpoint.
        """
        if self._error is not None:
            raise self._error

    def finish(self) -> Finished:
        """The response is complete: a last line without ``\\n`` counts when it parses.

        Raises as `check` does; the batches before the fault are in `rest` then.

        Raises:
            NoProgressError: too many responses in a row brought events and no new cursor, or of a
                closed partition neither an event nor a cursor (R13).
        """
        self.check()
        try:
            self._decoder.finish()
        except FeedError as error:
            self._error = error
            raise
        return Finished(self._take(), self._classify())

    def rest(self) -> list[CheckpointedEvents]:
        """Return what a checkpoint closed and nobody took: for a response that broke off."""
        return self._take()

    def too_much_unclosed(self) -> BufferLimitError:
        """Build the error for bytes that no checkpoint allows to deliver and no buffer can hold."""
        return BufferLimitError(
            f"{self.unclosed_bytes} bytes came without a checkpoint to deliver them by, and "
            f"Limits.max_buffered_bytes is {self._max_unclosed}. Raise it, or ask the publisher "
            "for checkpoints more often",
            feed=self._feed,
            partition=self._partition,
        )

    def _take(self) -> list[CheckpointedEvents]:
        batch = self._decoder.take()
        if batch is None:
            return []
        if self._held is not None:
            batch, self._held = self._held.joined(batch), None
        if batch.events and batch.cursor == self.asked:
            self._held = batch  # the cursor does not move: deliver once a later one does (R13)
            return []
        if not batch.events and batch.cursor == self.cursor:
            return []
        self.cursor = batch.cursor
        return [batch]

    def _classify(self) -> Outcome:
        decoder, progress = self._decoder, self._progress
        if self.cursor != self.asked:
            if progress is not None:
                progress.moved(events=decoder.saw_events)
            return Outcome.PROGRESS
        silent_end = decoder.cursor is None and self.closed
        if self._held is None and not decoder.saw_events and not silent_end:
            if progress is not None:
                progress.at_end()
            return Outcome.END
        if progress is not None and progress.none():
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
