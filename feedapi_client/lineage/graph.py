"""The validated graph of a discovery's partitions (R12)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from feedapi_client.errors import LineageError
from feedapi_client.model import FeedInfo, Partition


class Graph:
    """The partitions of one discovery with their edges in both directions. Immutable once built.

    `children` maps a parent to the partitions that start after it, `heirs` an ancestor to the partitions that take over its cursor. Parents and
    ancestors need not be listed themselves.
    """

    def __init__(self, partitions: Mapping[int, Partition], *, feed: str | None = None) -> None:
        """Raises `LineageError`, naming the partition, for a self-parent, both split methods at once, or a cycle."""
        self.partitions = dict(partitions)
        self.children: dict[int, list[int]] = defaultdict(list)
        self.heirs: dict[int, list[int]] = defaultdict(list)
        for partition in self.partitions.values():
            _check_edges(partition, feed)
            if partition.starts_after is not None:
                self.children[partition.starts_after].append(partition.id)
            for ancestor in partition.cursor_from:
                self.heirs[ancestor].append(partition.id)
        self._check_cycles(feed)

    def __contains__(self, partition: int) -> bool:
        return partition in self.partitions

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions.values())

    def __len__(self) -> int:
        return len(self.partitions)

    def __repr__(self) -> str:
        edges = [f"{p.starts_after}→{p.id}" for p in self if p.starts_after is not None]
        edges += [f"{'|'.join(map(str, p.cursor_from))}⇒{p.id}" for p in self if p.cursor_from]
        return f"<Graph of {len(self)} partitions{': ' if edges else ''}{', '.join(edges[:8])}{', …' if len(edges) > 8 else ''}>"

    def depth(self, partition: int) -> int:
        """How many listed parents come before it: 0 for a root."""
        depth = 0
        parent = self._parent(partition)
        while parent is not None:
            depth += 1
            parent = self._parent(parent)
        return depth

    def _parent(self, partition: int) -> int | None:
        parent = self.partitions[partition].starts_after
        return parent if parent in self.partitions else None

    def _check_cycles(self, feed: str | None) -> None:
        before = {
            p.id: p.cursor_from if p.starts_after is None else (p.starts_after,) for p in self
        }
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle = error.args[1]
            raise LineageError(
                f"the lineage runs in a circle: {' → '.join(map(str, circle))}",
                feed=feed,
                partition=circle[0],
            ) from None


def _check_edges(partition: Partition, feed: str | None) -> None:
    if partition.starts_after is not None and partition.cursor_from:
        raise LineageError(
            "both startsAfterPartition and cursorFromPartitions are given: a split uses one method or the other",
            feed=feed,
            partition=partition.id,
        )
    if partition.starts_after == partition.id:
        raise LineageError(
            "startsAfterPartition names the partition itself", feed=feed, partition=partition.id
        )
    if partition.id in partition.cursor_from:
        raise LineageError(
            "cursorFromPartitions names the partition itself", feed=feed, partition=partition.id
        )


def validate(info: FeedInfo, *, feed: str | None = None) -> Graph:
    """The graph of a discovery; raises `LineageError` when there is none."""
    return Graph(info.partitions, feed=feed)


def descendants(
    partitions: Mapping[int, Partition], roots: Collection[int], among: Collection[int]
) -> set[int]:
    """Return which of the partitions `among` descend from `roots`, by either split method.

    A step over a partition that is neither in `roots` nor in `among` does not count.
    """
    found: set[int] = set()
    waiting = [partitions[id] for id in among if id in partitions]
    while True:
        more = {
            p.id
            for p in waiting
            if any(a in roots or a in found for a in (p.starts_after, *p.cursor_from))
        }
        if not more:
            return found
        found |= more
        waiting = [p for p in waiting if p.id not in found]
