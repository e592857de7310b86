"""When to discover again (R10)."""

from __future__ import annotations

from feedapi_client.runtime.loop_clock import Clock, loop_clock
from feedapi_client.runtime.wakeup import Wakeup

_GAP_SECONDS = 0.05
UNKNOWN_COMMAND_GAP_SECONDS = 5.0
"""Minimum time between two discoveries that only unknown commands caused."""
REFUSED_GAP_SECONDS = 0.25
"""Between two discoveries that only refused partitions ask for."""
_NEVER = float("inf")
INTERVAL = "Limits.discovery_interval is over"


class DiscoveryTimer:
    """When the next discovery is due: every `interval` seconds, and soon after it was asked for.

    Arguments:
        interval: seconds.
        clock: by default that of the running event loop. `due` needs that one.
        gap: minimum time between two discoveries, however often one is requested.
    """

    def __init__(
        self, interval: float, *, clock: Clock | None = None, gap: float = _GAP_SECONDS
    ) -> None:
        self.wanted = False
        """Whether a discovery was requested and none that began later has succeeded."""
        self.reason = INTERVAL
        """Why the last discovery began."""
        self._reason_next = INTERVAL
        self._interval = interval
        self._gap = gap
        self._refused_gap = min(REFUSED_GAP_SECONDS, interval)
        self._asked = _NEVER
        """The earliest moment that somebody has asked for since the last discovery began."""
        self._for_refused = False
        self._last = self._last_for_refused = float("-inf")
        self._next = 0.0
        self._not_before = 0.0
        self._sooner = Wakeup()
        self._clock = clock or loop_clock()

    def soon(self, reason: str = "a partition was drained") -> None:
        """Request a discovery soon, because something depends on it."""
        self._reason_next = reason
        self._ask(self._clock())

    def again(self, delay: float, reason: str) -> None:
        """Request a discovery after a delay, for something that may pass by itself."""
        if self._reason_next is INTERVAL:
            self._reason_next = reason
        self._by(self._clock() + delay)

    def refused(self, delay: float) -> None:
        """A partition is refused, and is asked again after `delay` seconds and a new discovery.

        However many partitions are refused, this leads to a few discoveries a second at most.
        """
        self._for_refused = True
        self._reason_next = "a request was refused"
        now = self._clock()
        self._ask(max(now + delay, self._last_for_refused + self._refused_gap))

    def perhaps(self) -> None:
        """Request a discovery that may bring something new, at a limited rate."""
        if self._reason_next is INTERVAL:
            self._reason_next = "a response held an unknown command"
        self._by(max(self._clock(), self._last + UNKNOWN_COMMAND_GAP_SECONDS))

    def later(self, delay: float, reason: str) -> None:
        """Request a discovery after a delay that nothing else waits for."""
        if self._reason_next is INTERVAL:
            self._reason_next = reason
        self._by(self._clock() + delay)

    def begun(self) -> None:
        """Record that a discovery begins. A later request is for another one."""
        if self._for_refused:
            self._last_for_refused = self._clock()
        self._for_refused = False
        self.reason, self._reason_next = self._reason_next, INTERVAL
        self._asked = self._next = _NEVER

    def succeeded(self) -> None:
        """Record that a discovery succeeded."""
        self.wanted = self._asked < _NEVER
        self._last = self._clock()
        self._not_before = self._last + self._gap
        self._next = max(min(self._asked, self._last + self._interval), self._not_before)

    @property
    def next(self) -> float:
        """When the next discovery is due, on the clock of the event loop."""
        return self._next

    def failed(self, pause: float) -> None:
        """Record that a discovery failed, to be tried again after a pause."""
        self._reason_next = "the last one failed"
        self._last = self._clock()
        self._next = self._not_before = self._last + max(self._gap, pause)

    async def due(self) -> None:
        """Wait until the next discovery is due."""
        while (pause := self._next - self._clock()) > 0:
            await self._sooner.wait(pause)

    def _ask(self, when: float) -> None:
        self.wanted = True
        self._asked = min(self._asked, when)
        self._by(when)

    def _by(self, when: float) -> None:
        when = max(when, self._not_before)
        if when < self._next:
            self._next = when
            self._sooner.set()
