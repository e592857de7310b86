"""How many received bytes may wait for the application, over all partitions (R16)."""

from __future__ import annotations

import anyio

_STEP = 64 * 1024
"""What one read from a socket brings at most."""


class Budget:
    """Counts buffered bytes. Readers wait for room before they read on; whoever takes bytes out of the buffers gives them back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.deliverable = 0
        self.reserved = 0
        self._step = min(_STEP, limit // 2)
        self._freed: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<Budget {self.used} of {self.limit} bytes, {self.deliverable} deliverable>"

    @property
    def has_room(self) -> bool:
        """One more read fits."""
        taken = self.used + self.reserved
        return not taken or taken + self._step <= self.limit

    @property
    def stuck(self) -> bool:
        """No room, and neither anything that the application could take to make some, nor a read under way that may bring a checkpoint."""
        return not self.has_room and not self.deliverable and not self.reserved

    def reserve(self) -> None:
        """Set the room for one read aside, so that many readers don't all take the last of it."""
        self.reserved += self._step

    def release(self) -> None:
        """The read is over; its bytes are to be added."""
        self.reserved -= self._step

    def add(self, size: int) -> None:
        """Bytes were received."""
        self.used += size
        self._wake()

    def free(self, size: int) -> None:
        """Bytes were taken or dropped."""
        self.used -= size
        self._wake()

    def _wake(self) -> None:
        if self._freed is not None and (self.has_room or self.stuck):
            self._freed.set()
            self._freed = None

    def changed(self) -> anyio.Event:
        """Set when there is room again, or can't be any by waiting."""
        if self._freed is None:
            self._freed = anyio.Event()
        return self._freed
