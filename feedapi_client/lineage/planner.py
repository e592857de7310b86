"""State and input in, actions out: which partition is read from where, and what is saved when (R4 to R12).

The planner does no I/O and knows no clock. A driver (the async consumer, the Spark source) tells it what happened and carries out the actions it
returns, in their order; an action that fails ends the driver's session, and the next session starts again from the store.

The states of a partition and the legal transitions between them are in `transitions.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from feedapi_client.errors import AmbiguousLineageError, FeedError, LineageError, LostPartitionError
from feedapi_client.lineage.graph import Graph, validate
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.text import names
from feedapi_client.lineage.transitions import State, check_transition
from feedapi_client.model import FIRST, LAST, FeedInfo, Partition, Position

__all__ = [
    "Action",
    "Entry",
    "Fail",
    "Planner",
    "Rediscover",
    "Report",
    "Save",
    "Start",
    "StartAt",
    "State",
    "Stop",
]


@dataclass(frozen=True, slots=True)
class Save:
    """Save all of these in one atomic save before the next action is carried out."""

    positions: dict[int, Position]


@dataclass(frozen=True, slots=True)
class Start:
    """Read the partition from the cursor; when it is read already: go on at once, without a pause."""

    partition: int
    cursor: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop reading the partition and drop what was read and not delivered."""

    partition: int


@dataclass(frozen=True, slots=True)
class Rediscover:
    """Discover again soon: the topology may have changed (R10)."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the operator; nothing has failed."""

    partition: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The partition can't go on. The planner has stopped it and its descendants; the driver raises or parks (R18)."""

    partition: int
    error: FeedError


Action = Save | Start | Stop | Rediscover | Report | Fail
StartAt = Literal["first", "last"] | Mapping[int, str]


@dataclass(slots=True)
class Entry:
    """What is known of one partition. `position` is what is committed, None when nothing ever was; `end` is the cursor behind which a closed
    partition was seen to hold nothing."""

    id: int
    state: State = State.WAITING
    position: Position | None = None
    waits_for: tuple[int, ...] = ()
    end: str | None = None
    error: FeedError | None = None
    warned: bool = False

    @property
    def cursor(self) -> str:
        """Where reading starts."""
        return self.position.cursor if self.position else FIRST

    @property
    def live(self) -> bool:
        """Has a cursor that an heir may take over."""
        return self.position is not None and self.position.status != "superseded"

    @property
    def running(self) -> bool:
        """Is read by the driver."""
        return self.state in (State.READING, State.CAUGHT_UP)


