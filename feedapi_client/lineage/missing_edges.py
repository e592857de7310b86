"""Edges that a publisher leaves out: given by the consumer, presumed, or suspected (R8).

The widely used Go publisher leaves `startsAfterPartition` out when the parent is partition 0, its
zero value. The children then look like roots, and nothing keeps them behind their parent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import validate
from feedapi_client.lineage.partition_names import names
from feedapi_client.model import MAX_PARTITION, FeedInfo, Partition

_SHOWN = 8

Lineage = dict[int, int | None]
"""The parent of each child; None for a child that comes after nobody."""


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


def childless(partitions: Mapping[int, Partition]) -> set[int]:
    """Return the closed partitions that no other descends from, by any split method."""
    with_descendants = {p.starts_after for p in partitions.values()}
    with_descendants.update(a for p in partitions.values() for a in p.cursor_from)
    return {p.id for p in partitions.values() if p.closed and p.id not in with_descendants}


def suspected_missing_edges(
    previous: Collection[int] | None,
    current: Mapping[int, Partition],
    *,
    retired: Collection[int] = (),
) -> SuspectedEdges | None:
    """Return the `startsAfterPartition` edges that a discovery seems to lack; None without any.

    It is suspected where a closed partition has neither a child nor a successor while there are
    roots that are new. Both may be in order: a partition may be retired, and another may be added.

    Arguments:
        previous: the partitions that were known before, as ids or as the `partitions` of an earlier
            discovery. None for a single discovery: then a root counts as new when its id is larger
            than that of the closed partition.
        current: the `partitions` of the discovery.
        retired: closed partitions that the new roots have nothing to do with.
    """
    ends = childless(current).difference(retired)
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


def checked_lineage(lineage: Mapping[int, int | None] | None) -> Lineage:
    """Return a copy of ``{child: parent}``; None as the parent of a child that comes after nobody.

    Raises ValueError for anything but partitions' ids.
    """
    edges = dict(lineage or {})
    parents = [parent for parent in edges.values() if parent is not None]
    for partition in (*edges.keys(), *parents):
        if (
            isinstance(partition, bool)
            or not isinstance(partition, int)
            or not 0 <= partition <= MAX_PARTITION
        ):
            raise ValueError(
                "lineage must map the ids of children to those of their parents, integers from 0 "
                f"to {MAX_PARTITION}, or to None for a child without a parent; it holds "
                f"{partition!r}"
            )
    return edges


def parse_lineage(text: str) -> Lineage:
    """Return the edges of ``"1:0,2:0,3:none"`` (child:parent), as `FeedConsumer` takes them.

    Raises ValueError for another form, an id out of range, and a child with two parents.
    """
    edges: Lineage = {}
    for part in text.split(","):
        child, colon, parent = (word.strip() for word in part.partition(":"))
        none = parent.lower() == "none"
        ids = (child,) if none else (child, parent)
        if not colon or not all(id.isascii() and id.isdigit() and len(id) <= 5 for id in ids):
            raise ValueError(
                "must be pairs of child and parent such as 1:0,2:0, with ids from 0 to "
                f"{MAX_PARTITION}, or none as the parent"
            )
        value = None if none else int(parent)
        if edges.setdefault(int(child), value) != value:
            raise ValueError(f"gives partition {int(child)} two parents")
    return checked_lineage(edges)


def with_edges(
    info: FeedInfo,
    lineage: Mapping[int, int | None],
    *,
    known: Collection[int] | None = None,
    feed: str,
) -> FeedInfo:
    """Return the discovery with the edges of `lineage` added.

    An edge whose child is not listed sleeps. One to a parent that was never seen is left out, see
    `never_seen`. One that is listed anyway changes nothing.

    Arguments:
        info: the discovery.
        lineage: from child to parent.
        known: partitions that were seen at an earlier time; None if that is not known.
        feed: for messages.

    Raises:
        LineageError: the publisher gives the child other ancestors, or the edges make a cycle.
    """
    if not lineage:
        return info
    unseen = never_seen(info, lineage, known=known)
    given = {
        child: _with_parent(info.partitions.get(child, Partition(child)), parent, feed)
        for child, parent in lineage.items()
    }
    _check(replace(info, partitions={**info.partitions, **given}), feed)
    count = {c: p for c, p in given.items() if c in info.partitions and lineage[c] not in unseen}
    return replace(info, partitions={**info.partitions, **count})


def never_seen(
    info: FeedInfo, lineage: Mapping[int, int | None], *, known: Collection[int] | None
) -> dict[int, int]:
    """Return the parents that `lineage` gives listed children, and that were never seen.

    Each with one of its children. `known` is as in `with_edges`: without it all count as seen.
    """
    if known is None:
        return {}
    return {
        parent: child
        for child, parent in lineage.items()
        if parent is not None
        and child in info.partitions
        and parent not in info.partitions
        and parent not in known
    }


def presumed_children(info: FeedInfo, lineage: Mapping[int, int | None]) -> set[int]:
    """Return the partitions that may start after partition 0 without saying so (R8).

    The published Go library leaves the edge out in dialect v2-token. Where partition 0 is closed
    and no listed partition names it, any root may be its child.

    Arguments:
        info: the discovery, as listed.
        lineage: what the consumer has said about edges.
    """
    if info.dialect != "v2-token" or 0 not in childless(info.partitions):
        return set()
    roots = {p.id for p in info.partitions.values() if p.starts_after is None and not p.cursor_from}
    return roots.difference(lineage, _above(0, info.partitions))


def _above(partition: int, partitions: Mapping[int, Partition]) -> set[int]:
    """Return the partition and everything that it descends from."""
    above: set[int] = set()
    waiting = [partition]
    while waiting:
        listed = partitions.get(waiting.pop())
        if listed is not None and listed.id not in above:
            above.add(listed.id)
            waiting += listed.cursor_from
            waiting += () if listed.starts_after is None else (listed.starts_after,)
    return above


def _with_parent(partition: Partition, parent: int | None, feed: str) -> Partition:
    listed = None
    if partition.cursor_from:
        ancestors = ", ".join(map(str, partition.cursor_from[:_SHOWN]))
        listed = f"cursorFromPartitions {ancestors}: a split uses one method or the other"
    elif partition.starts_after not in (None, parent):
        listed = f"startsAfterPartition {partition.starts_after}"
    if listed is not None:
        says = "after nobody" if parent is None else f"after partition {parent}"
        raise LineageError(
            f"lineage= says that it starts {says}, and the feed lists it with {listed}. Remove it "
            "from lineage=",
            feed=feed,
            partition=partition.id,
        )
    return partition if parent is None else replace(partition, starts_after=parent)


def _check(info: FeedInfo, feed: str) -> None:
    try:
        validate(info, feed=feed)
    except LineageError as error:
        raise LineageError(
            f"with the edges of lineage= {error.message}", feed=feed, partition=error.partition
        ) from error
