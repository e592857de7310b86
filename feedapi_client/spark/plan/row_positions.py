"""Where the rows of each partition stand. No I/O; imports no Spark.

`RowNumbers` has the columns ``sequence`` and ``depth``, `Seeking` the partitions that have not come
to the start time yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from feedapi_client.lineage.order import count_before
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import Partition
from feedapi_client.spark.target import FetchResult


class RowNumbers:
    """Counts the events of each partition, and the partitions that come before it.

    Arguments:
        sequences, depths: those of the last plan.
    """

    def __init__(
        self, sequences: Mapping[int, int] | None = None, depths: Mapping[int, int] | None = None
    ) -> None:
        self.sequences: dict[int, int] = dict(sequences or {})
        """Events of each partition so far."""
        self.depths: dict[int, int] = dict(depths or {})
        """Partitions before each one."""

    def add(self, result: FetchResult) -> None:
        """Count the events that a read brought."""
        before = self.sequences.get(result.partition, 0)
        self.sequences[result.partition] = before + result.events

    def set_depths(self, lineage: Planner) -> None:
        """Count the partitions before each one, as soon as it is listed.

        A partition that is gone later still counts, also one that was never read: what comes before
        it comes before its successors.
        """
        entries, before = lineage.entries, {}
        for id, listed in lineage.graph.partitions.items():
            if id not in self.depths:
                # An ancestor without an event takes no place of its own.
                ancestors = {p: min(1, self.sequences.get(p, 0)) for p in listed.cursor_from}
                first = {p: 1 for p in lineage.preceding(id) if p in entries}
                before[id] = ancestors | first
        count_before(before, self.depths)


class Seeking:
    """The partitions whose events are dropped up to the first one at or after the start time.

    Only partitions of the first discovery seek, and those that go on from the cursor of one that
    still does: what is published later in others is never dropped (R7). The search of a partition
    is over with the first event that is kept, or when the partition is caught up.

    Arguments:
        partitions: those of the last plan.
    """

    def __init__(self, partitions: Iterable[int] = ()) -> None:
        self._partitions = set(partitions)

    def __repr__(self) -> str:
        return f"<Seeking {sorted(self._partitions)}>"

    def __iter__(self) -> Iterator[int]:
        return iter(self._partitions)

    def __contains__(self, partition: int) -> bool:
        return partition in self._partitions

    def begin(self, partitions: Iterable[int]) -> None:
        """Seek in these partitions."""
        self._partitions.update(partitions)

    def inherit(self, new: Iterable[Partition], known: Collection[int]) -> None:
        """Seek in new partitions that go on where only seeking ones were read.

        Arguments:
            new: listed for the first time.
            known: the partitions that were listed before.
        """
        for listed in new:
            ancestors = [p for p in listed.cursor_from if p in known]
            if ancestors and self._partitions.issuperset(ancestors):
                self._partitions.add(listed.id)

    def add(self, result: FetchResult) -> bool:
        """Add what a read came to. Return whether the search is over without an event.

        Nothing else says so then: it has to be saved.
        """
        over = result.started or result.ended or result.reached
        if not over or result.partition not in self._partitions:
            return False
        self._partitions.discard(result.partition)
        return not result.started
