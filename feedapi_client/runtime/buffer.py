"""How many received bytes may wait for the application, over all partitions (R16).

Counted is what they take in memory. An event of 12 bytes on the wire takes 138 (CPython 3.11,
msgspec 0.22, pages of 64 KiB): a record, its view of the page, a place in a list, and the page.
"""

from __future__ import annotations

import anyio

from feedapi_client.protocol.page import CheckpointedEvents

EVENT_BYTES = 128
"""What an event takes beside its bytes."""
HEADERS_BYTES = 64
"""What the headers of an event (v1) take in addition. They are decoded when they are asked for."""
BATCH_BYTES = 384
"""What a batch takes beside its events: a batch, its cursor, a list and the page's own object."""


def memory_of(batch: CheckpointedEvents) -> int:
    """Return how many bytes of memory a batch takes."""
    each = EVENT_BYTES
    if batch.events and batch.events[0]._headers is not None:
        each += HEADERS_BYTES
    return batch.size + len(batch.events) * each + BATCH_BYTES


class BufferBudget:
    """Counts buffered bytes.

    Fetches wait for room before they read on. Code that takes bytes out of a buffer frees them.

    Arguments:
        limit: the bytes that may be counted at the same time.
        step: what one read brings at most, as far as is known before the first one.
    """

    def __init__(self, limit: int, step: int = 64 * 1024) -> None:
        self.limit = limit
        self.used = 0
        self.deliverable = 0
        """Number of the used bytes that the application can take."""
        self.reserved = 0
        """Room set aside for reads under way."""
        self._largest_step = limit // 2
        self._step = min(step, self._largest_step)
        self._changed: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<BufferBudget {self.used} of {self.limit} bytes, {self.deliverable} deliverable>"

    @property
    def has_room(self) -> bool:
        """Whether one more read fits."""
        taken = self.used + self.reserved
        return not taken or taken + self._step <= self.limit

    @property
    def stuck(self) -> bool:
        """Whether waiting can't free any space.

        There is no room, nothing that the application could take to make some, and no read under
        way that may bring a checkpoint.
        """
        return not self.has_room and not self.deliverable and not self.reserved

    def reserve(self) -> int:
        """Set room for one read aside, so that many fetches don't all take the last of it.

        Return how much, for `unreserve`.
        """
        self.reserved += self._step
        return self._step

    def unreserve(self, reserved: int) -> None:
        """Give back the room of a read that is over; its bytes are to be added."""
        self.reserved -= reserved

    def learn(self, brought: int) -> None:
        """Note what one read has brought: the next ones may bring as much."""
        self._step = max(self._step, min(brought, self._largest_step))

    def add(self, size: int, *, deliverable: bool = False) -> None:
        """Count bytes that were received; `deliverable` ones are closed by a checkpoint."""
        self.used += size
        if deliverable:
            self.deliverable += size
        self._wake()

    def free(self, size: int, *, deliverable: bool = False) -> None:
        """Discount bytes that were taken or dropped."""
        self.used -= size
        if deliverable:
            self.deliverable -= size
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and (self.has_room or self.stuck):
            self._changed.set()
            self._changed = None

    def changed(self) -> anyio.Event:
        """An event that is set when space frees up, or when waiting cannot free any."""
        if self._changed is None:
            self._changed = anyio.Event()
        return self._changed
