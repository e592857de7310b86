"""A whole response, and a response as batches: without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from feedapi_client.errors import FeedError
from feedapi_client.model import Batch, Event
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.protocol.page import PageReader


@dataclass(frozen=True, slots=True)
class Page:
    """A whole response: its events up to the last checkpoint, and that checkpoint.

    `asked` is the cursor asked with, `cursor` None when there was no checkpoint.
    """

    partition: int
    asked: str
    events: list[Event]
    cursor: str | None

    @property
    def caught_up(self) -> bool:
        """Whether the response says that the cursor asked with is the partition's present end."""
        return not self.events and self.cursor == self.asked


class PageBatches:
    """A response as batches, without I/O: errors come behind what was checkpointed before them."""

    def __init__(self, reader: PageReader, partition: int) -> None:
        self._reader = reader
        self._partition = partition
        self._ready: deque[Batch] = deque()
        self._error: FeedError | None = None
        self._gave_any = False
        self.over = False

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes."""
        self._add(self._reader.feed(chunk))
        try:
            self._reader.check()
        except FeedError as error:
            self.broke(error)

    def complete(self) -> None:
        """Record that the body is complete."""
        self.over = True
        try:
            finished = self._reader.finish()
        except FeedError as error:
            self._add(self._reader.rest())
            self.broke(error)
            return
        self._add(finished.batches)
        held, cursor = self._reader.held, self._reader.last_checkpoint
        if held is not None:
            self._add([held])  # a single fetch shows what was sent, whatever the cursor
        elif not self._gave_any and cursor is not None:
            self._add([CheckpointedEvents([], cursor, 0)])

    def broke(self, error: FeedError) -> None:
        """Record that the body ended with an error."""
        self.over = True
        self._error = error

    def next(self) -> Batch | None:
        """The next batch; None when there is none yet, or, once it is `over`, none any more.

        Raises the error that ended it, behind the last batch.
        """
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _add(self, batches: list[CheckpointedEvents]) -> None:
        self._gave_any = self._gave_any or bool(batches)
        self._ready.extend(Batch(self._partition, b.events, b.cursor) for b in batches)


def page_of(batches: list[Batch], partition: int, asked: str) -> Page:
    """Join the batches of a whole response."""
    events = [event for batch in batches for event in batch.events]
    return Page(partition, asked, events, batches[-1].cursor if batches else None)


def check_unused(batches: PageBatches | None) -> None:
    """Raise RuntimeError for a fetch that was read already."""
    if batches is not None:
        raise RuntimeError("a fetch can be read once: call fetch() again")
