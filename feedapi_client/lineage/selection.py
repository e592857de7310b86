"""The selection of partitions to read (`partitions=`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from feedapi_client.errors import LineageError
from feedapi_client.model import FeedInfo, Partition, Position
from feedapi_client.protocol.text import names


class Selection:
    """The selected partitions, and the stored positions of all others.

    A discovery is narrowed to the selection, and to parents and ancestors that still count: stored
    ones, but for a parent that is listed, and ancestors that are gone, because what they came after
    their successor comes after, too. What is gone is judged as without a selection.
    """

    def __init__(self, partitions: Iterable[int] | None, feed: str) -> None:
        self._chosen = None if partitions is None else frozenset(partitions)
        self.others: dict[int, Position] = {}  # never changed, never saved
        self.gone: dict[int, int] = {}  # how often in a row an open one of these was not listed
        self.left_out: set[int] = set()  # ancestors of what was ever listed and is not selected
        self._feed = feed

    def __contains__(self, partition: object) -> bool:
        return self._chosen is None or partition in self._chosen

    def load(self, positions: Mapping[int, Position]) -> dict[int, Position]:
        """Return the stored positions of selected partitions; keep those of the others."""
        self.others = {id: position for id, position in positions.items() if id not in self}
        return {id: position for id, position in positions.items() if id in self}

    def check(self, info: FeedInfo, known: Mapping[int, object]) -> None:
        """Raise `LineageError` when a selected partition is neither listed nor `known`."""
        missing = sorted((self._chosen or set()) - info.partitions.keys() - known.keys())
        if missing:
            only = f", only {names(info.partitions)}" if info.partitions else ""
            text = f"the feed does not list this partition{only}"
            raise LineageError(text, feed=self._feed, partition=missing[0])

    def note(self, info: FeedInfo) -> None:
        """Note which cursors go to successors that are not selected, and what is gone."""
        if self._chosen is None:
            return
        named = {a for p in info.partitions.values() for a in p.cursor_from}
        self.gone = {
            id: min(self.gone.get(id, 0) + 1, 2)
            for id, position in self.others.items()
            if position.status == "open" and id not in info.partitions and id not in named
        }
        self.left_out.update(*(p.cursor_from for p in info.partitions.values() if p.id not in self))

    def narrow(self, info: FeedInfo) -> Mapping[int, Partition]:
        listed = info.partitions
        if self._chosen is None:
            return listed
        return {id: self._alone(p, listed) for id, p in listed.items() if id in self}

    def _alone(self, partition: Partition, listed: Container[int]) -> Partition:
        parent, ancestors = partition.starts_after, partition.cursor_from
        kept = parent in self or (parent in self.others and parent not in listed)
        above = tuple(a for a in ancestors if a in self or a in self.others or a not in listed)
        return replace(partition, starts_after=parent if kept else None, cursor_from=above)

    def check_ancestors(self, partition: Partition) -> None:
        """Raise `LineageError` when an ancestor that is not selected still holds a cursor."""
        for ancestor in partition.cursor_from:
            position = self.others.get(ancestor)
            if position is not None and position.status != "superseded":
                text = f"is to take over the cursor that is stored for partition {ancestor}, which "
                text += "is not selected: select it too, or run once without a selection"
                raise LineageError(text, feed=self._feed, partition=partition.id)