class Planner:
    """The scheduler of one feed's partitions. Not thread-safe: a driver calls it from one task at a time."""

    def __init__(
        self,
        *,
        feed: str,
        start: StartAt = "first",
        ordered: bool = True,
        partitions: Iterable[int] | None = None,
    ) -> None:
        """Create a planner without any partition.

        Arguments:
            feed: the feed's URL, for messages.
            start: where partitions of the first discovery of an empty store begin.
            ordered: whether a child waits until its parent is drained.
            partitions: the partitions to read; None for all. Only these are started and saved.
                Order and cursor transfer are kept among them. A parent that is not selected is
                not waited for, and the stored positions of others stay as they are.

        Raises ValueError for another `start`, and for `partitions` that hold no partition's id.
        """
        if isinstance(start, str) and start not in ("first", "last"):
            raise ValueError(
                f"start must be 'first', 'last' or a mapping of partition to cursor, not {start!r}"
            )
        self.feed = feed
        self.start: StartAt = start if isinstance(start, str) else dict(start)
        self.ordered = ordered
        self.entries: dict[int, Entry] = {}
        self.graph = Graph({})
        self._selection = Selection(partitions)
        self._newborn = True
        self._counts: Counter[State] = Counter()
        self._in_hand: set[int] = set()
        self._waiters: dict[int, set[int]] = defaultdict(set)
        self._parents: dict[
            int, int
        ] = {}  # also of partitions that are gone: their heirs inherit what they waited for

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {state}" for state, n in self._counts.items() if n)
        return f"<Planner of {self.feed}: {counts or 'no partition yet'}>"

    # ------------------------------------------------------------------ inputs

    def load(self, positions: Mapping[int, Position]) -> None:
        """The stored positions, once, before the first discovery. Without any of a selected partition, the next discovery is the consumer's birth (R7)."""
        selected = self._selection.load(positions)
        self._newborn = not selected
        for partition, position in selected.items():
            self._add(partition, position)

    def select(self, partitions: Iterable[int]) -> None:
        """Add partitions to the selection, to be started by the next discovery.

        Without a selection all partitions are read anyway, and this does nothing.
        """
        for partition, position in self._selection.add(partitions).items():
            self._newborn = False
            self._add(partition, position)

    def unresolved(self, info: FeedInfo) -> list[int]:
        """The partitions whose present end the driver has to ask for (a fetch of ``_last``) and hand to `discover` as `ends`.

        A stored ``_last`` would come to mean another place at each start: what is saved at birth has to be a real cursor.
        """
        if not self._newborn or self.start != "last":
            return []
        return [
            p.id
            for p in info.partitions.values()
            if p.id in self._selection and not p.closed and p.last_cursor is None
        ]

    def discover(self, info: FeedInfo, *, ends: Mapping[int, str] | None = None) -> list[Action]:
        """A discovery.

        Raises `LineageError`, and leaves everything as it was, when the partitions make no graph (R12), when a selected partition was never listed, and
        when `start` names a partition that is not there.
        """
        self._selection.check(info, self.entries, feed=self.feed)
        graph = validate(self._selection.narrow(info), feed=self.feed)
        birth = self._newborn
        if birth:
            self._bootstrap(graph, ends or {})
        self._newborn = False
        self.graph = graph
        self._parents |= {p.id: p.starts_after for p in graph if p.starts_after is not None}
        actions = self._vanish() + self._take_over()
        for partition in graph:
            actions += self._consider(partition)
        return self._one_save(actions) if birth else actions

    def checkpoint(self, partition: int, cursor: str, *, after: Position | None = None) -> Position:
        """The position that a commit of `cursor` saves, `after` the one known here or a later one that was saved since.

        Changes nothing, so that a commit that was rolled back can be made again (R5).
        """
        entry = self.entries[partition]
        predecessor = after or entry.position
        return Position(
            cursor,
            "drained" if self._is_end(entry, cursor) else "open",
            predecessor.revision + 1 if predecessor else 1,
        )

    def delivered(self, partition: int) -> None:
        """A batch of the partition is in the application's hands."""
        self.hold(partition)
        self.progressed(partition)

    def hold(self, partition: int) -> None:
        """A batch that was released is committed late: until it is released again the position is not for anyone else to save."""
        self._in_hand.add(partition)

    def released(self, partition: int, position: Position | None = None) -> list[Action]:
        """The application is done with the batch: committed at `position`, or not committed (None)."""
        entry = self.entries[partition]
        self._in_hand.discard(partition)
        if position is not None:
            entry.position = position
        actions = self._take_over() if self.graph.heirs.get(partition) else []
        return actions + self._settle(entry)

    def progressed(self, partition: int) -> None:
        """A response brought something new: a partition that was caught up reads again."""
        entry = self.entries[partition]
        if entry.state is State.CAUGHT_UP:
            self._move(entry, State.READING)

    def ended(self, partition: int, cursor: str, *, asked_closed: bool) -> list[Action]:
        """A complete response held no event and ended on the `cursor` asked with, and all read before it was delivered.

        `asked_closed`: the discovery before the request said closed. Only then is it the end of the partition (R6); otherwise an open partition is
        caught up, and one that was closed meanwhile is asked once more.
        """
        entry = self.entries[partition]
        if not entry.running:
            return []
        if not self.is_closed(partition):
            self._move(entry, State.CAUGHT_UP)
        elif asked_closed:
            entry.end = cursor
            return self._settle(entry)
        return []

    def fail(self, partition: int, error: FeedError) -> list[Action]:
        """The partition can't go on: park it and all that descend from it (R18)."""
        actions: list[Action] = []
        queue = [partition]
        while queue:
            entry = self._entry(queue.pop())
            if entry.state in (State.PARKED, State.DRAINED, State.SUPERSEDED):
                continue
            if entry.running:
                actions.append(Stop(entry.id))
            entry.error = error
            self._move(entry, State.PARKED)
            queue += [p for p in self._waiters[entry.id] if self.entries[p].state is State.WAITING]
        return actions

    # ------------------------------------------------------------------ views

    @property
    def selected(self) -> frozenset[int] | None:
        """The partitions to read, those that `select` added included; None for all."""
        chosen = self._selection.chosen
        return None if chosen is None else frozenset(chosen)

    def is_closed(self, partition: int) -> bool:
        """Whether the last discovery listed the partition as closed."""
        listed = self.graph.partitions.get(partition)
        return listed is not None and listed.closed

    def runnable(self) -> dict[int, str]:
        """The partitions that may be read now, with the committed cursor of each."""
        return {e.id: e.cursor for e in self.entries.values() if e.running}

    def finished(self) -> bool:
        """Every partition was read to its end, and nothing is in the application's hands. What still waits, waits for what will not come (R8)."""
        return not self._counts[State.READING] and not self._in_hand

    # ------------------------------------------------------------------ birth (R7)

    def _bootstrap(self, graph: Graph, ends: Mapping[int, str]) -> None:
        given = self.start if isinstance(self.start, Mapping) else {}
        for partition in given:
            if partition not in self._selection:
                raise LineageError(
                    "start names this partition, which is not selected",
                    feed=self.feed,
                    partition=partition,
                )
            if partition not in graph and not graph.heirs.get(partition):
                raise LineageError(
                    "start names this partition, but the feed lists neither it nor an heir of it",
                    feed=self.feed,
                    partition=partition,
                )
        for partition in given:
            self._add(partition, Position(given[partition]))
        for listed in graph:
            if listed.id in given or any(
                a in given or a in self._selection.others for a in listed.cursor_from
            ):
                continue  # its cursor is given, or stored under an ancestor's id
            # History that was redistributed is on the heirs, all of it: reading the ancestor too would bring it twice.
            replaced = listed.id in graph.heirs
            self._add(
                listed.id,
                Position(FIRST, "superseded") if replaced else self._birth_position(listed, ends),
            )

    def _birth_position(self, partition: Partition, ends: Mapping[int, str]) -> Position:
        if self.start != "last":
            return Position(FIRST)
        if partition.closed:
            return Position(partition.last_cursor or LAST, "drained")
        return Position(ends.get(partition.id) or partition.last_cursor or LAST)

    def _one_save(self, actions: list[Action]) -> list[Action]:
        born = {}
        for entry in self.entries.values():
            if entry.position is not None:
                entry.position = born[entry.id] = Position(
                    entry.position.cursor, entry.position.status
                )
        return [
            *([Save(born)] if born else []),
            *(action for action in actions if not isinstance(action, Save)),
        ]

    # ------------------------------------------------------------------ vanished partitions (R11) and cursor transfer (R9)

    def _vanish(self) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if entry.id in self.graph or not (entry.running or entry.state is State.WAITING):
                continue
            if entry.running:
                actions.append(Stop(entry.id))
            self._move(entry, State.VANISHED)
            if entry.position is not None and entry.id not in self.graph.heirs:
                actions.append(
                    Report(
                        entry.id,
                        f"is no longer listed and has no heir: it stops at its cursor {entry.cursor!r}",
                    )
                )
        return actions

    def _take_over(self) -> list[Action]:
        """Give each heir without a position the cursor of its ancestor; heirs and superseded ancestors in one save.

        While the application holds a batch of an ancestor its heirs wait: what it commits next is the cursor to take over.
        """
        heirs = [p for p in self.graph if p.cursor_from and self._entry(p.id).position is None]
        busy = self._busy_ancestors(heirs)
        if busy:
            in_hand = tuple(sorted(busy & self._in_hand))
            for heir in heirs:
                if not busy.isdisjoint(heir.cursor_from):
                    self._wait(self._entry(heir.id), in_hand)
            heirs = [heir for heir in heirs if busy.isdisjoint(heir.cursor_from)]
        actions: list[Action] = []
        positions: dict[int, Position] = {}
        for heir in heirs:
            try:
                positions |= self._inherit(heir)
            except LineageError as error:
                actions += [*self.fail(heir.id, error), Fail(heir.id, error)]
        for partition, position in positions.items():
            entry = self._entry(partition)
            entry.position = position
            if position.status == "superseded":
                actions += [Stop(partition)] if entry.running else []
                self._move(entry, State.SUPERSEDED)
        if positions:
            actions.append(Save(positions))
        for heir in heirs:
            actions += self._consider(heir)
        return actions

    def _busy_ancestors(self, heirs: list[Partition]) -> set[int]:
        """Those in the application's hands, and those whose heirs wait for these: they hand over together."""
        busy = {a for heir in heirs for a in heir.cursor_from if a in self._in_hand}
        found = busy
        while found:
            waiting = [heir for heir in heirs if not found.isdisjoint(heir.cursor_from)]
            found = {
                a
                for heir in waiting
                for a in heir.cursor_from
                if a in self.entries and self.entries[a].live
            } - busy
            busy |= found
        return busy

    def _inherit(self, heir: Partition) -> dict[int, Position]:
        """What is to be saved for the heir and its ancestors; nothing when it starts at the beginning. Raises where only an operator can tell."""
        self._selection.check_ancestors(heir, feed=self.feed)
        known = [
            self.entries[a]
            for a in heir.cursor_from
            if a in self.entries and self.entries[a].position is not None
        ]
        parked = next((e for e in known if e.state is State.PARKED and e.error), None)
        if parked is not None and parked.error is not None:
            self.fail(heir.id, parked.error)
            return {}
        live = [e for e in known if e.live]
        if len({e.cursor for e in live}) > 1:
            stand = ", ".join(f"{e.id} at {e.cursor!r}" for e in live)
            raise AmbiguousLineageError(
                f"may take its cursor from several ancestors that stand at different ones: {stand}. Set its cursor by hand",
                feed=self.feed,
                partition=heir.id,
            )
        positions = {e.id: e.position for e in known} | self._selection.others
        nearest = next((positions[a] for a in heir.cursor_from if a in positions), None)
        if nearest is None:
            self._check_lost(heir)
            return {}
        # A late heir finds its ancestor superseded by others: the cursor is as valid here.
        superseded = {e.id: e.position.advance(status="superseded") for e in live if e.position}
        return {heir.id: Position(live[0].cursor if live else nearest.cursor), **superseded}

    def _check_lost(self, heir: Partition) -> None:
        lost = [
            e.id
            for e in self.entries.values()
            if e.state is State.VANISHED and e.position is not None and e.id not in self.graph.heirs
        ]
        if lost:
            raise LostPartitionError(
                f"has no ancestor with a position, while {names(lost)} had one and vanished without an heir: "
                "its history may hold what was read before. Set its cursor by hand",
                feed=self.feed,
                partition=heir.id,
            )

    # ------------------------------------------------------------------ scheduling (R4, R6, R8)

    def _consider(self, partition: Partition) -> list[Action]:
        """Start the listed partition, or say what it waits for."""
        entry = self._entry(partition.id)
        if entry.state in (State.PARKED, State.SUPERSEDED) or (
            entry.state is State.DRAINED and partition.closed
        ):
            return []
        if entry.running:
            return self._settle(entry) or self._ask_again(entry)
        if entry.position is None and any(a in self._in_hand for a in entry.waits_for):
            return []  # the ancestor's batch decides where it starts
        try:
            blockers = self._blockers(partition, entry)
        except LineageError as error:
            return [*self.fail(partition.id, error), Fail(partition.id, error)]
        self._wait(entry, blockers)
        if blockers:
            return self._stay_behind(entry)
        entry.end, entry.warned = None, False
        self._move(entry, State.READING)
        return self._settle(entry) or [Start(partition.id, entry.cursor)]

    def _ask_again(self, entry: Entry) -> list[Action]:
        """A caught up partition was closed: one more request tells whether that was the end (R6)."""
        if entry.state is not State.CAUGHT_UP or not self.is_closed(entry.id):
            return []
        self._move(entry, State.READING)
        return [Start(entry.id, entry.cursor)]

    def _blockers(self, partition: Partition, entry: Entry) -> tuple[int, ...]:
        parent = partition.starts_after
        if parent is not None and parent not in self.graph:
            before = self.entries.get(parent)
            if before.state is not State.DRAINED if before else entry.position is None:
                raise LostPartitionError(
                    f"starts after partition {parent}, which is no longer listed and was never read to its end. Set the cursor of both by hand",
                    feed=self.feed,
                    partition=partition.id,
                )
            return ()
        if not self.ordered:
            return ()
        if parent is not None:
            return () if self._is_drained(parent) else (parent,)
        return (
            self._inherited_blockers(partition)
            if partition.cursor_from and entry.cursor == FIRST
            else ()
        )

    def _inherited_blockers(self, heir: Partition) -> tuple[int, ...]:
        """What an heir that starts at the beginning waits for.

        Its ancestor may itself have started after a partition that is not drained yet. While the ancestor was seen listed, its parent is known. After a
        restart it is not, and then every closed partition may have been that parent, but for those that descend from this heir or a later one: with a
        smaller id as the mark of the earlier heir no two ever wait for each other.
        """
        parents: Iterable[int] = [self._parents[a] for a in heir.cursor_from if a in self._parents]
        if not parents:
            parents = [p.id for p in self.graph if p.closed and self._may_precede(p, heir)]
        return tuple(
            p for p in parents if p in self.graph and p != heir.id and not self._is_drained(p)
        )

    def _may_precede(self, partition: Partition, heir: Partition) -> bool:
        while not partition.cursor_from and partition.starts_after in self.graph.partitions:
            partition = self.graph.partitions[partition.starts_after]
        return not partition.cursor_from or partition.id < heir.id

    def _stay_behind(self, entry: Entry) -> list[Action]:
        """The partition waits: park it behind a parked one, warn of one that will not end by itself."""
        self._move(entry, State.WAITING)
        blockers = [self.entries[b] for b in entry.waits_for if b in self.entries]
        parked = next((b for b in blockers if b.state is State.PARKED), None)
        if parked is not None and parked.error is not None:
            return self.fail(entry.id, parked.error)
        still_open = [b for b in entry.waits_for if not self.is_closed(b)]
        if not still_open or entry.warned:
            return []
        entry.warned = True
        return [
            Report(
                entry.id,
                f"waits for {names(still_open)}, which the publisher lists as open: a parent has to be closed",
            )
        ]

    def _settle(self, entry: Entry) -> list[Action]:
        """Drained, if the committed cursor is the closed partition's end (R6); then its children may start."""
        if not entry.running or entry.id in self._in_hand:
            return []
        if not self._is_end(entry, entry.cursor):
            return self._uncommitted_end(entry)
        actions: list[Action] = [Stop(entry.id)]
        if entry.position is None or entry.position.status != "drained":
            entry.position = self.checkpoint(entry.id, entry.cursor)
            actions.append(Save({entry.id: entry.position}))
        self._move(entry, State.DRAINED)
        for partition in sorted(self._waiters.pop(entry.id, ())):
            if partition in self.graph and self.entries[partition].state is State.WAITING:
                actions += self._consider(self.graph.partitions[partition])
        return [*actions, Rediscover()]

    def _uncommitted_end(self, entry: Entry) -> list[Action]:
        """Warn of children that wait for a commit which the application may have forgotten."""
        waiting = [
            p for p in self._waiters.get(entry.id, ()) if self.entries[p].state is State.WAITING
        ]
        if entry.end is None or entry.warned or not waiting:
            return []
        entry.warned = True
        return [
            Report(
                entry.id,
                f"was read to its end, which is not committed: {names(waiting)} can't start before it is",
            )
        ]

    def _is_end(self, entry: Entry, cursor: str) -> bool:
        return self.is_closed(entry.id) and cursor in (
            self.graph.partitions[entry.id].last_cursor,
            entry.end,
        )

    def _is_drained(self, partition: int) -> bool:
        return partition in self.entries and self.entries[partition].state is State.DRAINED

    # ------------------------------------------------------------------ bookkeeping

    def _add(self, partition: int, position: Position) -> None:
        entry = self._entry(partition)
        entry.position = position
        self._move(entry, _RESTING.get(position.status, State.WAITING))

    def _entry(self, partition: int) -> Entry:
        if partition not in self.entries:
            self.entries[partition] = Entry(partition)
            self._counts[State.WAITING] += 1
        return self.entries[partition]

    def _move(self, entry: Entry, state: State) -> None:
        """Change the state of a partition; the only place where that happens."""
        if state is entry.state:
            return
        check_transition(entry.id, entry.state, state)
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        entry.state = state

    def _wait(self, entry: Entry, blockers: tuple[int, ...]) -> None:
        entry.waits_for = blockers
        for blocker in blockers:
            self._waiters[blocker].add(entry.id)


_RESTING: dict[str, State] = {"drained": State.DRAINED, "superseded": State.SUPERSEDED}
