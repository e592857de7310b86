"""What a planner knows of the leases when several instances share a feed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from feedapi_client.lineage.actions import Action, Stop
from feedapi_client.lineage.entries import STORED_STATE, Entries
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.transitions import State
from feedapi_client.model import Partition, Position

_READABLE = (State.READING, State.CAUGHT_UP, State.ELSEWHERE)


class Ownership:
    """The leases of one instance and of the others. Without `shared` everything is its own.

    Attributes:
        owned: partitions that this instance may read.
        others: partitions whose lease a living instance other than this one holds; None while that
            is not known.
        ended: partitions that were read to their end, by whichever instance without `follow`.
        unsure: partitions whose position in memory is not the stored one, because a save of it was
            refused.
    """

    def __init__(self, table: Entries, *, shared: bool) -> None:
        self.shared = shared
        self.owned: set[int] = set()
        self.others: Collection[int] | None = None
        self.ended: Collection[int] = frozenset()
        self.unsure: set[int] = set()
        self._table = table

    def __contains__(self, partition: object) -> bool:
        return not self.shared or partition in self.owned

    # ------------------------------------------------------------------ what changes

    def take(
        self,
        stored: Mapping[int, Position],
        graph: Graph,
        *,
        owned: Iterable[int] | None,
        others: Collection[int] | None,
        ended: Collection[int] | None,
    ) -> tuple[set[int], bool]:
        """Take stored positions and leases, see `Planner.refresh`.

        Return the partitions that may be started now, and whether one is over by what is stored.
        """
        gained = set(() if owned is None else owned) - self.owned
        self.others = self.others if others is None else others
        self.ended = self.ended if ended is None else ended
        self.unsure |= gained
        changed, over = set(gained), False
        for partition in {*stored, *self.unsure} - self.owned:
            entry, position = self._table[partition], stored.get(partition)
            if self._is_news(entry, position):
                over |= self._take(entry, position, graph)
                changed.add(partition)
        self.unsure.clear()
        self.owned |= gained
        return changed, over

    def _is_news(self, entry: Entry, stored: Position | None) -> bool:
        """Return whether what was loaded may change the state of a partition."""
        if stored != entry.position or entry.id in self.unsure:
            return True
        # Its end was committed by this instance, after its lease was given away.
        return entry.state is State.ELSEWHERE and stored is not None and stored.status != "open"

    def _take(self, entry: Entry, stored: Position | None, graph: Graph) -> bool:
        """Take a position of the store. Return whether the partition is over by it."""
        if self._is_outdated(entry, stored) or entry.state is State.PARKED:
            return False
        entry.position = stored
        state = None if stored is None else STORED_STATE.get(stored.status)
        if state is not None:
            news = entry.state is not state
            self._table.move(entry, state)
            return news
        if entry.state in (State.DRAINED, State.SUPERSEDED):
            self._table.move(entry, State.ELSEWHERE)
        if entry.state is State.ELSEWHERE and entry.id not in graph:
            self._table.move(entry, State.VANISHED)
        return False

    def _is_outdated(self, entry: Entry, stored: Position | None) -> bool:
        """Return whether what was loaded is older than what is known already."""
        if entry.position is None or entry.id in self.unsure:
            return False
        return stored is None or stored.revision < entry.position.revision

    def revoke(self, partitions: Iterable[int]) -> list[Action]:
        """Stop partitions whose lease is given away or lost."""
        actions: list[Action] = []
        for partition in self.owned.intersection(partitions):
            self.owned.discard(partition)
            entry = self._table[partition]
            if entry.running:
                actions.append(Stop(partition))
                self._table.move(entry, State.ELSEWHERE)
        return actions

    def refused(self, partitions: Collection[int]) -> list[Action]:
        """Note that a save of these was refused: the next `take` takes what is stored."""
        actions = self.revoke(partitions)
        for partition in partitions:
            entry = self._table[partition]
            self.unsure.add(partition)
            if entry.running:
                actions.append(Stop(partition))
            if entry.running or entry.state in (State.DRAINED, State.SUPERSEDED):
                self._table.move(entry, State.ELSEWHERE)
        return actions

    # ------------------------------------------------------------------ views

    def undecided(self, successors: Iterable[Partition]) -> set[int]:
        """Return the ancestors whose cursors others have to transfer, or whose lease comes first.

        An ancestor without a position counts while another instance reads it: its first commit
        may come any moment.
        """
        if not self.shared:
            return set()
        entries = self._table.all
        return {
            ancestor
            for successor in successors
            for ancestor in successor.cursor_from
            if ancestor not in self.owned
            and (
                self.others is None
                or ancestor in self.others
                or (ancestor in entries and entries[ancestor].live)
            )
        }

    def unfinished_elsewhere(self, is_closed: Callable[[int], bool]) -> bool:
        """Return whether a partition that this instance does not read was not read to its end.

        Of a closed one the end alone is not enough: only when it is drained its children start.
        """
        if not self._table.counts[State.ELSEWHERE]:
            return False
        elsewhere = (e.id for e in self._table.all.values() if e.state is State.ELSEWHERE)
        return any(p not in self.ended or is_closed(p) for p in elsewhere)

    def parked(self) -> set[int]:
        """Return the owned partitions that are parked."""
        return {p for p in self.owned if self._table[p].state is State.PARKED}

    def leasable(self, successors: Iterable[Partition]) -> list[tuple[int, ...]]:
        """Return the groups of partitions that one instance has to hold together, mostly one each.

        A partition counts when it can be read. So do the ancestors of a successor without a
        position: whoever holds the leases of all of them transfers the cursor.

        Arguments:
            successors: those without a position.
        """
        entries = self._table.all
        units: list[tuple[int, ...]] = [(e.id,) for e in entries.values() if e.state in _READABLE]
        for successor in successors:
            live = tuple(a for a in successor.cursor_from if a in entries and entries[a].live)
            if live and not any(entries[a].state is State.PARKED for a in live):
                units.append(live)
        return units
