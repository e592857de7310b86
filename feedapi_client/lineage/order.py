"""Order between partitions: what a partition waits for before it may start (R4, R8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from feedapi_client.errors import LostPartitionError
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, Partition


def check_parent(
    partition: Partition, entries: Mapping[int, Entry], graph: Graph, *, feed: str
) -> None:
    """Raise `LostPartitionError` when the parent is gone and was never read to its end.

    A parent that is neither listed nor stored is history at the first start, when the partition
    itself has a position. Later it is lost.
    """
    parent = partition.starts_after
    if parent is None or parent in graph:
        return
    known = entries.get(parent)
    if known is None:
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
    """
    parent = partition.starts_after
    if parent is not None:
        return _undrained((parent,), entries, graph)
    if not partition.cursor_from or entries[partition.id].cursor != FIRST:
        return ()
    # A successor that starts at the beginning. Its ancestor may itself have started after a
    # partition that is not drained yet. The parent of an ancestor is known if the ancestor was
    # listed in this session. Otherwise every closed partition may have been that parent.
    inherited: Iterable[int] = [parents[a] for a in partition.cursor_from if a in parents]
    if not inherited:
        inherited = [p.id for p in graph if p.closed and _may_precede(p, partition, graph)]
    return tuple(p for p in _undrained(inherited, entries, graph) if p != partition.id)


def _may_precede(partition: Partition, successor: Partition, graph: Graph) -> bool:
    """Return False for a partition that descends from this successor or from a later one.

    The smaller id marks the earlier successor, so that no two ever wait for each other.
    """
    while not partition.cursor_from and partition.starts_after in graph.partitions:
        partition = graph.partitions[partition.starts_after]
    return not partition.cursor_from or partition.id < successor.id


def _undrained(
    partitions: Iterable[int], entries: Mapping[int, Entry], graph: Graph
) -> tuple[int, ...]:
    return tuple(
        p
        for p in partitions
        if p in graph and (p not in entries or entries[p].state is not State.DRAINED)
    )
