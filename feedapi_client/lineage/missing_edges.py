"""Edges that a publisher leaves out: added by the consumer, and suspected where they show (R8).

The widely used Go publisher leaves `startsAfterPartition` out when the parent is partition 0, its
zero value. The children then look like roots, and nothing keeps them behind their parent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import validate
from feedapi_client.lineage.text import names
from feedapi_client.model import FeedInfo, Partition

MAX_PARTITION = 32767
_SHOWN = 8


class SuspectedEdges(NamedTuple):
    """Edges that seem to be missing.

    Attributes:
        parents: closed partitions that no other descends from, by any split method.
        children: roots that may start after one of them.
    """

    parents: tuple[int, ...]
    children: tuple[int, ...]

    def __str__(self) -> str:
        """Say what was seen and what to do, for a report."""
        one = len(self.parents) == 1
        example = ", ".join(f"{child}: {self.parents[0]}" for child in self.children[:_SHOWN])
        more = ", ..." if len(self.children) > _SHOWN else ""
        return (
            f"{names(self.parents)} {'is' if one else 'are'} closed and no partition starts after "
            f"{'it' if one else 'them'}, while {names(self.children)} "
            f"{'has' if len(self.children) == 1 else 'have'} no parent: the publisher may have "
            "left out startsAfterPartition, and events may be read out of order. If so, give "
            f"lineage={{{example}{more}}} (child: parent)"
        )


def suspected_missing_edges(
    previous: Collection[int] | None, current: Mapping[int, Partition]
) -> SuspectedEdges | None:
    """Return the `startsAfterPartition` edges that a discovery seems to lack; None without any.

    It is suspected where a closed partition has neither a child nor a successor while there are
    roots that are new. Both may be in order: a partition may be retired, and another may be added.

    Arguments:
        previous: the partitions that were known before, as ids or as the `partitions` of an earlier
            discovery. None for a single discovery: then a root counts as new when its id is larger
            than that of the closed partition.
        current: the `partitions` of the discovery.
    """
    with_descendants = {p.starts_after for p in current.values()}
    with_descendants.update(a for p in current.values() for a in p.cursor_from)
    ends = {p.id for p in current.values() if p.closed and p.id not in with_descendants}
    roots = [p.id for p in current.values() if p.starts_after is None and not p.cursor_from]
    if not ends:
        return None
    if previous is None:
        children = [root for root in roots if root > min(ends)]
    else:
        children = [root for root in roots if root not in previous]
        ends &= set(previous)
    parents = [end for end in ends if any(child != end for child in children)]
    if previous is None and children:
        parents = [end for end in parents if end < max(children)]
    if not parents or not children:
        return None
    return SuspectedEdges(tuple(sorted(parents)), tuple(sorted(children)))


def checked_lineage(lineage: Mapping[int, int] | None) -> dict[int, int]:
    """Return a copy of ``{child: parent}``. Raises ValueError for anything but partitions' ids."""
    edges = dict(lineage or {})
    for partition in (*edges.keys(), *edges.values()):
        if (
            isinstance(partition, bool)
            or not isinstance(partition, int)
            or not 0 <= partition <= MAX_PARTITION
        ):
            raise ValueError(
                "lineage must map the ids of children to those of their parents, integers from 0 "
                f"to {MAX_PARTITION}; it holds {partition!r}"
            )
    return edges


def parse_lineage(text: str) -> dict[int, int]:
    """Return the edges of ``"1:0,2:0"`` (child:parent), as `FeedConsumer` takes them.

    Raises ValueError for another form, an id out of range, and a child with two parents.
    """
    edges: dict[int, int] = {}
    for part in text.split(","):
        child, colon, parent = (word.strip() for word in part.partition(":"))
        ids = (child, parent)
        if not colon or not all(id.isascii() and id.isdigit() and len(id) <= 5 for id in ids):
            raise ValueError(
                "must be pairs of child and parent such as 1:0,2:0, with ids from 0 to "
                f"{MAX_PARTITION}"
            )
        if edges.setdefault(int(child), int(parent)) != int(parent):
            raise ValueError(f"gives partition {int(child)} two parents")
    return checked_lineage(edges)


def with_edges(
    info: FeedInfo, lineage: Mapping[int, int], *, known: Collection[int] | None = None, feed: str
) -> FeedInfo:
    """Return the discovery with the edges of `lineage` added.

    A child that is no longer listed is left out, and an edge that is listed changes nothing.

    Arguments:
        info: the discovery.
        lineage: from child to parent.
        known: partitions that need not be listed, because they were at an earlier time; None to
            accept any.
        feed: for messages.

    Raises:
        LineageError: a partition is neither listed nor known, the publisher gives the child other
            ancestors, or the edges make a cycle.
    """
    if not lineage:
        return info
    partitions = dict(info.partitions)
    for child, parent in lineage.items():
        for partition in (child, parent):
            if known is not None and partition not in partitions and partition not in known:
                raise LineageError(
                    "lineage= names this partition, which the feed does not list and which has no "
                    "stored position. Correct lineage=, or remove the edge",
                    feed=feed,
                    partition=partition,
                )
        if child in partitions:
            partitions[child] = _with_parent(partitions[child], parent, feed)
    changed = replace(info, partitions=partitions)
    _check(changed, feed)
    return changed


def _with_parent(partition: Partition, parent: int, feed: str) -> Partition:
    listed = None
    if partition.cursor_from:
        ancestors = ", ".join(map(str, partition.cursor_from[:_SHOWN]))
        listed = f"cursorFromPartitions {ancestors}: a split uses one method or the other"
    elif partition.starts_after not in (None, parent):
        listed = f"startsAfterPartition {partition.starts_after}"
    if listed is not None:
        raise LineageError(
            f"lineage= says that it starts after partition {parent}, and the feed lists it with "
            f"{listed}. Remove it from lineage=",
            feed=feed,
            partition=partition.id,
        )
    return replace(partition, starts_after=parent)


def _check(info: FeedInfo, feed: str) -> None:
    try:
        validate(info, feed=feed)
    except LineageError as error:
        raise LineageError(
            f"with the edges of lineage= {error.message}", feed=feed, partition=error.partition
        ) from error
