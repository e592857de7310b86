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
            refused, and the moment of that refusal.
        moment: is later after each load that begins, and each save that ends.
    """

    def __init__(self, table: Entries, *, shared: bool) -> None:
        self.shared = shared
        self.owned: set[int] = set()
        self.others: Collection[int] | None = None
        self.ended: Collection[int] = frozenset()
        self.unsure: dict[int, int] = {}
        self.moment = 0
        self._loaded = 0  # when the newest load began that was taken
        self._asked = 0  # when the leases of others were last forgotten
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
        began: int | None,
        looked: int | None,
        in_flight: Collection[int] = (),
    ) -> tuple[set[int], bool]:
        """Take stored positions and leases, see `Planner.refresh`.

        Of a partition that is given away while a batch of it is `in_flight` the position stays: it
        is where that batch was read from. Its commit is to be refused if another one is stored.

        Return the partitions that may be started now, and whether one is over by what is stored.
        """
        began = self.begin_load() if began is None else began
        late = {p: moment for p, moment in self.unsure.items() if moment > began}
        gained = set(() if owned is None else owned) - self.owned - late.keys()
        if others is not None and (looked is None or looked > self._asked):
            self.others = others
        self.ended = self.ended if ended is None else ended
        self.unsure |= dict.fromkeys(gained, began)
        changed, over = set(gained), False
        known = {p for p, entry in self._table.all.items() if entry.position is not None}
        held = set(in_flight) - self.unsure.keys()
        for partition in {*stored, *self.unsure, *known} - self.owned - late.keys() - held:
            entry, position = self._table[partition], stored.get(partition)
            if self._is_news(entry, position):
                over |= self._take(entry, position, graph, began)
                changed.add(partition)
        self.unsure = late
        self._loaded = max(self._loaded, began)
        self.owned |= gained
        return changed, over

    def _is_news(self, entry: Entry, stored: Position | None) -> bool:
        """Return whether what was loaded may change the state of a partition."""
        if stored != entry.position or entry.id in self.unsure:
            return True
        # Its end was committed by this instance, after its lease was given away.
        return entry.state is State.ELSEWHERE and stored is not None and stored.status != "open"

    def _take(self, entry: Entry, stored: Position | None, graph: Graph, began: int) -> bool:
        """Take a position of the store. Return whether the partition is over by it."""
        if self._is_outdated(entry, stored, began) or entry.state is State.PARKED:
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

    def _is_outdated(self, entry: Entry, stored: Position | None, began: int) -> bool:
        """Return whether what was loaded is older than what is known already.

        A lower revision alone doesn't say so: a database may have failed over to a replica that
        lacks the last saves.
        """
        if entry.position is None or entry.id in self.unsure:
            return False
        if stored is not None and stored.revision >= entry.position.revision:
            return False
        return began < self._loaded or began < entry.saved_at

    def overtaken(self, stored: Mapping[int, Position], began: int) -> set[int]:
        """Return the owned partitions whose stored position somebody else has advanced."""
        entries = self._table.all
        return {
            p
            for p in self.owned & stored.keys()
            if (known := entries[p].position) is not None
            and (
                stored[p].revision > known.revision
                # After a failover another one may have saved as often as was lost.
                or (stored[p].revision == known.revision and stored[p].cursor != known.cursor)
            )
            and entries[p].saved_at < began
            and p not in self.unsure
        }

    def begin_load(self) -> int:
        """Return the present moment, as that of a load that begins."""
        self.moment += 1
        return self.moment

    def saved(self, positions: Mapping[int, Position]) -> None:
        """Note that this instance has saved positions: an older load must not overwrite them."""
        self.moment += 1
        for partition, position in positions.items():
            entry = self._table[partition]
            if entry.position == position:
                entry.saved_at = self.moment

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
        self.moment += 1
        for partition in partitions:
            entry = self._table[partition]
            self.unsure[partition] = self.moment
            if entry.running:
                actions.append(Stop(partition))
            if entry.running or entry.state in (State.DRAINED, State.SUPERSEDED):
                self._table.move(entry, State.ELSEWHERE)
        return actions

    # ------------------------------------------------------------------ views

    def look_again(self, successors: Iterable[Partition]) -> None:
        """Forget the leases of others where a successor has an ancestor without a position.

        Another instance may have begun to read that ancestor since they were looked at.
        """
        entries = self._table.all
        if self.shared and any(
            ancestor not in self.owned
            and (ancestor not in entries or entries[ancestor].position is None)
            for successor in successors
            for ancestor in successor.cursor_from
        ):
            self.others = None
            self._asked = self.begin_load()

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
        """Return whether a partition that another instance may read was not read to its end.

        Of a closed one the end alone is not enough: only when it is drained its children start.
        """
        if not self._table.counts[State.ELSEWHERE]:
            return False
        elsewhere = (e.id for e in self._table.all.values() if e.state is State.ELSEWHERE)
        return any(p not in self.ended or is_closed(p) for p in elsewhere)

    def awaits_transfer(self, successors: Iterable[Partition]) -> bool:
        """Return whether one of these waits for a cursor that some instance will transfer.

        Nobody transfers that of a parked one.
        """
        entries = self._table.all
        return any(
            ancestor not in entries or entries[ancestor].state is not State.PARKED
            for ancestor in self.undecided(successors)
        )

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
