"""When the driver discovers a feed again (R10). Imports no Spark."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

UNKNOWN_COMMAND_GAP = 5.0
"""Minimum seconds between two discoveries of which only unknown commands cause the second one."""


class DiscoveryTimer:
    """When the next discovery is due: every `interval` seconds, and when something asks for it.

    Not thread-safe.

    Arguments:
        interval: seconds from the beginning of one discovery to that of the next one.
        clock: seconds on any monotonic clock.
    """

    def __init__(self, interval: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._next = self._began = -math.inf

    def begun(self) -> None:
        """Record that a discovery begins."""
        self._began = self._clock()
        self._next = self._began + self._interval

    def soon(self) -> None:
        """Request a discovery, because the partitions have changed."""
        self._next = -math.inf

    def perhaps(self) -> None:
        """Request a discovery that may bring something new, at a limited rate."""
        self._next = min(self._next, self._began + UNKNOWN_COMMAND_GAP)

    def wait(self) -> float:
        """Return the seconds until the next discovery is due; 0 when it is."""
        return max(0.0, self._next - self._clock())
