"""The validated graph of a discovery's partitions (R12)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from feedapi_client.errors import LineageError
from feedapi_client.lineage.partition_names import cycle_text
from feedapi_client.model import FeedInfo, Partition

_EDGES_SHOWN = 8


class Graph:
    """The partitions of one discovery, with their edges in both directions. Not to be changed.

    Parents and ancestors need not be listed themselves.

    Attributes:
        partitions: the listed partitions by id.
        children: a parent's id to the ids of the partitions that start after it.
        successors: an ancestor's id to the ids of the partitions that may take its cursor.
    """

    def __init__(self, partitions: Mapping[int, Partition], *, feed: str | None = None) -> None:
        """Validate the partitions and index their edges.

        Raises:
            LineageError: a partition names itself, uses both split methods, or is in a cycle. The
                error names the partition.
        """
        self.partitions = dict(partitions)
        self.children: dict[int, list[int]] = defaultdict(list)
        self.successors: dict[int, list[int]] = defaultdict(list)
        # Nearly all partitions of a large feed have no edge.
        linked = [p for p in self if p.starts_after is not None or p.cursor_from]
        for partition in linked:
            _check_edges(partition, feed)
            if partition.starts_after is not None:
                self.children[partition.starts_after].append(partition.id)
            for ancestor in partition.cursor_from:
                self.successors[ancestor].append(partition.id)
        _check_cycles(linked, feed)

    def __contains__(self, partition: int) -> bool:
        return partition in self.partitions

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions.values())

    def __len__(self) -> int:
        return len(self.partitions)

    def ancestors(self, partition: int) -> list[int]:
        """Return those whose cursor may have become that of a partition, the nearest first."""
        found: dict[int, None] = {}
        to_visit = [partition]
        while to_visit:
            listed = self.partitions.get(to_visit.pop(0))
            new = [] if listed is None else [a for a in listed.cursor_from if a not in found]
            found.update(dict.fromkeys(new))
            to_visit += new
        return list(found)

    def __repr__(self) -> str:
        edges = [f"{p.starts_after}→{p.id}" for p in self if p.starts_after is not None]
        edges += [f"{'|'.join(map(str, p.cursor_from))}⇒{p.id}" for p in self if p.cursor_from]
        shown = edges[:_EDGES_SHOWN] + (["…"] if len(edges) > _EDGES_SHOWN else [])
        return f"<Graph of {len(self)} partitions{': ' if edges else ''}{', '.join(shown)}>"


def _check_cycles(linked: Iterable[Partition], feed: str | None) -> None:
    before = {p.id: p.cursor_from if p.starts_after is None else (p.starts_after,) for p in linked}
    if not any(above in before for edges in before.values() for above in edges):
        return  # no edge leads to another one
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = error.args[1]
        raise LineageError(
            f"the lineage has a cycle: {cycle_text(cycle)}",
            feed=feed,
            partition=cycle[0],
        ) from None


def _check_edges(partition: Partition, feed: str | None) -> None:
    problem = None
    if partition.starts_after is not None and partition.cursor_from:
        problem = (
            "both startsAfterPartition and cursorFromPartitions are given: a split uses one method "
            "or the other"
        )
    elif partition.starts_after == partition.id:
        problem = "startsAfterPartition names the partition itself"
    elif partition.id in partition.cursor_from:
        problem = "cursorFromPartitions names the partition itself"
    if problem is not None:
        raise LineageError(problem, feed=feed, partition=partition.id)


def validate(info: FeedInfo, *, feed: str | None = None) -> Graph:
    """Return the graph of a discovery. Raises `LineageError` when its partitions make none."""
    return Graph(info.partitions, feed=feed)


def descendants(
    partitions: Mapping[int, Partition], roots: Collection[int], among: Collection[int]
) -> set[int]:
    """Return which of the partitions `among` descend from `roots`, by either split method.

    A way that leads over a partition outside of `roots` and `among` does not count.
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
