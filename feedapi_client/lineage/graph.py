"""The partitions of a discovery and their edges: listed, given, presumed and suspected (R8, R12).

The widely used Go publisher leaves `startsAfterPartition` out when the parent is partition 0, its
zero value. The children then look like roots, and nothing keeps them behind their parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from feedapi_client.errors import LineageError
from feedapi_client.lineage.states import Report
from feedapi_client.model import FeedInfo, Partition
from feedapi_client.protocol.text import cycle_text, names

_SHOWN = 8


class Graph:
    """The partitions of one discovery, with the ids of those that start after one, and that may
    take its cursor, also of one that is not listed. Raises `LineageError`: a partition names
    itself, uses both split methods, or is in a cycle.
    """

    def __init__(self, partitions: Mapping[int, Partition], *, feed: str | None = None) -> None:
        self.partitions = dict(partitions)
        self.children: dict[int, list[int]] = defaultdict(list)
        self.successors: dict[int, list[int]] = defaultdict(list)
        linked = [p for p in self if comes_after(p)]  # of a large feed nearly none
        for partition in linked:
            _check_edges(partition, feed)
            if partition.starts_after is not None:
                self.children[partition.starts_after].append(partition.id)
            for ancestor in partition.cursor_from:
                self.successors[ancestor].append(partition.id)
        _check_cycles(linked, feed)

    def __contains__(self, partition: object) -> bool:
        return partition in self.partitions

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions.values())

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


def comes_after(partition: Partition) -> tuple[int, ...]:
    return partition.cursor_from if partition.starts_after is None else (partition.starts_after,)


def _check_edges(partition: Partition, feed: str | None) -> None:
    if partition.starts_after is not None and partition.cursor_from:
        text = "both startsAfterPartition and cursorFromPartitions are given: "
        text += "a split uses one method or the other"
    elif partition.id in comes_after(partition):
        text = f"{_edge_of(partition)} names the partition itself"
    else:
        return
    raise LineageError(text, feed=feed, partition=partition.id)


def _edge_of(partition: Partition) -> str:
    return "cursorFromPartitions" if partition.cursor_from else "startsAfterPartition"


def _check_cycles(linked: Iterable[Partition], feed: str | None) -> None:
    before = {p.id: comes_after(p) for p in linked}
    if not any(above in before for edges in before.values() for above in edges):
        return  # no edge leads to another one
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = error.args[1]
        text = f"the lineage has a cycle: {cycle_text(cycle)}"
        raise LineageError(text, feed=feed, partition=cycle[0]) from None


def descendants(
    partitions: Mapping[int, Partition], roots: Collection[int], among: Collection[int]
) -> set[int]:
    """Return which of `among` descend from `roots`, over nothing else than these."""
    found: set[int] = set()
    waiting = [partitions[id] for id in among if id in partitions]
    while more := {p.id for p in waiting if any(a in roots or a in found for a in comes_after(p))}:
        found |= more
        waiting = [p for p in waiting if p.id not in found]
    return found


class SuspectedEdges(NamedTuple):
    """Closed partitions without a descendant, and roots that may start after one of them."""

    parents: tuple[int, ...]
    children: tuple[int, ...]

    def __str__(self) -> str:
        example = ", ".join(f"{child}: {self.parents[0]}" for child in self.children[:_SHOWN])
        more = ", ..." if len(self.children) > _SHOWN else ""
        return (
            f"{names(self.parents)} closed without a child, and {names(self.children)} came "
            "without a parent: the publisher may have left out startsAfterPartition, and events "
            f"may be read out of order. If so, give lineage={{{example}{more}}} (child: parent)"
        )


def _childless(partitions: Mapping[int, Partition]) -> set[int]:
    named = {a for p in partitions.values() for a in comes_after(p)}
    return {p.id for p in partitions.values() if p.closed and p.id not in named}


def suspected_missing_edges(
    previous: Collection[int] | None,
    current: Mapping[int, Partition],
    *,
    retired: Collection[int] = (),
) -> SuspectedEdges | None:
    """Return the `startsAfterPartition` edges that a discovery seems to lack: a closed partition,
    not among the `retired`, has no descendant while there are new roots (not among the `previous`,
    or for a single discovery with larger ids). It may be in order: one retired, another added.
    """
    ends = _childless(current).difference(retired)
    if not ends:
        return None
    roots = [p.id for p in current.values() if not comes_after(p)]
    if previous is None:
        children = [root for root in roots if root > min(ends)]
        parents = [end for end in ends if children and end < max(children)]
    else:
        children = [root for root in roots if root not in previous]
        parents = [end for end in ends & set(previous) if any(c != end for c in children)]
    if not parents or not children:
        return None
    return SuspectedEdges(tuple(sorted(parents)), tuple(sorted(children)))


def with_edges(
    info: FeedInfo, lineage: Mapping[int, int | None], *, unseen: Collection[int] = (), feed: str
) -> FeedInfo:
    """Return the discovery with the edges of `lineage` added whose child is listed, and whose
    parent is not in `unseen`. Raises `LineageError`: a contradiction, or a cycle.
    """
    if not lineage:
        return info
    listed, given = info.partitions, dict[int, Partition]()
    for child, parent in lineage.items():
        partition = listed.get(child, Partition(child))
        above = comes_after(partition)
        if above and above != (parent,):
            given_to, listed_as = "nobody" if parent is None else parent, _edge_of(partition)
            text = f"lineage= says that it starts after {given_to}, and the feed lists it with "
            text += f"{listed_as} {', '.join(map(str, above[:_SHOWN]))}. Remove it from lineage="
            raise LineageError(text, feed=feed, partition=child)
        given[child] = replace(partition, starts_after=parent)
    try:
        Graph({**listed, **given}, feed=feed)
    except LineageError as error:
        text = f"with the edges of lineage= {error.message}"
        raise LineageError(text, feed=feed, partition=error.partition) from error
    count = {c: p for c, p in given.items() if c in listed and lineage[c] not in unseen}
    return replace(info, partitions={**listed, **count})


class PublisherEdges:
    """Adds the edges that a publisher leaves out, and remembers what was reported (R8)."""

    def __init__(
        self, lineage: Mapping[int, int | None] | None, *, ordered: bool, feed: str
    ) -> None:
        self._lineage, self._ordered, self._feed = dict(lineage or {}), ordered, feed
        self._held: set[int] = set()  # wait for partition 0, because they may be children of it
        self._unseen: dict[int, int] = {}  # parents of `lineage=` never seen, each with a child
        self._reported: set[object] = set()
        self._ends: set[int] = set()  # closed ones without a descendant, of discoveries before
        self._last_ends: set[int] = set()  # those of them that were closed last

    def added(self, info: FeedInfo, *, known: Collection[int], begun: Iterable[int]) -> FeedInfo:
        """Return the discovery with the edges of `lineage=`, and with presumed ones: in v2-token
        any root may be a child of a closed partition 0 that nobody names, but for what has `begun`.
        """
        listed, edges = info.partitions, self._lineage
        unseen = {
            parent: child
            for child, parent in edges.items()
            if child in listed and parent is not None and not (parent in listed or parent in known)
        }
        held = self._presumed(info)
        held = held.difference(begun) if held else held
        info = with_edges(info, edges, unseen=unseen, feed=self._feed)
        self._held, self._unseen = held, unseen
        presumed = {child: replace(listed[child], starts_after=0) for child in held}
        return replace(info, partitions={**info.partitions, **presumed}) if presumed else info

    def _presumed(self, info: FeedInfo) -> set[int]:
        """Return the roots that may start after partition 0; none that it descends from."""
        listed = info.partitions
        if not self._ordered or info.dialect != "v2-token" or 0 not in _childless(listed):
            return set()
        above, waiting = {0}, [0]
        while waiting:
            more = [a for a in comes_after(listed[waiting.pop()]) if a in listed and a not in above]
            waiting += more
            above.update(more)
        roots = {p.id for p in listed.values() if not comes_after(p)}
        return roots.difference(self._lineage, above)

    def reports(
        self, info: FeedInfo, previous: Collection[int] | None, drained: Iterable[int]
    ) -> Iterator[Report]:
        """Yield what to report of the discovery that `added` returned, each thing once."""
        for parent, child in self._unseen.items():
            yield from self._once(
                ("unseen", parent),
                f"lineage= says that partition {child} starts after partition {parent}, which was "
                "never listed and has no stored position: the edge counts once it is listed",
            )
        ends = _childless(info.partitions) if self._ordered else set()
        if ends - self._ends:
            self._last_ends = ends - self._ends
            self._ends |= ends
        if not (ends or self._held):
            return
        retired = set(drained)  # what is drained is read before whatever comes now
        if self._held and 0 not in retired:
            yield from self._once(
                "held",
                f"{names(self._held)} may start after partition 0, which is closed: the published "
                "Go library leaves startsAfterPartition out where it is 0. Until partition 0 is "
                "drained they wait. If a partition comes after nobody, give "
                f"lineage={{{min(self._held)}: None}}",
            )
        if info.dialect == "v2-token":
            retired.add(0)
        if previous is not None:
            retired |= ends - self._last_ends
        suspected = suspected_missing_edges(previous, info.partitions, retired=retired)
        if suspected is not None and not self._reported.issuperset(suspected.parents):
            self._reported.update(suspected.parents)
            yield Report(None, str(suspected))

    def _once(self, thing: object, text: str) -> Iterator[Report]:
        if thing not in self._reported:
            self._reported.add(thing)
            yield Report(None, text)
