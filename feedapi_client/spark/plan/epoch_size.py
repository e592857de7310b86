"""When an epoch is large enough, which partitions it reads, and how much of them.

`Hold` carries out the option ``minEventsPerTrigger``, `Turns` the options ``maxEventsPerTrigger``
and ``maxBytesPerTrigger``. No I/O; imports no Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

FeedPartition = tuple[int, int]
"""Number of a feed among those of the query, and a partition of it."""

_LEAST_SHARE = 100
"""Events of a partition in an epoch of ``maxEventsPerTrigger``: only whole batches are read."""
_LEAST_BYTES = 64 * 1024
"""The same for ``maxBytesPerTrigger``: a batch is what one chunk of a response brings."""
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


class Turn(NamedTuple):
    """The partitions of an epoch, those that wait, and how much of each one is read."""

    partitions: Collection[FeedPartition]
    waiting: Collection[FeedPartition]
    limit: int | None
    max_bytes: int | None = None


class Turns:
    """Divides the events of an epoch between partitions; those read the longest ago come first.

    Arguments:
        most: maximum number of events of an epoch; None for any number.
        most_bytes: the same for the bytes of its events.
    """

    def __init__(self, most: int | None, most_bytes: int | None = None) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._epochs = 0
        self._read_in: dict[FeedPartition, int] = {}
        """Number of the last epoch of each partition."""

    def next(self, partitions: Collection[FeedPartition], limit: int | None) -> Turn:
        """Return who is next among the partitions that have events.

        Arguments:
            limit: maximum number of events of each partition.
        """
        most, most_bytes = self._most, self._most_bytes
        if (most is None and most_bytes is None) or not partitions:
            return Turn(partitions, (), limit)
        self._epochs += 1
        in_turn = sorted(partitions, key=lambda p: (self._read_in.get(p, 0), p))
        count = len(in_turn)
        if most is not None:
            count = min(count, max(1, most // _LEAST_SHARE))
        if most_bytes is not None:
            count = min(count, max(1, most_bytes // _LEAST_BYTES))
        self._read_in |= dict.fromkeys(in_turn[:count], self._epochs)
        share = None if most is None else max(1, most // count)
        bounds = [bound for bound in (share, limit) if bound is not None]
        least = min(bounds) if bounds else None
        of_bytes = None if most_bytes is None else max(1, most_bytes // count)
        return Turn(in_turn[:count], in_turn[count:], least, of_bytes)
