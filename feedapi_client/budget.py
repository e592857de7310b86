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
        self._step = min(_STEP, limit // 2)
        self._freed: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<Budget {self.used} of {self.limit} bytes, {self.deliverable} deliverable>"

    @property
    def has_room(self) -> bool:
        """One more read fits."""
        return not self.used or self.used + self._step <= self.limit

    @property
    def stuck(self) -> bool:
        """No room, and nothing that the application could take to make some."""
        return not self.has_room and not self.deliverable

    def add(self, size: int) -> None:
        """Bytes were received."""
        self.used += size

    def free(self, size: int) -> None:
        """Bytes were taken or dropped."""
        self.used -= size
        if self._freed is not None and self.has_room:
            self._freed.set()
            self._freed = None

    def changed(self) -> anyio.Event:
        """Set when there is room again."""
        if self._freed is None:
            self._freed = anyio.Event()
        return self._freed
