"""The edges of each discovery as one planner uses them, and what it reports about them (R8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from feedapi_client.lineage.missing_edges import (
    childless,
    never_seen,
    presumed_children,
    suspected_missing_edges,
    with_edges,
)
from feedapi_client.lineage.partition_names import names
from feedapi_client.model import FeedInfo


@dataclass(frozen=True, slots=True)
class Edges:
    """A discovery with the edges that were added.

    Attributes:
        info: the discovery.
        held: partitions that wait for partition 0, because they may be children of it.
        unseen: parents that `lineage=` names and that were never seen, each with a child.
    """

    info: FeedInfo
    held: frozenset[int]
    unseen: Mapping[int, int]


class PublisherEdges:
    """Adds the edges that a publisher leaves out, and remembers what was reported."""

    def __init__(self, lineage: Mapping[int, int | None], *, ordered: bool, feed: str) -> None:
        self._lineage = lineage
        self._ordered = ordered
        self._feed = feed
        self._reported: set[object] = set()
        self._suspects: set[int] = set()
        self._ends: set[int] = set()
        """Closed partitions without a descendant, of the discoveries before."""
        self._last_ends: set[int] = set()
        """Those of them that were closed last."""

    def added(
        self, info: FeedInfo, *, known: Collection[int] | None, begun: Callable[[], Collection[int]]
    ) -> Edges:
        """Return the discovery with the edges of `lineage=`, and with presumed ones.

        Arguments:
            info: the discovery.
            known: every partition that was ever stored or listed; None to accept any.
            begun: returns those that are read, or that have a position behind their beginning.

        Raises:
            LineageError: see `with_edges`.
        """
        unseen = never_seen(info, self._lineage, known=known)
        presumed = presumed_children(info, self._lineage) if self._ordered else set()
        if presumed:
            presumed.difference_update(begun())
        info = with_edges(info, self._lineage, known=known, feed=self._feed)
        if presumed:
            partitions = dict(info.partitions)
            for child in presumed:
                partitions[child] = replace(partitions[child], starts_after=0)
            info = replace(info, partitions=partitions)
        return Edges(info, frozenset(presumed), unseen)

    def reports(
        self,
        edges: Edges,
        previous: Collection[int] | None,
        drained: Callable[[], Collection[int]],
        *,
        at_end: bool,
    ) -> Iterator[str]:
        """Yield what to report of a discovery, each thing once.

        Arguments:
            edges: what `added` returned.
            previous: every partition that was known before; None at a first start.
            drained: returns the partitions that were read to their ends.
            at_end: whether it is a first start at the end of the feed.
        """
        for parent, child in edges.unseen.items():
            if self._is_new(("unseen", parent)):
                yield (
                    f"lineage= says that partition {child} starts after partition {parent}, which "
                    "was never listed and has no stored position: the edge counts once it is "
                    "listed. Correct lineage= if that is a mistake"
                )
        if not self._ordered:
            return
        ends = childless(edges.info.partitions)
        if ends - self._ends:
            self._last_ends = ends - self._ends
            self._ends |= ends
        if at_end or not (ends or edges.held):
            return
        over = set(drained())
        if edges.held and 0 not in over and self._is_new("held"):
            yield (
                f"partition 0 is closed and no partition starts after it: {names(edges.held)} may "
                "do so, because the published Go library leaves startsAfterPartition out where it "
                "is 0. Until partition 0 is drained they wait. If a partition comes after nobody, "
                f"give lineage={{{min(edges.held)}: None}}"
            )
        # What is drained is read before whatever comes now. In v2-token so is partition 0.
        retired = over | ({0} if edges.info.dialect == "v2-token" else set())
        if previous is not None:
            retired |= ends - self._last_ends
        suspected = suspected_missing_edges(previous, edges.info.partitions, retired=retired)
        if suspected is not None and not self._suspects.issuperset(suspected.parents):
            self._suspects.update(suspected.parents)
            yield str(suspected)

    def _is_new(self, thing: object) -> bool:
        new = thing not in self._reported
        self._reported.add(thing)
        return new
