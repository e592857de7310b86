"""State and input in, actions out: which partition is read from where, and what is saved when.

The planner implements rules R4 to R12. It does no I/O and has no clock. A driver (the async
consumer, the Spark source) tells it what happened, and carries out the actions that it returns in
their order. An action that fails ends the driver's session; the next session starts again from the
store.

The states of a partition and the legal transitions between them are in `transitions.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from feedapi_client.errors import FeedError, LineageError
from feedapi_client.lineage.actions import Action, Fail, Rediscover, Report, Save, Start, Stop
from feedapi_client.lineage.bootstrap import StartAt, checked_start, first_positions
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph, validate
from feedapi_client.lineage.missing_edges import (
    checked_lineage,
    suspected_missing_edges,
    with_edges,
)
from feedapi_client.lineage.order import blockers, check_parent, preceding
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.text import names
from feedapi_client.lineage.transfer import (
    disputed_ancestors,
    transferred_positions,
    unreleased_ancestors,
)
from feedapi_client.lineage.transitions import State, check_transition
from feedapi_client.model import FIRST, FeedInfo, Partition, Position
from feedapi_client.protocol.cursors import shown

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

_STORED_STATE = {"drained": State.DRAINED, "superseded": State.SUPERSEDED}


class Planner:
    """Decides which partitions of one feed are read, in which order, and what is saved.

    Not thread-safe: a driver calls it from one task at a time.

    Attributes:
        entries: what is known of each partition, to be read only.
        graph: the partitions of the last discovery that are selected.
    """

    def __init__(
        self,
        *,
        feed: str,
        start: StartAt = "first",
        ordered: bool = True,
        partitions: Iterable[int] | None = None,
        lineage: Mapping[int, int] | None = None,
        selects_events: bool = False,
    ) -> None:
        """Create a planner without any partition.

        Arguments:
            feed: the feed's URL, for messages.
            start: where partitions of the first discovery of an empty store begin.
            ordered: whether a child waits until its parent is drained.
            partitions: the partitions to read; None for all. Only these are started and saved.
                Order and cursor transfer are kept among them. A parent that is not selected is
                not waited for, and the stored positions of others stay as they are.
            lineage: the parent of each child whose edge the publisher leaves out.
            selects_events: whether the consumer reads a selection of the events (filters, event
                types). Cursors of a selection are not comparable with `Partition.last_cursor`.

        Raises:
            ValueError: another `start`, or `partitions` or `lineage` that hold no ids.
        """
        self.feed = feed
        self.start: StartAt = checked_start(start)
        self.ordered = ordered
        self.entries: dict[int, Entry] = {}
        self.graph = Graph({})
        self._selection = Selection(partitions)
        self._lineage = checked_lineage(lineage)
        self._selects_events = selects_events
        self._known: set[int] = set()  # every partition that was ever stored or listed
        self._suspects: set[int] = set()  # closed partitions that were reported (R8)
        self._first_start = True
        self._counts: Counter[State] = Counter()
        self._in_flight: set[int] = set()
        self._waiters: dict[int, set[int]] = defaultdict(set)
        # Kept for partitions that are gone: their successors wait for what they waited for.
        self._parents: dict[int, int] = {}
        # Kept likewise: every successor that was ever listed, by its ancestors.
        self._successors: dict[int, set[int]] = defaultdict(set)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {state}" for state, n in self._counts.items() if n)
        return f"<Planner of {self.feed}: {counts or 'no partition yet'}>"

    # ------------------------------------------------------------------ inputs

    def load(self, positions: Mapping[int, Position]) -> None:
        """Take the stored positions. Call it once, before the first discovery.

        Without the position of any selected partition, the next discovery is the consumer's first
        start (R7).
        """
        selected = self._selection.load(positions)
        self._known.update(positions)
        self._first_start = not selected
        for partition, position in selected.items():
            self._add(partition, position)

    def select(self, partitions: Iterable[int]) -> None:
        """Add partitions to the selection, to be started by the next discovery.

        Without a selection all partitions are read anyway, and this does nothing.
        """
        for partition, position in self._selection.add(partitions).items():
            self._first_start = False
            self._add(partition, position)

    def unresolved(self, info: FeedInfo) -> list[int]:
        """Return the partitions whose present end the driver has to find out.

        The driver asks for it with a fetch of ``_last`` and gives it to `discover` as `ends`. A
        stored ``_last`` would mean another place after each start, so what is saved at the first
        start has to be a real cursor.
        """
        if not self._first_start or self.start != "last":
            return []
        return [
            p.id
            for p in info.partitions.values()
            if p.id in self._selection
            and not p.closed
            and (self._selects_events or p.last_cursor is None)
        ]

    def discover(
        self,
        info: FeedInfo,
        *,
        ends: Mapping[int, str] | None = None,
        earlier: bool = False,
    ) -> list[Action]:
        """Take a discovery.

        Arguments:
            info: what was discovered.
            ends: the present ends of the partitions that `unresolved` named.
            earlier: whether it was made by an earlier driver. It may lack partitions that
                `lineage` names.

        Raises:
            LineageError: the partitions make no graph (R12), a selected partition was never listed,
                `start` or `lineage` names one that is not there, or `lineage` contradicts the
                publisher. Everything stays as it was.
        """
        known = None if earlier else self._known
        info = with_edges(info, self._lineage, known=known, feed=self.feed)
        self._selection.check(info, self.entries, feed=self.feed)
        graph = validate(self._selection.narrow(info), feed=self.feed)
        first_start = self._first_start
        if first_start:
            positions = first_positions(
                graph,
                self.start,
                ends or {},
                self._selection,
                selects_events=self._selects_events,
                feed=self.feed,
            )
            for partition, position in positions.items():
                self._add(partition, position)
        self._first_start = False
        self.graph = graph
        self._parents |= {p.id: p.starts_after for p in graph if p.starts_after is not None}
        for ancestor, successors in graph.successors.items():
            self._successors[ancestor].update(successors)
        actions = self._report_missing_edges(info, first_start)
        self._known.update(info.partitions)
        actions += self._stop_unlisted() + self._transfer_cursors()
        for listed in graph:
            actions += self._start_or_wait(listed)
        return self._in_one_save(actions) if first_start else actions

    def checkpoint(self, partition: int, cursor: str, *, after: Position | None = None) -> Position:
        """Return the position that a commit of `cursor` has to save.

        Changes nothing, so that a commit that was rolled back can be made again (R5).

        Arguments:
            partition: the partition of the batch.
            cursor: the batch's cursor.
            after: the position saved before it, when that is later than the last released one.
        """
        entry = self.entries[partition]
        predecessor = after or entry.position
        return Position(
            cursor,
            "drained" if self._is_end(entry, cursor) else "open",
            predecessor.revision + 1 if predecessor else 1,
        )

    def delivered(self, partition: int) -> None:
        """Note that a batch of the partition was delivered to the application."""
        self.hold(partition)
        self.progressed(partition)

    def hold(self, partition: int) -> None:
        """Block lineage changes to the partition's position until `released` is called.

        For a batch that was released before, and is committed late.
        """
        self._in_flight.add(partition)

    def released(self, partition: int, position: Position | None = None) -> list[Action]:
        """Note that the application has finished with the batch in flight.

        `position` is what its commit saved; None when it was not committed.
        """
        entry = self.entries[partition]
        self._in_flight.discard(partition)
        if position is not None:
            entry.position = position
        actions = self._transfer_cursors() if self.graph.successors.get(partition) else []
        return actions + self._drain_if_at_end(entry)

    def progressed(self, partition: int) -> None:
        """Note that a response brought something new: a caught up partition is read again."""
        entry = self.entries[partition]
        if entry.state is State.CAUGHT_UP:
            self._move(entry, State.READING)

    def ended(self, partition: int, cursor: str, *, asked_closed: bool) -> list[Action]:
        """Note that a complete response held no event and ended on the `cursor` asked with.

        Call it once all that was read before is delivered. `asked_closed` says whether the
        discovery before the request listed the partition as closed. Only then is it the end of the
        partition (R6), if it is where discovery says that it ends. Otherwise an open partition is
        caught up, and one that was closed in the meantime is asked once more.
        """
        entry = self.entries[partition]
        if not entry.running:
            return []
        if not self.is_closed(partition):
            self._move(entry, State.CAUGHT_UP)
        elif asked_closed and cursor == (self._last_cursor(partition) or cursor):
            entry.end = cursor
            return self._drain_if_at_end(entry)
        return []

    def fail(self, partition: int, error: FeedError) -> list[Action]:
        """Park a partition that can't go on, and all that descend from it (R18)."""
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
            queue += self._waiting_for(entry)
        return actions

    # ------------------------------------------------------------------ views

    @property
    def selected(self) -> frozenset[int] | None:
        """The partitions to read, those that `select` added included; None for all."""
        chosen = self._selection.chosen
        return None if chosen is None else frozenset(chosen)

    def is_closed(self, partition: int) -> bool:
        """Return whether the last discovery listed the partition as closed."""
        listed = self.graph.partitions.get(partition)
        return listed is not None and listed.closed

    def preceding(self, partition: int) -> list[int]:
        """Return the partitions that come before a listed one, drained or not."""
        at_first = self._entry(partition).cursor == FIRST
        return preceding(
            self.graph.partitions[partition], self.graph, self._parents, at_first=at_first
        )

    def runnable(self) -> dict[int, str]:
        """Return the partitions that may be read now, with the committed cursor of each."""
        return {e.id: e.cursor for e in self.entries.values() if e.running}

    def finished(self) -> bool:
        """Return whether every partition was read to its end and no batch is in flight.

        Partitions that still wait count as finished: what they wait for will not come (R8).
        """
        return not self._counts[State.READING] and not self._in_flight

    # ------------------------------------------------------------------ discovery (R7, R9, R11)

    def _in_one_save(self, actions: list[Action]) -> list[Action]:
        """Merge the saves of a first start: each position is saved once, as its first revision."""
        positions = {}
        for entry in self.entries.values():
            if entry.position is not None:
                entry.position = Position(entry.position.cursor, entry.position.status)
                positions[entry.id] = entry.position
        others: list[Action] = [action for action in actions if not isinstance(action, Save)]
        return [Save(positions), *others] if positions else others

    def _report_missing_edges(self, info: FeedInfo, first_start: bool) -> list[Action]:
        """Report closed partitions without descendants beside new roots, each once (R8)."""
        if not self.ordered or (first_start and self.start == "last"):
            return []
        previous = None if first_start else self._known
        suspected = suspected_missing_edges(previous, info.partitions)
        if suspected is None or self._suspects.issuperset(suspected.parents):
            return []
        self._suspects.update(suspected.parents)
        return [Report(None, str(suspected))]

    def _stop_unlisted(self) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if entry.id in self.graph or not (entry.running or entry.state is State.WAITING):
                continue
            if entry.running:
                actions.append(Stop(entry.id))
            self._move(entry, State.VANISHED)
            if entry.position is not None and entry.id not in self.graph.successors:
                text = (
                    "is no longer listed and has no successor: it stops at its cursor "
                    f"{shown(entry.cursor)}"
                )
                actions.append(Report(entry.id, text))
        return actions

    def _transfer_cursors(self) -> list[Action]:
        """Give each successor without a position the cursor of its ancestor.

        The successors and the superseded ancestors are saved in one save. While a batch of an
        ancestor is in flight its successors wait, because its commit decides where they start.
        """
        successors = [p for p in self.graph if p.cursor_from and self._entry(p.id).position is None]
        blocked = unreleased_ancestors(successors, self.entries, self._in_flight)
        if blocked:
            in_flight = tuple(sorted(blocked & self._in_flight))
            for successor in successors:
                if not blocked.isdisjoint(successor.cursor_from):
                    self._wait_for(self._entry(successor.id), in_flight)
            successors = [s for s in successors if blocked.isdisjoint(s.cursor_from)]
        actions: list[Action] = []
        positions: dict[int, Position] = {}
        disputed = disputed_ancestors(successors, self.entries)
        for successor in successors:
            actions += self._transfer_to(successor, positions, disputed)
        for partition, position in positions.items():
            entry = self._entry(partition)
            entry.position = position
            if position.status == "superseded" and entry.state is not State.PARKED:
                actions += [Stop(partition)] if entry.running else []
                self._move(entry, State.SUPERSEDED)
        if positions:
            actions.append(Save(positions))
        for successor in successors:
            actions += self._start_or_wait(successor)
        return actions

    def _transfer_to(
        self, successor: Partition, positions: dict[int, Position], disputed: Mapping[int, int]
    ) -> list[Action]:
        """Add what the transfer saves to `positions`, or park the successor."""
        stored = [a for a in successor.cursor_from if a in self.entries]
        parked = self._parked(a for a in stored if self.entries[a].position is not None)
        if parked is not None:
            return self.fail(successor.id, parked)
        try:
            transferred = transferred_positions(
                successor, self.entries, self.graph, self._selection, disputed, feed=self.feed
            )
        except LineageError as error:
            return [*self.fail(successor.id, error), Fail(successor.id, error)]
        for partition, position in transferred.items():
            # A successor that is itself an ancestor of another one is superseded at once.
            if partition not in positions or position.status == "superseded":
                positions[partition] = position
        return []

    # ------------------------------------------------------------------ order (R4, R8)

    def _start_or_wait(self, partition: Partition) -> list[Action]:
        """Start the listed partition, or note what it waits for."""
        entry = self._entry(partition.id)
        if entry.position is None and entry.state is State.WAITING and self._is_outlived(entry):
            entry.position = Position(FIRST, "superseded")
            self._move(entry, State.SUPERSEDED)
            return [Save({entry.id: entry.position})]
        if entry.state in (State.PARKED, State.SUPERSEDED) or (
            entry.state is State.DRAINED and partition.closed
        ):
            return []
        if entry.running:
            return self._drain_if_at_end(entry) or self._ask_for_end(entry)
        if entry.position is None and not self._in_flight.isdisjoint(entry.waits_for):
            return []  # the commit of the ancestor's batch decides where it starts
        try:
            check_parent(partition, self.entries, self.graph, feed=self.feed)
        except LineageError as error:
            return [*self.fail(partition.id, error), Fail(partition.id, error)]
        waits_for: tuple[int, ...] = ()
        if self.ordered:
            waits_for = blockers(partition, self.entries, self.graph, self._parents)
        self._wait_for(entry, waits_for)
        if waits_for:
            return self._keep_waiting(entry)
        entry.end, entry.warned = None, False
        self._move(entry, State.READING)
        return self._drain_if_at_end(entry) or [Start(partition.id, entry.cursor)]

    def _keep_waiting(self, entry: Entry) -> list[Action]:
        """Keep a partition waiting: parked behind a parked one, reported behind an open one."""
        self._move(entry, State.WAITING)
        parked = self._parked(b for b in entry.waits_for if b in self.entries)
        if parked is not None:
            return self.fail(entry.id, parked)
        still_open = [b for b in entry.waits_for if not self.is_closed(b)]
        if not still_open or entry.warned:
            return []
        entry.warned = True
        text = (
            f"waits for {names(still_open)}, which the publisher lists as open: a parent has to "
            "be closed"
        )
        return [Report(entry.id, text)]

    def _is_outlived(self, entry: Entry) -> bool:
        """Whether a partition that nobody read was listed as an ancestor of one that is read (R9).

        Its events are in the successor. Only a discovery that lags still lists it.
        """
        successors = self._successors.get(entry.id, ())
        return any(self.entries[id].position is not None for id in successors)

    # ------------------------------------------------------------------ the end (R6)

    def _ask_for_end(self, entry: Entry) -> list[Action]:
        """Ask a caught up partition that was closed once more: was that the end?"""
        if entry.state is not State.CAUGHT_UP or not self.is_closed(entry.id):
            return []
        self._move(entry, State.READING)
        return [Start(entry.id, entry.cursor)]

    def _drain_if_at_end(self, entry: Entry) -> list[Action]:
        """Mark the partition as drained if its end is committed; then its children may start."""
        if not entry.running or entry.id in self._in_flight:
            return []
        if not self._is_end(entry, entry.cursor):
            return self._report_uncommitted_end(entry)
        actions: list[Action] = [Stop(entry.id)]
        if entry.position is None or entry.position.status != "drained":
            entry.position = self.checkpoint(entry.id, entry.cursor)
            actions.append(Save({entry.id: entry.position}))
        self._move(entry, State.DRAINED)
        for child in sorted(self._waiters.pop(entry.id, ())):
            if child in self.graph and self.entries[child].state is State.WAITING:
                actions += self._start_or_wait(self.graph.partitions[child])
        return [*actions, Rediscover()]

    def _report_uncommitted_end(self, entry: Entry) -> list[Action]:
        """Report children that wait for a commit which the application may have forgotten."""
        waiting = self._waiting_for(entry)
        if entry.end is None or entry.warned or not waiting:
            return []
        entry.warned = True
        text = (
            f"was read to its end, which is not committed: {names(waiting)} can't start before "
            "it is"
        )
        return [Report(entry.id, text)]

    def _is_end(self, entry: Entry, cursor: str) -> bool:
        end = self._last_cursor(entry.id) or entry.end
        return end is not None and cursor == end and self.is_closed(entry.id)

    def _last_cursor(self, partition: int) -> str | None:
        """Return the end that discovery lists for a closed partition; None where it gives none.

        What it lists is the end of all events, and means nothing to a selection of them.
        """
        listed = self.graph.partitions.get(partition)
        if self._selects_events or listed is None or not listed.closed:
            return None
        return listed.last_cursor

    # ------------------------------------------------------------------ entries

    def _add(self, partition: int, position: Position) -> None:
        entry = self._entry(partition)
        entry.position = position
        self._move(entry, _STORED_STATE.get(position.status, State.WAITING))

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

    def _wait_for(self, entry: Entry, blockers: tuple[int, ...]) -> None:
        entry.waits_for = blockers
        for blocker in blockers:
            self._waiters[blocker].add(entry.id)

    def _waiting_for(self, entry: Entry) -> list[int]:
        waiters = self._waiters.get(entry.id, ())
        return [id for id in waiters if self.entries[id].state is State.WAITING]

    def _parked(self, partitions: Iterable[int]) -> FeedError | None:
        """Return the error of the first of these partitions that is parked."""
        parked = (p for p in partitions if self.entries[p].state is State.PARKED)
        return next((self.entries[p].error for p in parked), None)
