"""When to discover again (R10)."""

from __future__ import annotations

import anyio

_GAP_SECONDS = 0.05
"""Minimum time between two discoveries, however often one is requested."""
UNKNOWN_COMMAND_GAP_SECONDS = 5.0
"""Minimum time between two discoveries that only unknown commands caused."""


class DiscoveryTimer:
    """When the next discovery is due: every `interval` seconds, and soon after it was asked for."""

    def __init__(self, interval: float) -> None:
        self.wanted = False
        """Whether a discovery was requested and none that began later has succeeded."""
        self._interval = interval
        self._again = False
        self._last = 0.0
        self._next = 0.0
        self._sooner = anyio.Event()

    def soon(self) -> None:
        """Request a discovery soon, because something depends on it."""
        self.wanted = self._again = True
        self._by(max(anyio.current_time(), self._last + _GAP_SECONDS))

    def perhaps(self) -> None:
        """Request a discovery that may bring something new, at a limited rate."""
        self._by(max(anyio.current_time(), self._last + UNKNOWN_COMMAND_GAP_SECONDS))

    def begun(self) -> None:
        """Record that a discovery begins. A later request is for another one."""
        self._again, self._next = False, float("inf")

    def succeeded(self) -> None:
        """Record that a discovery succeeded."""
        self.wanted, self._again = self._again, False
        self._last = anyio.current_time()
        self._next = self._last + (_GAP_SECONDS if self.wanted else self._interval)

    def failed(self, pause: float) -> None:
        """Record that a discovery failed, to be tried again after a pause."""
        self._last = anyio.current_time()
        self._next = self._last + max(_GAP_SECONDS, pause)

    async def due(self) -> None:
        """Wait until the next discovery is due."""
        while (pause := self._next - anyio.current_time()) > 0:
            self._sooner = anyio.Event()
            with anyio.move_on_after(pause):
                await self._sooner.wait()

    def _by(self, when: float) -> None:
        if when < self._next:
            self._next = when
            self._sooner.set()
