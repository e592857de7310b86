"""How many partitions come before each one."""

from __future__ import annotations

from collections.abc import Mapping


def count_before(before: Mapping[int, Mapping[int, int]], depths: dict[int, int]) -> None:
    """Add the depth of each partition to `depths`: how many come before it, one after the other.

    Arguments:
        before: for each partition those directly before it, and how many places each takes (0 or
            1). One that is neither here nor in `depths` is at depth 0.
        depths: is changed.
    """
    begun: set[int] = set()
    for partition in before:
        waiting = [partition]  # a chain of partitions may be longer than Python's stack
        while waiting:
            current = waiting[-1]
            first = [p for p in before[current] if p in before and p not in depths]
            first = [p for p in first if p not in begun]
            begun.add(current)
            if current not in depths and first:
                waiting += first
                continue
            waiting.pop()
            if current not in depths:
                places = before[current].items()
                depths[current] = max((depths.get(p, 0) + n for p, n in places), default=0)
