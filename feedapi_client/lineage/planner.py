"""State and input in, actions out: which partition is read from where, and what is saved when.

The planner implements rules R4 to R12. It does no I/O and has no clock. A driver (the async
consumer, the Spark source) tells it what happened, and carries out the actions that it returns in
their order. An action that fails ends the driver's session; the next session starts again from the
store.

The states of a partition and the legal transitions between them are in `transitions.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from feedapi_client.errors import FeedError
from feedapi_client.lineage.actions import Action, Fail, Rediscover, Report, Save, Start, Stop
from feedapi_client.lineage.bootstrap import (
    StartAt,
    asks_for_end,
    checked_start,
    first_positions,
)
from feedapi_client.lineage.entries import Entries
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.flow import Flow
from feedapi_client.lineage.graph import Graph, validate
from feedapi_client.lineage.missing_edges import checked_lineage
from feedapi_client.lineage.order import preceding
from feedapi_client.lineage.ownership import Ownership
from feedapi_client.lineage.partition_names import names
from feedapi_client.lineage.publisher_edges import PublisherEdges
from feedapi_client.lineage.rollback import why_listed_again
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, FeedInfo, Position
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


class Planner:
    """Decides which partitions of one feed are read, in which order, and what is saved.

    Not thread-safe: a driver calls it from one task at a time.

    Attributes:
        entries: what is known of each partition, to be read only.
    """

    def __init__(
        self,
        *,
        feed: str,
        start: StartAt = "first",
        ordered: bool = True,
        partitions: Iterable[int] | None = None,
        lineage: Mapping[int, int | None] | None = None,
        selects_events: bool = False,
        shared: bool = False,
    ) -> None:
        """Create a planner without any partition.

        Arguments:
            feed: the feed's URL, for messages.
            start: where partitions of the first discovery of an empty store begin.
            ordered: whether a child waits until its parent is drained.
            partitions: the partitions to read; None for all. Only these are started and saved.
                Order and cursor transfer are kept among them. A parent that is not selected is
                not waited for, and the stored positions of others stay as they are.
            lineage: the parent of each child whose edge the publisher leaves out; None for a child
                that comes after nobody.
            selects_events: whether the consumer reads a selection of the events (filters, event
                types). Cursors of a selection are not comparable with `Partition.last_cursor`.
            shared: whether several instances read the feed: only what `refresh` names as owned is
                started.

        Raises:
            ValueError: another `start`, or `partitions` or `lineage` that hold no ids.
        """
        self.feed = feed
        self.start: StartAt = checked_start(start)
        self.ordered = ordered
        self._selection = Selection(partitions)
        self._edges = PublisherEdges(checked_lineage(lineage), ordered=ordered, feed=feed)
        self._selects_events = selects_events
        self._known: set[int] = set()  # every partition that was ever stored or listed
        self._first_start = True
        self._listed_again: set[int] = set()  # open, although they were over (R11)
        self._table = Entries()
        self.entries = self._table.all
        self._ownership = Ownership(self._table, shared=shared)
        self._flow = Flow(
            feed=feed,
            ordered=ordered,
            selects_events=selects_events,
            selection=self._selection,
            ownership=self._ownership,
            table=self._table,
        )

    def __repr__(self) -> str:
        return f"<Planner of {self.feed}: {self._table!r}>"

    @property
    def graph(self) -> Graph:
        """The partitions of the last discovery that are selected."""
        return self._flow.graph

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
            self._table.add(partition, position)

    def select(self, partitions: Iterable[int]) -> None:
        """Add partitions to the selection, to be started by the next discovery.

        Without a selection all partitions are read anyway, and this does nothing.
        """
        for partition, position in self._selection.add(partitions).items():
            self._first_start = False
            self._table.add(partition, position)

    def unresolved(self, info: FeedInfo) -> list[int]:
        """Return the partitions whose present end the driver has to find out.

        The driver asks for it with a fetch of ``_last`` and gives it to `discover` as `ends`. A
        stored ``_last`` would mean another place after each start, so what is saved at the first
        start has to be a real cursor.
        """
        if not self._first_start:
            return []
        return [
            p.id
            for p in info.partitions.values()
            if p.id in self._selection
            and asks_for_end(p, self.start, selects_events=self._selects_events)
        ]

    def discover(
        self,
        info: FeedInfo,
        *,
        ends: Mapping[int, str] | None = None,
        earlier: bool = False,
    ) -> list[Action]:
        """Take a discovery. As the first one of an empty store counts one that lists partitions.

        Arguments:
            info: what was discovered.
            ends: the present ends of the partitions that `unresolved` named.
            earlier: whether it was made by an earlier driver. It may lack partitions that
                `lineage` names.

        Raises:
            LineageError: the partitions make no graph (R12), a selected partition was never listed,
                `start` names one that is not there, or `lineage` contradicts the publisher or
                makes a cycle. Everything stays as it was.
        """
        if self._first_start and not info.partitions:
            return []  # a publisher that starts: the first discovery that lists any counts (R7)
        known = None if earlier else self._known
        edges = self._edges.added(info, known=known, begun=self._begun)
        info = edges.info
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
                self._table.add(partition, position)
                self.entries[partition].decide(position)
        self._first_start = False
        self._selection.note(info)
        self._flow.graph = graph
        self._flow.parents |= {p.id: p.starts_after for p in graph if p.starts_after is not None}
        for ancestor, successors in graph.successors.items():
            self._flow.successors[ancestor].update(successors)
        previous = None if first_start else self._known
        at_end = first_start and self.start == "last"
        actions: list[Action] = [
            Report(None, text)
            for text in self._edges.reports(edges, previous, self._drained, at_end=at_end)
        ]
        self._known.update(info.partitions)
        over = self._table.counts[State.DRAINED]
        self._ownership.look_again(self._flow.without_position())
        actions += self._stop_unlisted() + self._flow.transfer_cursors()
        for listed in graph:
            actions += self._flow.start_or_wait(listed)
        # One that was drained is being read already.
        if self._listed_again or over or self._table.counts[State.SUPERSEDED]:
            self._listed_again = self._flow.listed_again()
        return self._in_one_save(actions) if first_start else actions

    def checkpoint(self, partition: int, cursor: str, *, after: Position | None = None) -> Position:
        """Return the position that a commit of `cursor` has to save.

        Changes nothing, so that a commit that was rolled back can be made again (R5).

        Arguments:
            partition: the partition of the batch.
            cursor: the batch's cursor.
            after: the position saved before it, when that is later than the last released one.
        """
        return self._flow.checkpoint(partition, cursor, after=after)

    def delivered(self, partition: int) -> None:
        """Note that a batch of the partition was delivered to the application."""
        self.hold(partition)
        self.progressed(partition)

    def hold(self, partition: int) -> None:
        """Block lineage changes to the partition's position until `released` is called.

        For a batch that was released before, and is committed late.
        """
        self._flow.in_flight.add(partition)

    def released(self, partition: int, position: Position | None = None) -> list[Action]:
        """Note that the application has finished with the batch in flight.

        `position` is what its commit saved; None when it was not committed.
        """
        entry = self.entries[partition]
        self._flow.in_flight.discard(partition)
        if position is not None:
            entry.position = position
            self._ownership.saved({partition: position})
        actions = self._flow.transfer_cursors() if self.graph.successors.get(partition) else []
        return actions + self._flow.drain_if_at_end(entry)

    def committed(self, partition: int, position: Position) -> None:
        """Note what was saved of a partition whose later batches are in flight.

        Lineage changes to the position stay blocked until `released`.
        """
        self.entries[partition].position = position
        self._ownership.saved({partition: position})

    def progressed(self, partition: int) -> None:
        """Note that a response brought something new: a caught up partition is read again."""
        entry = self.entries[partition]
        if entry.state is State.CAUGHT_UP:
            self._table.move(entry, State.READING)

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
            self._table.move(entry, State.CAUGHT_UP)
        elif asked_closed and cursor == (self._flow.last_cursor(partition) or cursor):
            entry.end = cursor
            return self._flow.drain_if_at_end(entry)
        return []

    def reopened(self, partition: int) -> list[Action]:
        """Note that a drained partition holds more than the answers said that showed its end (R6).

        It is read on. Its children that were started meanwhile go on, too.
        """
        entry = self.entries[partition]
        if entry.state is not State.DRAINED or entry.position is None:
            return []
        entry.end, entry.warned = None, False
        save = Save({partition: entry.decide(entry.position.advance(status="open"))})
        if partition not in self._ownership:
            self._table.move(entry, State.ELSEWHERE)
            return [save]
        self._table.move(entry, State.READING)
        return [save, Start(partition, entry.cursor)]

    def fail(self, partition: int, error: FeedError) -> list[Action]:
        """Park a partition that can't go on, and all that descend from it (R18)."""
        return self._flow.fail(partition, error)

    # ------------------------------------------------------------------ several instances

    def refresh(
        self,
        positions: Mapping[int, Position],
        *,
        owned: Iterable[int] | None = None,
        others: Collection[int] | None = None,
        ended: Collection[int] | None = None,
        began: int | None = None,
        looked: int | None = None,
    ) -> list[Action]:
        """Take the stored positions again, as other instances have changed them.

        The positions of partitions that were owned before are left as they are: nobody else saves
        them. Those of newly owned ones have to be loaded after the claim.

        Arguments:
            positions: all stored positions.
            owned: the partitions that may be read, `revoke` has taken away those that may not any
                more. None: as before.
            others: those that other living instances hold. None: as before.
            ended: those that were read to their end (without `follow`). None: as before.
            began: what `begin_load` returned before the positions were loaded. A partition whose
                save was refused since waits for the next load, and what this instance saved since
                is kept. None: nothing has happened since.
            looked: what `begin_load` returned before the leases were looked at, of which `others`
                come. They decide nothing that a discovery has asked for since. None: nothing was.
        """
        selected = self._selection.load(positions)
        self._known.update(positions)
        self._first_start = self._first_start and not selected
        changed, over = self._ownership.take(
            selected,
            self.graph,
            owned=owned,
            others=others,
            ended=ended,
            began=began,
            looked=looked,
            in_flight=self._flow.in_flight,
        )
        actions = self._flow.transfer_cursors()
        for listed in self.graph:
            entry = self._table[listed.id]
            # Whether the others can be read has not changed, of up to 32,768 partitions.
            if entry.state is State.WAITING or (listed.id in changed and not entry.running):
                actions += self._flow.start_or_wait(listed)
        # What another instance drained or transferred may have successors that are not known yet.
        return [*actions, Rediscover()] if over else actions

    def revoke(self, partitions: Iterable[int]) -> list[Action]:
        """Stop partitions whose lease is given away or lost. A batch in flight stays in flight."""
        return self._ownership.revoke(partitions)

    def refused(self, partitions: Iterable[int]) -> list[Action]:
        """Note that a save of these was refused: the next `refresh` takes what is stored."""
        return self._ownership.refused(list(partitions))

    def overtaken(self, stored: Mapping[int, Position], began: int) -> set[int]:
        """Return the owned partitions whose loaded position is newer than any that was saved here.

        `began`: what `begin_load` returned before the load.
        """
        return self._ownership.overtaken(stored, began)

    @property
    def looks_again(self) -> bool:
        """Whether a decision waits for the next `refresh` with the leases of others."""
        return self._ownership.shared and self._ownership.others is None

    def begin_load(self) -> int:
        """Return the present moment, for the `refresh` with what is loaded from now on."""
        return self._ownership.begin_load()

    def saved(self, positions: Mapping[int, Position]) -> None:
        """Note that the positions of a `Save` are stored."""
        self._ownership.saved(positions)

    def leasable(self) -> list[tuple[int, ...]]:
        """Return the groups of partitions to lease: what can be read, or has to be transferred.

        A partition can be in several groups.
        """
        return self._ownership.leasable(self._flow.without_position())

    def parked(self) -> set[int]:
        """Return the owned partitions that are parked: nobody else is to fail at them, too."""
        return self._ownership.parked()

    # ------------------------------------------------------------------ views

    @property
    def starts_first(self) -> bool:
        """Whether the next discovery that lists partitions is the consumer's first start (R7)."""
        return self._first_start

    @property
    def selected(self) -> frozenset[int] | None:
        """The partitions to read, those that `select` added included; None for all."""
        chosen = self._selection.chosen
        return None if chosen is None else frozenset(chosen)

    def is_closed(self, partition: int) -> bool:
        """Return whether the last discovery listed the partition as closed."""
        return self._flow.is_closed(partition)

    def preceding(self, partition: int) -> list[int]:
        """Return the partitions that come before a listed one, drained or not."""
        at_first = self._table[partition].cursor == FIRST
        return preceding(
            self.graph.partitions[partition], self.graph, self._flow.parents, at_first=at_first
        )

    def runnable(self) -> dict[int, str]:
        """Return the partitions that may be read now, with the committed cursor of each."""
        return {e.id: e.cursor for e in self.entries.values() if e.running}

    def listed_again(self) -> dict[int, str]:
        """Return the partitions that were over and are listed as open again, and what that means.

        The publisher may have been rolled back after a split (R11), or a discovery lags. Nothing
        of a superseded one is read.
        """
        again = {p: self._table[p].position for p in sorted(self._listed_again)}
        return {
            p: why_listed_again(position.status)
            for p, position in again.items()
            if position is not None and position.status != "open"
        }

    def finished(self) -> bool:
        """Return whether every partition was read to its end and no batch is in flight.

        Partitions that still wait count as finished where what they wait for will not come: a
        parent that is at its end and open (R8). One that waits for a cursor to be transferred does
        not: an instance that gets the lease of its ancestor will do that (R9).
        """
        if self._table.counts[State.READING] or self._flow.in_flight:
            return False
        return not self.unfinished_elsewhere()

    def unfinished_elsewhere(self) -> bool:
        """Return whether something is left to do that another instance may do."""
        if self._ownership.unfinished_elsewhere(self.is_closed):
            return True
        if not self._ownership.shared or not self.graph.successors:
            return False  # at once: this is asked before each wait
        return self._ownership.awaits_transfer(self._flow.without_position())

    # ------------------------------------------------------------------ discovery (R7, R9, R11)

    def _in_one_save(self, actions: list[Action]) -> list[Action]:
        """Merge the saves of a first start: each position is saved once, as its first revision."""
        positions = {}
        for entry in self.entries.values():
            if entry.position is not None:
                first = Position(entry.position.cursor, entry.position.status)
                positions[entry.id] = entry.decide(first)
        others: list[Action] = [action for action in actions if not isinstance(action, Save)]
        return [Save(positions), *others] if positions else others

    def _begun(self) -> set[int]:
        """Return the partitions that are read, or that have a position behind their beginning."""
        begun = {
            entry.id
            for entry in self.entries.values()
            if entry.running or (entry.position is not None and entry.position != Position(FIRST))
        }
        if self._first_start and isinstance(self.start, Mapping):
            begun.update(self.start)
        return begun

    def _drained(self) -> set[int]:
        return {entry.id for entry in self.entries.values() if entry.state is State.DRAINED}

    def _stop_unlisted(self) -> list[Action]:
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if entry.id in self.graph or not (
                entry.running or entry.state in (State.WAITING, State.ELSEWHERE)
            ):
                continue
            if entry.running:
                actions.append(Stop(entry.id))
            self._table.move(entry, State.VANISHED)
            # What another instance reads may be newer than this discovery.
            mine = entry.id in self._ownership
            if mine and entry.position is not None and entry.id not in self.graph.successors:
                actions.append(Report(entry.id, self._why_unlisted(entry)))
        return actions

    def _why_unlisted(self, entry: Entry) -> str:
        """Return what to report of a partition that is gone, with a position and no successor."""
        stops = f"it stops at its cursor {shown(entry.cursor)}"
        elsewhere = self._selection.successors_left_out(entry.id)
        if not elsewhere:
            return f"is no longer listed and has no successor: {stops}"
        one = len(elsewhere) == 1
        return (
            f"is no longer listed, and {names(elsewhere)}, which may take its cursor, "
            f"{'is' if one else 'are'} not selected: {stops}. To read on, select "
            f"{'it' if one else 'them'}, too"
        )
