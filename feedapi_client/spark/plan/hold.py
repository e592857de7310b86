"""Waits until an epoch is large enough (``minEventsPerTrigger``). No I/O; imports no Spark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

_COUNTS = 10
"""How often events are counted in ``maxTriggerDelay``, at most."""


class Hold:
    """Holds an epoch back until there are enough events, or enough time is over.

    Arguments:
        least: ``minEventsPerTrigger``; None never holds an epoch back.
        delay: ``maxTriggerDelay``, in seconds since the first event was found.
        clock: seconds on any monotonic clock.
    """

    def __init__(
        self, least: int | None, delay: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least = least
        self._delay = delay
        self._clock = clock
        self._since: float | None = None
        self._next_count = 0.0

    def wait(self) -> float:
        """Return the seconds until `over` has anything to decide."""
        return 0.0 if self._since is None else max(0.0, self._next_count - self._clock())

    def over(self, counts: Iterable[int]) -> bool:
        """Return whether the epoch may be planned.

        Arguments:
            counts: the number of events of one partition after the other. No further ones are
                asked for when there are enough.
        """
        if self._least is None:
            return True
        now = self._clock()
        if self._since is None:
            self._since = now
        end = self._since + self._delay
        if now < end:
            if now < self._next_count:
                return False
            self._next_count = min(end, now + self._delay / _COUNTS)
            if not self._enough(counts, self._least):
                return False
        self._since, self._next_count = None, 0.0
        return True

    @staticmethod
    def _enough(counts: Iterable[int], least: int) -> bool:
        total = 0
        for count in counts:
            total += count
            if total >= least:
                return True
        return False
