"""Order between partitions: what a partition waits for before it may start (R4, R8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from feedapi_client.errors import LostPartitionError
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, Partition, Position


def check_parent(
    partition: Partition,
    entries: Mapping[int, Entry],
    graph: Graph,
    others: Mapping[int, Position],
    *,
    feed: str,
) -> None:
    """Raise `LostPartitionError` when the parent is gone and was never read to its end.

    A parent that is neither listed nor stored is history at the first start, when the partition
    itself has a position. Later it is lost. `others` are the stored positions of partitions that
    are not selected.
    """
    parent = partition.starts_after
    if parent is None or parent in graph:
        return
    known = entries.get(parent)
    if parent in others:
        begun = entries[partition.id].position is not None
        lost = others[parent].status != "drained" and not begun
    elif known is None:
        lost = entries[partition.id].position is None
    else:
        lost = known.state is not State.DRAINED
    if lost:
        raise LostPartitionError(
            f"starts after partition {parent}, which is no longer listed and was never read to its "
            "end. Set the cursor of both by hand",
            feed=feed,
            partition=partition.id,
        )


def blockers(
    partition: Partition,
    entries: Mapping[int, Entry],
    graph: Graph,
    parents: Mapping[int, int],
) -> tuple[int, ...]:
    """Return the listed partitions that have to be drained before this one may start.

    `parents` holds the parent of each partition that was ever listed, also of those that are gone:
    a successor waits for what its ancestor waited for.

    A drained parent may itself have a parent that is not: a database that failed over lacks the
    end of that one, or an operator has moved it. That one comes first.
    """
    at_first = entries[partition.id].cursor == FIRST
    directly = preceding(partition, graph, parents, at_first=at_first)
    nearest = (_undrained(p, entries, graph) for p in directly)
    return tuple(dict.fromkeys(p for p in nearest if p is not None))


def preceding(
    partition: Partition, graph: Graph, parents: Mapping[int, int], *, at_first: bool = True
) -> list[int]:
    """Return the partitions that have to be read before this one, drained or not.

    Arguments:
        partition: a listed partition.
        parents: see `blockers`.
        at_first: whether it is read from its first event. A successor that goes on from the cursor
            of an ancestor has nothing before it but that.
    """
    if partition.starts_after is not None:
        return [partition.starts_after]
    if not partition.cursor_from or not at_first:
        return []
    # A successor that starts at the beginning. Its ancestor may itself have started after a
    # partition that is not drained yet. The parent of an ancestor is known if the ancestor was
    # listed in this session. Otherwise every closed partition may have been that parent.
    inherited: Iterable[int] = [parents[a] for a in partition.cursor_from if a in parents]
    if not inherited:
        inherited = [p.id for p in graph if p.closed and _may_precede(p, partition, graph)]
    return [p for p in inherited if p != partition.id]


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


def _may_precede(partition: Partition, successor: Partition, graph: Graph) -> bool:
    """Return False for a partition that descends from this successor or from a later one.

    The smaller id marks the earlier successor, so that no two ever wait for each other.
    """
    while not partition.cursor_from and partition.starts_after in graph.partitions:
        partition = graph.partitions[partition.starts_after]
    return not partition.cursor_from or partition.id < successor.id


def _undrained(partition: int, entries: Mapping[int, Entry], graph: Graph) -> int | None:
    """Return a listed partition or the nearest of its parents that is not drained, or None."""
    above: int | None = partition
    while above in graph.partitions:
        if above not in entries or entries[above].state is not State.DRAINED:
            return above
        above = graph.partitions[above].starts_after
    return None
