"""When to discover again (R10)."""

from __future__ import annotations

import anyio

_GAP_SECONDS = 0.05
"""Minimum time between two discoveries, however often one is requested."""
UNKNOWN_COMMAND_GAP_SECONDS = 5.0
"""Minimum time between two discoveries that only unknown commands caused."""
REFUSED_GAP_SECONDS = 0.25
"""Between two discoveries that only refused partitions ask for."""
_NEVER = float("inf")


class DiscoveryTimer:
    """When the next discovery is due: every `interval` seconds, and soon after it was asked for."""

    def __init__(self, interval: float) -> None:
        self.wanted = False
        """Whether a discovery was requested and none that began later has succeeded."""
        self._interval = interval
        self._refused_gap = min(REFUSED_GAP_SECONDS, interval)
        self._asked = _NEVER
        """The earliest moment that somebody has asked for since the last discovery began."""
        self._for_refused = False
        self._last = self._last_for_refused = float("-inf")
        self._next = 0.0
        self._not_before = 0.0
        self._sooner = anyio.Event()

    def soon(self) -> None:
        """Request a discovery soon, because something depends on it."""
        self._ask(anyio.current_time())

    def refused(self, delay: float) -> None:
        """A partition is refused, and is asked again after `delay` seconds and a new discovery.

        However many partitions are refused, this leads to a few discoveries a second at most.
        """
        self._for_refused = True
        now = anyio.current_time()
        self._ask(max(now + delay, self._last_for_refused + self._refused_gap))

    def perhaps(self) -> None:
        """Request a discovery that may bring something new, at a limited rate."""
        self._by(max(anyio.current_time(), self._last + UNKNOWN_COMMAND_GAP_SECONDS))

    def begun(self) -> None:
        """Record that a discovery begins. A later request is for another one."""
        if self._for_refused:
            self._last_for_refused = anyio.current_time()
        self._for_refused = False
        self._asked = self._next = _NEVER

    def succeeded(self) -> None:
        """Record that a discovery succeeded."""
        self.wanted = self._asked < _NEVER
        self._last = anyio.current_time()
        self._not_before = self._last + _GAP_SECONDS
        self._next = max(min(self._asked, self._last + self._interval), self._not_before)

    def failed(self, pause: float) -> None:
        """Record that a discovery failed, to be tried again after a pause."""
        self._last = anyio.current_time()
        self._next = self._not_before = self._last + max(_GAP_SECONDS, pause)

    async def due(self) -> None:
        """Wait until the next discovery is due."""
        while (pause := self._next - anyio.current_time()) > 0:
            self._sooner = anyio.Event()
            with anyio.move_on_after(pause):
                await self._sooner.wait()

    def _ask(self, when: float) -> None:
        self.wanted = True
        self._asked = min(self._asked, when)
        self._by(when)

    def _by(self, when: float) -> None:
        when = max(when, self._not_before)
        if when < self._next:
            self._next = when
            self._sooner.set()
