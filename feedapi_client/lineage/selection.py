"""The selection of partitions to read (`partitions=`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from feedapi_client.errors import LineageError
from feedapi_client.model import FeedInfo, Partition, Position
from feedapi_client.protocol.text import names

_SHOWN = 20


class Selection:
    """The selected partitions, and the stored positions of all others.

    A discovery is narrowed to the selection. Edges between selected partitions are kept. A parent
    that is not selected is dropped: no partition waits for it. So is an ancestor that is not
    selected, but for two kinds: one with a stored position, because then it matters where its
    successor starts, and one that is not listed any more. Nobody can select that, and what it came
    after its successor comes after, too. What is gone is judged as without a selection.

    Attributes:
        chosen: the selected partitions; None for all.
        others: stored positions of partitions that are not selected. Never changed, never saved.
        gone: how many discoveries in a row did not list an open one of these, nor a successor.
    """

    def __init__(self, partitions: Iterable[int] | None, feed: str) -> None:
        """Select `partitions`, None for all. Raises ValueError for an impossible selection."""
        self.chosen: set[int] | None = None if partitions is None else set(partitions)
        self.others: dict[int, Position] = {}
        self.gone: dict[int, int] = {}
        self._feed = feed
        self._successors: dict[int, set[int]] = defaultdict(set)  # ever listed and not selected
        if self.chosen is not None and not self.chosen:
            raise ValueError("partitions must name at least one partition, or be None for all")
        for partition in self.chosen or ():
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
        if self.chosen is None:
            return dict(positions)
        self.others = {id: position for id, position in positions.items() if id not in self}
        return {id: position for id, position in positions.items() if id in self}

    def check(self, info: FeedInfo, known: Mapping[int, object]) -> None:
        """Raise `LineageError` when a selected partition is neither listed nor `known`."""
        missing = sorted((self.chosen or set()) - info.partitions.keys() - known.keys())
        if not missing:
            return
        one = missing[0] if len(missing) == 1 else None
        listed = sorted(info.partitions)
        only = f", only {', '.join(map(str, listed[:_SHOWN]))}" if listed else ""
        this = names(missing) if one is None else "this partition"
        text = f"the feed does not list {this}{only}{' …' if len(listed) > _SHOWN else ''}"
        raise LineageError(text, feed=self._feed, partition=one)

    def note(self, info: FeedInfo) -> None:
        """Note which cursors go to successors that are not selected, and what is gone."""
        if self.chosen is None:
            return
        named = {a for p in info.partitions.values() for a in p.cursor_from}
        self.gone = {
            id: min(self.gone.get(id, 0) + 1, 2)
            for id, position in self.others.items()
            if position.status == "open" and id not in info.partitions and id not in named
        }
        for partition in info.partitions.values():
            for ancestor in partition.cursor_from if partition.id not in self else ():
                self._successors[ancestor].add(partition.id)

    def successors_left_out(self, ancestor: int) -> list[int]:
        """Return the partitions that may take its cursor and are not selected."""
        return sorted(id for id in self._successors.get(ancestor, ()) if id not in self)

    def narrow(self, info: FeedInfo) -> FeedInfo:
        """Return the discovery with the selected partitions only."""
        if self.chosen is None:
            return info
        chosen = (p for id, p in info.partitions.items() if id in self)
        return replace(info, partitions={p.id: self._alone(p, info.partitions) for p in chosen})

    def _alone(self, partition: Partition, listed: Container[int]) -> Partition:
        parent = partition.starts_after
        kept = parent in self or (parent in self.others and parent not in listed)
        ancestors = [
            a for a in partition.cursor_from if a in self or a in self.others or a not in listed
        ]
        return replace(
            partition, starts_after=parent if kept else None, cursor_from=tuple(ancestors)
        )

    def check_ancestors(self, partition: Partition) -> None:
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
                    feed=self._feed,
                    partition=partition.id,
                )
