"""What follows from a change: partitions start, wait, transfer their cursors, drain, are parked.

One change leads to others: a partition that is drained starts its children, of which one may be
at its end. The planner takes the inputs and asks this part for the actions. Rules R4, R6, R8, R9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from feedapi_client.errors import FeedError, LineageError
from feedapi_client.lineage.actions import Action, Fail, Rediscover, Report, Save, Start, Stop
from feedapi_client.lineage.entries import Entries
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.order import blockers, check_parent
from feedapi_client.lineage.ownership import Ownership
from feedapi_client.lineage.partition_names import names
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.transfer import (
    disputed_ancestors,
    transferred_positions,
    unreleased_ancestors,
)
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, Partition, Position


class Flow:
    """The partitions of one planner and what moves them on.

    Attributes:
        table: the state of each partition.
        graph: the partitions of the last discovery that are selected.
        in_flight: partitions whose batch the application has, or whose commit is under way.
        parents: kept for partitions that are gone: their successors wait for what they waited for.
        successors: kept likewise: every successor that was ever listed, by its ancestors.
    """

    def __init__(
        self,
        *,
        feed: str,
        ordered: bool,
        selects_events: bool,
        selection: Selection,
        ownership: Ownership,
        table: Entries,
    ) -> None:
        self.feed = feed
        self.ordered = ordered
        self.selects_events = selects_events
        self.selection = selection
        self.ownership = ownership
        self.table = table
        self.entries = table.all
        self.graph = Graph({})
        self.in_flight: set[int] = set()
        self.parents: dict[int, int] = {}
        self.successors: dict[int, set[int]] = defaultdict(set)
        self._blocked: set[int] = set()
        """Successors whose transfer had to wait when transfers were last decided."""

    # ------------------------------------------------------------------ order (R4, R8)

    def start_or_wait(self, partition: Partition) -> list[Action]:
        """Start the listed partition, or note what it waits for."""
        entry = self.table[partition.id]
        unread = entry.position is None and entry.state in (State.WAITING, State.ELSEWHERE)
        if unread and self._is_outlived(entry):
            save = Save({entry.id: entry.decide(Position(FIRST, "superseded"))})
            self.table.move(entry, State.SUPERSEDED)
            return [save]
        if entry.state in (State.PARKED, State.SUPERSEDED) or (
            entry.state is State.DRAINED and partition.closed
        ):
            return []
        if entry.running:
            return self.drain_if_at_end(entry) or self._ask_for_end(entry)
        if entry.position is None and self._awaits_transfer(partition, entry):
            return []  # the commit of the ancestor's batch decides where it starts
        try:
            others = self.selection.others
            check_parent(partition, self.entries, self.graph, others, feed=self.feed)
        except LineageError as error:
            return [*self.fail(partition.id, error), Fail(partition.id, error)]
        waits_for: tuple[int, ...] = ()
        if self.ordered:
            waits_for = blockers(partition, self.entries, self.graph, self.parents)
        self.table.wait_for(entry, waits_for)
        if waits_for:
            return self._keep_waiting(entry)
        if entry.id not in self.ownership:
            self.table.move(entry, State.ELSEWHERE)
            return []
        entry.end, entry.warned = None, False
        self.table.move(entry, State.READING)
        return self.drain_if_at_end(entry) or [Start(partition.id, entry.cursor)]

    def _awaits_transfer(self, partition: Partition, entry: Entry) -> bool:
        """Return whether an ancestor's commit or its owner decides where a successor starts.

        It may be an ancestor of another successor, which takes the same cursor in the same save.
        """
        if partition.id in self._blocked or not self.in_flight.isdisjoint(entry.waits_for):
            return True
        return bool(self.ownership.undecided([partition]))

    def _keep_waiting(self, entry: Entry) -> list[Action]:
        """Keep a partition waiting: parked behind a parked one, reported behind an open one."""
        self.table.move(entry, State.WAITING)
        parked = self.table.parked(b for b in entry.waits_for if b in self.entries)
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
        successors = self.successors.get(entry.id, ())
        return any(self.entries[id].position is not None for id in successors)

    def fail(self, partition: int, error: FeedError) -> list[Action]:
        """Park a partition that can't go on, and all that descend from it (R18)."""
        actions: list[Action] = []
        queue = [partition]
        while queue:
            entry = self.table[queue.pop()]
            if entry.state in (State.PARKED, State.DRAINED, State.SUPERSEDED):
                continue
            if entry.running:
                actions.append(Stop(entry.id))
            entry.error = error
            self.table.move(entry, State.PARKED)
            queue += self.table.waiting_for(entry)
        return actions

    # ------------------------------------------------------------------ cursor transfer (R9)

    def without_position(self) -> list[Partition]:
        """Return the listed successors that have no position yet, or not any more."""
        return [p for p in self.graph if p.cursor_from and self._takes_cursor(p)]

    def _takes_cursor(self, successor: Partition) -> bool:
        """Return whether the cursor of an ancestor is to be transferred to a listed successor.

        Also where that was done and taken back (R11): it is superseded, and an ancestor is not. In
        no other way does that come about, because whoever supersedes a partition supersedes its
        ancestors, too.
        """
        position = self.table[successor.id].position
        if position is None:
            return True
        if position.status != "superseded" or self._has_live(self.successors.get(successor.id, ())):
            return False
        return self._has_live(successor.cursor_from)

    def _has_live(self, partitions: Iterable[int]) -> bool:
        return any(p in self.entries and self.entries[p].live for p in partitions)

    def listed_again(self) -> set[int]:
        """Return the partitions that are over and listed as open (R11).

        A superseded one counts if none of those that may hold its cursor now is listed: a publisher
        may go on listing what it has split.
        """
        return {
            p.id
            for p in self.graph
            if not p.closed and self._is_over(p.id) and not self._has_listed_successor(p.id)
        }

    def _is_over(self, partition: int) -> bool:
        position = self.entries[partition].position
        return position is not None and position.status != "open"

    def _has_listed_successor(self, partition: int) -> bool:
        seen, waiting = {partition}, [partition]
        while waiting:
            successors = self.successors.get(waiting.pop(), set()) - seen
            if any(id in self.graph for id in successors):
                return True
            seen |= successors
            waiting += successors
        return False

    def transfer_cursors(self) -> list[Action]:
        """Give each successor without a position the cursor of its ancestor.

        The successors and the superseded ancestors are saved in one save. While a batch of an
        ancestor is in flight its successors wait, because its commit decides where they start.
        """
        successors = self.without_position()
        undecided = self.in_flight | self.ownership.undecided(successors)
        blocked = unreleased_ancestors(successors, self.entries, undecided)
        self._blocked = {s.id for s in successors if not blocked.isdisjoint(s.cursor_from)}
        if blocked:
            awaited = tuple(sorted(blocked & undecided))
            for successor in successors:
                if not blocked.isdisjoint(successor.cursor_from):
                    entry = self.table[successor.id]
                    self.table.wait_for(entry, awaited)
                    if entry.state is State.ELSEWHERE:
                        self.table.move(entry, State.WAITING)
            successors = [s for s in successors if s.id not in self._blocked]
        actions: list[Action] = []
        positions: dict[int, Position] = {}
        disputed = disputed_ancestors(successors, self.entries)
        for successor in successors:
            actions += self._transfer_to(successor, positions, disputed)
        for partition, position in positions.items():
            entry = self.table[partition]
            entry.decide(position)
            if position.status == "superseded" and entry.state is not State.PARKED:
                actions += [Stop(partition)] if entry.running else []
                self.table.move(entry, State.SUPERSEDED)
            elif entry.state is State.SUPERSEDED:
                self.table.move(entry, State.WAITING)
        if positions:
            actions.append(Save(positions))
        for successor in successors:
            actions += self.start_or_wait(successor)
        return actions

    def _transfer_to(
        self, successor: Partition, positions: dict[int, Position], disputed: Mapping[int, int]
    ) -> list[Action]:
        """Add what the transfer saves to `positions`, or park the successor."""
        stored = [a for a in successor.cursor_from if a in self.entries]
        parked = self.table.parked(a for a in stored if self.entries[a].position is not None)
        if parked is not None:
            return self.fail(successor.id, parked)
        try:
            transferred = transferred_positions(
                successor, self.entries, self.graph, self.selection, disputed, feed=self.feed
            )
        except LineageError as error:
            return [*self.fail(successor.id, error), Fail(successor.id, error)]
        reports = self._report_unknown_ancestors(successor)
        for partition, position in transferred.items():
            # A successor that is itself an ancestor of another one is superseded at once.
            if partition not in positions or position.status == "superseded":
                positions[partition] = position
        return reports

    def _report_unknown_ancestors(self, successor: Partition) -> list[Action]:
        """Report a successor that begins at its first event although the consumer is no new one.

        An ancestor that is known without a position was never read, and needs no report.
        """
        others = self.selection.others
        if any(a in self.entries or a in others for a in successor.cursor_from):
            return []
        if not others and all(entry.position is None for entry in self.entries.values()):
            return []
        text = (
            "begins at its first event: no position is stored for what it may take its cursor "
            f"from ({names(successor.cursor_from)}). Events that were read under another "
            "partition come again"
        )
        return [Report(successor.id, text)]

    # ------------------------------------------------------------------ the end (R6)

    def _ask_for_end(self, entry: Entry) -> list[Action]:
        """Ask a caught up partition that was closed once more: was that the end?"""
        if entry.state is not State.CAUGHT_UP or not self.is_closed(entry.id):
            return []
        self.table.move(entry, State.READING)
        return [Start(entry.id, entry.cursor)]

    def drain_if_at_end(self, entry: Entry) -> list[Action]:
        """Mark the partition as drained if its end is committed; then its children may start."""
        if not entry.running or entry.id in self.in_flight:
            return []
        if not self._is_end(entry, entry.cursor):
            return self._report_uncommitted_end(entry)
        actions: list[Action] = [Stop(entry.id)]
        if entry.position is None or entry.position.status != "drained":
            decided = entry.decide(self.checkpoint(entry.id, entry.cursor))
            actions.append(Save({entry.id: decided}))
        self.table.move(entry, State.DRAINED)
        for child in self.table.take_waiters(entry):
            if child in self.graph and self.entries[child].state is State.WAITING:
                actions += self.start_or_wait(self.graph.partitions[child])
        return [*actions, Rediscover()]

    def _report_uncommitted_end(self, entry: Entry) -> list[Action]:
        """Report children that wait for a commit which the application may have forgotten."""
        waiting = self.table.waiting_for(entry)
        if entry.end is None or entry.warned or not waiting:
            return []
        entry.warned = True
        text = (
            f"was read to its end, which is not committed: {names(waiting)} can't start before "
            "it is"
        )
        return [Report(entry.id, text)]

    def checkpoint(self, partition: int, cursor: str, *, after: Position | None = None) -> Position:
        """Return the position that a commit of `cursor` has to save, see `Planner.checkpoint`."""
        entry = self.entries[partition]
        predecessor = after or entry.position
        return Position(
            cursor,
            "drained" if self._is_end(entry, cursor) else "open",
            predecessor.revision + 1 if predecessor else 1,
        )

    def is_closed(self, partition: int) -> bool:
        """Return whether the last discovery listed the partition as closed."""
        listed = self.graph.partitions.get(partition)
        return listed is not None and listed.closed

    def last_cursor(self, partition: int) -> str | None:
        """Return the end that discovery lists for a closed partition; None where it gives none.

        What it lists is the end of all events, and means nothing to a selection of them.
        """
        listed = self.graph.partitions.get(partition)
        if self.selects_events or listed is None or not listed.closed:
            return None
        return listed.last_cursor

    def _is_end(self, entry: Entry, cursor: str) -> bool:
        end = self.last_cursor(entry.id) or entry.end
        return end is not None and cursor == end and self.is_closed(entry.id)
