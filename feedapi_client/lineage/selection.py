"""The selection of partitions to read (`partitions=`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from feedapi_client.errors import LineageError
from feedapi_client.lineage.partition_names import names
from feedapi_client.model import FeedInfo, Partition, Position


class Selection:
    """The selected partitions, and the stored positions of all others.

    A discovery is narrowed to the selection before the planner uses it. Edges between selected
    partitions are kept. A parent that is not selected is dropped: no partition waits for it. So is
    an ancestor that is not selected, but for two kinds: one with a stored position, because then it
    matters where its successor starts, and one that is not listed any more. Nobody can select that,
    and what it came after its successor comes after, too (see `order.preceding`). What is gone is
    judged as without a selection: a parent that is stored and not listed any more still counts.
    """

    def __init__(self, partitions: Iterable[int] | None = None) -> None:
        """Select `partitions`, None for all. Raises ValueError for an impossible selection."""
        self.chosen: set[int] | None = None if partitions is None else set(partitions)
        self.others: dict[int, Position] = {}
        """Stored positions of partitions that are not selected. Never changed, never saved."""
        self.lost: set[int] = set()
        """Those of them that are open and gone: not listed any more, and without a successor."""
        self._successors: dict[int, set[int]] = defaultdict(set)
        """Every successor that was ever listed and was not selected then, by its ancestors."""
        if self.chosen is None:
            return
        if not self.chosen:
            raise ValueError("partitions must name at least one partition, or be None for all")
        for partition in self.chosen:
            if isinstance(partition, bool) or not isinstance(partition, int):
                raise ValueError(f"partitions must hold partition ids, not {partition!r}")

    def __contains__(self, partition: object) -> bool:
        return self.chosen is None or partition in self.chosen

    def add(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Select more partitions. Return the stored positions of those that have one."""
        if self.chosen is None:
            return {}
        more = set(partitions) - self.chosen
        self.chosen |= more
        return {id: self.others.pop(id) for id in sorted(more) if id in self.others}

    def load(self, positions: Mapping[int, Position]) -> dict[int, Position]:
        """Return the stored positions of selected partitions; keep those of the others."""
        self.others = {id: position for id, position in positions.items() if id not in self}
        return {id: position for id, position in positions.items() if id in self}

    def check(self, info: FeedInfo, known: Mapping[int, object], *, feed: str) -> None:
        """Raise `LineageError` when a selected partition is neither listed nor `known`."""
        if self.chosen is None:
            return
        missing = sorted(self.chosen - info.partitions.keys() - known.keys())
        if missing:
            this = "this partition" if len(missing) == 1 else names(missing)
            listed = sorted(info.partitions)
            only = f", only {', '.join(map(str, listed[:20]))}" if listed else ""
            raise LineageError(
                f"the feed does not list {this}{only}{' …' if len(listed) > 20 else ''}",
                feed=feed,
                partition=missing[0] if len(missing) == 1 else None,
            )

    def note(self, info: FeedInfo) -> None:
        """Note which cursors go to successors that are not selected, and which are lost."""
        if self.chosen is None:
            return
        named = {a for p in info.partitions.values() for a in p.cursor_from}
        self.lost = {
            id
            for id, position in self.others.items()
            if position.status == "open" and id not in info.partitions and id not in named
        }
        for partition in info.partitions.values():
            if partition.cursor_from and partition.id not in self:
                for ancestor in partition.cursor_from:
                    self._successors[ancestor].add(partition.id)

    def successors_left_out(self, ancestor: int) -> list[int]:
        """Return the partitions that may take its cursor and are not selected."""
        return sorted(id for id in self._successors.get(ancestor, ()) if id not in self)

    def narrow(self, info: FeedInfo) -> FeedInfo:
        """Return the discovery with the selected partitions only."""
        if self.chosen is None:
            return info
        return replace(
            info,
            partitions={
                id: self._alone(p, info.partitions)
                for id, p in info.partitions.items()
                if id in self
            },
        )

    def _alone(self, partition: Partition, listed: Container[int]) -> Partition:
        return replace(
            partition,
            starts_after=self._parent(partition, listed),
            cursor_from=tuple(
                a for a in partition.cursor_from if a in self or a in self.others or a not in listed
            ),
        )

    def _parent(self, partition: Partition, listed: Container[int]) -> int | None:
        """Return the parent that counts. One that is gone was lost, or read to its end before."""
        parent = partition.starts_after
        if parent in self or (parent in self.others and parent not in listed):
            return parent
        return None

    def check_ancestors(self, partition: Partition, *, feed: str) -> None:
        """Raise `LineageError` when an ancestor that is not selected still holds its cursor.

        To take that cursor would supersede a position that is not ours. One that is superseded
        already may be taken: nothing has to be saved for it.
        """
        for ancestor in partition.cursor_from:
            position = self.others.get(ancestor)
            if position is not None and position.status != "superseded":
                raise LineageError(
                    f"is to take over the cursor that is stored for partition {ancestor}, which "
                    "is not selected: select it too, run once without a selection, or set the "
                    "cursor by hand",
                    feed=feed,
                    partition=partition.id,
                )
