"""Finds out that an event loop did not run."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

_INTERVAL = 1.0
"""Seconds between two signs of life, at most."""
_SHORTEST, _LONGEST = 1.0, 5.0
"""Seconds after which an event loop that does not run is reported. Between them, a tenth of
`Limits.stall_timeout`."""


class Heartbeat:
    """Signs of life of the event loop that a session runs in.

    Arguments:
        clock: the clock of the event loop.
        limit: `Limits.stall_timeout`.
    """

    def __init__(self, clock: Callable[[], float], limit: float) -> None:
        self.threshold = min(_LONGEST, max(_SHORTEST, limit / 10))
        """Seconds after which the event loop counts as blocked."""
        self._clock = clock
        self._interval = min(_INTERVAL, limit / 10)
        self._seen = time.monotonic()

    @property
    def late(self) -> float:
        """How much later than planned the next sign of life is, in seconds; negative before."""
        return time.monotonic() - self._seen - self._interval

    def beat(self) -> None:
        """Give a sign of life."""
        self._seen = time.monotonic()

    async def sleep_until(self, moment: float) -> None:
        """Sleep, with signs of life meanwhile. Return early when the event loop was blocked."""
        while True:
            self.beat()
            wake_up = min(moment, self._clock() + self._interval)
            await anyio.sleep_until(wake_up)
            if wake_up >= moment or self.late >= self.threshold:
                return
