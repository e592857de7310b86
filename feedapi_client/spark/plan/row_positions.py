"""Where the rows of each partition stand: columns ``sequence`` and ``depth``. Imports no Spark."""

from __future__ import annotations

from collections.abc import Mapping

from feedapi_client.lineage.order import count_before
from feedapi_client.lineage.planner import Planner
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
