"""Which partitions an epoch reads, and how much of them. No I/O; imports no Spark.

`Turns` carries out the options ``maxEventsPerTrigger`` and ``maxBytesPerTrigger``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

_LEAST_SHARE = 100
"""Events of a partition in an epoch of ``maxEventsPerTrigger``: only whole batches are read."""
_LEAST_BYTES = 64 * 1024
"""The same for ``maxBytesPerTrigger``: a batch is what one chunk of a response brings."""


class Turn(NamedTuple):
    """The partitions of an epoch, those that wait, and how much of each one is read."""

    partitions: Collection[int]
    waiting: Collection[int]
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
        self._read_in: dict[int, int] = {}
        """Number of the last epoch of each partition."""

    def next(self, partitions: Collection[int], limit: int | None) -> Turn:
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
