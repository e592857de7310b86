"""`Turns`: which partitions an epoch of ``maxEventsPerTrigger`` reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

FeedPartition = tuple[int, int]
"""Number of a feed among those of the query, and a partition of it."""

_LEAST_SHARE = 100
"""Events of a partition in an epoch of ``maxEventsPerTrigger``: only whole batches are read."""


class Turn(NamedTuple):
    """The partitions of an epoch, those that wait for the next one, and the events of each."""

    partitions: Collection[FeedPartition]
    waiting: Collection[FeedPartition]
    limit: int | None


class Turns:
    """Divides the events of an epoch between partitions; those read the longest ago come first.

    Arguments:
        most: maximum number of events of an epoch; None for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._epochs = 0
        self._read_in: dict[FeedPartition, int] = {}
        """Number of the last epoch of each partition."""

    def next(self, partitions: Collection[FeedPartition], limit: int | None) -> Turn:
        """Return who is next among the partitions that have events.

        Arguments:
            limit: maximum number of events of each partition.
        """
        if self._most is None or not partitions:
            return Turn(partitions, (), limit)
        self._epochs += 1
        in_turn = sorted(partitions, key=lambda p: (self._read_in.get(p, 0), p))
        count = min(len(in_turn), max(1, self._most // _LEAST_SHARE))
        self._read_in |= dict.fromkeys(in_turn[:count], self._epochs)
        share = max(1, self._most // count)
        least = share if limit is None else min(limit, share)
        return Turn(in_turn[:count], in_turn[count:], least)
