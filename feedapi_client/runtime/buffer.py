"""How many received bytes may wait for the application, over all partitions (R16)."""

from __future__ import annotations

import anyio

_STEP = 64 * 1024
"""Maximum bytes of one read from a socket."""


class BufferBudget:
    """Counts buffered bytes.

    Fetches wait for room before they read on. Code that takes bytes out of a buffer frees them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.deliverable = 0
        """Number of the used bytes that the application can take."""
        self.reserved = 0
        """Room set aside for reads under way."""
        self._step = min(_STEP, limit // 2)
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

    def reserve(self) -> None:
        """Set aside room for one read, so that concurrent fetches don't all use the same room."""
        self.reserved += self._step

    def unreserve(self) -> None:
        """Give back the room of a read that is over; its bytes are to be added."""
        self.reserved -= self._step

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
