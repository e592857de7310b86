"""Facts in, actions out: which partition is read from where, and what is saved when (R4 to R12).

Every input changes facts. Then `_settle` moves partitions to the state that `_desired` derives from
them, and collects what a driver has to do. To settle twice changes nothing. No clock, no I/O.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from feedapi_client import errors, model
from feedapi_client.errors import FeedError, LineageError
from feedapi_client.lineage import states
from feedapi_client.lineage.bootstrap import Begin, asks_for_end, first_positions
from feedapi_client.lineage.graph import Graph, PublisherEdges, comes_after
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.states import Action, Entry, Report, State, Stop, move_entry
from feedapi_client.model import FIRST, FeedInfo, Partition, Position, StartAt, Status
from feedapi_client.protocol.text import names, shown

_READING, _DRAINED = State.READING, State.DRAINED  # to look up a member of an enum takes long
_SHOWN = 8
_LISTED_AGAIN = (
    "is listed as open again, although {}. Was the publisher rolled back? Then stop the consumer, "
    "and let 'feedapi cursors restore' give the cursors back"
)
_OVER = {
    "superseded": "its successors took over its cursor: nothing of it is read",
    "drained": "it was closed and drained: it is read on from its end",
}
Because = tuple[int, ...] | FeedError  # what a partition waits for, or what parks it


class Planner:
    """Decides for one feed. `entries` is what is known of each partition, `graph` what is listed
    and selected. Not thread-safe. An action that fails ends the driver's session.
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
        """As `FeedConsumer`. If `shared`, only what `refresh` names as owned is started."""
        self.feed, self.ordered = feed, ordered
        self.start: StartAt = start
        self.entries: dict[int, Entry] = {}
        self.graph = Graph({})
        self.starts_first = True  # the next discovery that lists any is the first start (R7)
        self._selection = Selection(partitions, feed)
        self._edges = PublisherEdges(lineage, ordered=ordered, feed=feed)
        self._selects_events = selects_events
        # What an input leads to, and what the store holds of the partitions that it decides.
        self._actions: list[Action] = []
        self._rediscover = False
        self._before: dict[int, Position | None] = {}
        self._step = 0
        self._known: set[int] = set()  # every partition that was ever stored or listed
        self._parents: dict[int, int] = {}  # also of those that are gone
        self._successors: dict[int, set[int]] = defaultdict(set)  # every one that was ever listed
        self._in_flight: set[int] = set()  # a batch, or a commit under way
        self._listed_again: set[int] = set()  # open, although they were over (R11)
        self._in_doubt = False  # one discovery did not list what another partition waits for
        # The leases, and moments: one comes with each load or discovery that begins, and each save.
        self._shared = shared
        self._owned: set[int] = set()
        self._others: Collection[int] | None = None  # leases of living instances, once known
        self._ended: Collection[int] = frozenset()  # read to their end, without `follow`
        self._unsure: dict[int, int] = {}  # a save was refused then: memory is not the store
        self._moment = 0
        self._loaded = self._listed = 0  # when the newest load that was taken, and discovery, began
        self._asked = 0  # when the leases of others were last forgotten
        # Derived from the facts, to look at few partitions after a change of one.
        self._counts: Counter[State] = Counter()
        self._waiters: dict[int, set[int]] = defaultdict(set)
        # Closed and not split by their cursors, each with the successor it descends from, or -1.
        self._closed: list[tuple[int, int]] | None = None
        self._chains = False  # whether a partition may have to wait for another one
        self._heirs: list[Partition] = []  # listed successors without a cursor of their own
        self._missing: dict[int, int] = {}  # see `_vanished`

    def load(self, positions: Mapping[int, Position]) -> None:
        """Take the stored positions, once. Without any the next discovery is a first start (R7)."""
        for partition, position in self._take(positions).items():
            self._place(self._entry(partition), position)
        self._told(self.entries)

    def _take(self, positions: Mapping[int, Position]) -> Mapping[int, Position]:
        selected = self._selection.load(positions)
        self._known.update(positions)
        self.starts_first = self.starts_first and not selected
        return selected

    def unresolved(self, info: FeedInfo) -> list[int]:
        """Return whose present end the driver has to ask for, for `discover`."""
        listed = [p for p in info.partitions.values() if self.starts_first]
        selects = self._selects_events
        asked = [p.id for p in listed if asks_for_end(p, self.start, selects_events=selects)]
        return [id for id in asked if id in self._selection]

    def discover(
        self, info: FeedInfo, *, ends: Mapping[int, str] | None = None, began: int | None = None
    ) -> list[Action]:
        """Take what was asked for at the moment `began`. An error changes nothing (R7, R8, R12)."""
        first = self.starts_first
        if first and not info.partitions:
            return []  # a publisher that starts: the first discovery that lists any counts (R7)
        info = self._edges.added(info, known=self._known, begun=self._begun())
        self._selection.check(info, self.entries)
        graph = Graph(self._selection.narrow(info), feed=self.feed)
        if first:
            listed = () if self._selects_events else graph
            found = {p.id: p.last_cursor for p in listed if p.last_cursor is not None}
            found |= ends or {}
            begin = first_positions(graph, self.start, found, self._selection, feed=self.feed)
            for partition, (cursor, status) in begin.items():
                self._decide(self._entry(partition), cursor, status)
        self.graph, self.starts_first = graph, False
        self._listed = self.begin_load() if began is None else began
        self._selection.note(info)
        previous = None if first else self._known
        drained = (e.id for e in self.entries.values() if self._is_drained(e))
        self._actions += self._edges.reports(info, previous, drained)
        self._known.update(info.partitions)
        again = self._note_listed()
        self._settle(self._all())
        self._actions += [states.Start(e.id, e.cursor) for e in again if e.state is _READING]
        self._listed_again = {e.id for e in self.entries.values() if self._is_listed_again(e)}
        self._in_doubt = any(self._gone(b) == 1 for e in self.entries.values() for b in e.waits_for)
        self._rediscover |= self._in_doubt
        return self._told()

    def _note_listed(self) -> list[Entry]:
        """Change the facts that a discovery alone tells. Return whose end counts no more (R6)."""
        again: list[Entry] = []
        for listed in self.graph:
            entry = self._entry(listed.id)
            if entry.end is not None and (not listed.closed or entry.gone):
                entry.end = None
                again.append(entry)
            drained = entry.status == "drained" and self._is_mine(entry.id)
            entry.reopened |= drained and not self._is_drained(entry)
            if listed.starts_after is not None:
                self._parents[listed.id] = listed.starts_after
            for ancestor in listed.cursor_from:
                self._successors[ancestor].add(listed.id)
        for entry in self.entries.values():
            entry.gone = 0 if entry.id in self.graph else min(entry.gone + 1, 2)
        self._closed = None
        self._chains = self.ordered and (bool(self._parents) or any(p.closed for p in self.graph))
        self._look_for_heirs()
        unread = (a for a in self._awaiting() if not self._position_of(a))
        if self._shared and not self._owned.issuperset(unread):
            # Others may have begun to read that ancestor since their leases were looked at.
            self._others, self._asked = None, self.begin_load()
        return again

    def checkpoint(self, partition: int, cursor: str, *, after: Position | None = None) -> Position:
        """Return the position that a commit saves, `after` what was saved. May be called again."""
        entry = self.entries[partition]
        status: Status = "drained" if self._is_end(entry, cursor) else "open"
        return Position.after(after or entry.position, cursor, status)

    def delivered(self, partition: int) -> None:
        self.hold(partition)
        self.progressed(partition)

    def hold(self, partition: int) -> None:
        """Block lineage changes to the position until `released`: a batch is committed late."""
        self._in_flight.add(partition)

    def released(self, partition: int, position: Position | None = None) -> list[Action]:
        entry = self.entries[partition]
        before, ran = entry.state, entry.running
        self._in_flight.discard(partition)
        if position is not None:
            self.committed(partition, position)
        self._settle([partition])
        if entry.state is _DRAINED and before is not _DRAINED and not ran:
            drained = states.Drained(partition, entry.cursor)  # its lease went meanwhile
            self._actions.insert(0, drained)
        return self._told()

    def committed(self, partition: int, position: Position) -> None:
        """Note what was saved of a partition whose later batches are in flight."""
        entry = self.entries[partition]
        if entry.position is None or position.revision > entry.position.revision:
            self._place(entry, position)  # else another instance went on from it meanwhile
        self.saved({partition: position})

    def progressed(self, partition: int) -> None:
        """Note that a response brought something new: a caught up partition is read again."""
        entry = self.entries[partition]
        entry.caught_up, entry.end = False, None
        if entry.state is State.CAUGHT_UP:
            self._change(entry, _READING)

    def ended(self, partition: int, cursor: str, *, asked_closed: bool) -> list[Action]:
        """Note that a response was the end, once all before it is delivered."""
        entry = self.entries[partition]
        if not entry.running:
            return []
        if not self.is_closed(partition):
            entry.caught_up = True
        elif asked_closed and cursor == (self._last_cursor(partition) or cursor):
            entry.end = cursor  # what was closed after the request is asked once more (R6)
        return self._told([partition])

    def reopened(self, partition: int) -> list[Action]:
        """Note that an event came behind the end that empty answers had shown (R6)."""
        entry = self.entries[partition]
        if entry.state is not _DRAINED or entry.position is None:
            return []
        entry.end, entry.warned = None, False
        self._open_again(entry)
        return self._told([partition])

    def fail(self, partition: int, error: FeedError) -> list[Action]:
        entry = self._entry(partition)
        if entry.error is None and entry.state not in (_DRAINED, State.SUPERSEDED):
            entry.error = error
        return self._told([partition])

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
        """Take the positions that were loaded after the moment `began`, and after the claim of what
        is newly owned; the leases of other living instances, looked at after `looked`; and what is
        `ended` without `follow`. None is as before.
        """
        selected = self._take(positions)
        began = self.begin_load() if began is None else began
        if others is not None and (looked is None or looked > self._asked):
            self._others = others
        self._ended = self._ended if ended is None else ended
        late = {p: moment for p, moment in self._unsure.items() if moment > began}
        gained = set(owned or ()) - self._owned - late.keys()
        doubtful = gained | (self._unsure.keys() - late.keys())
        placed = {id for id, e in self.entries.items() if e.position is not None}
        kept = self._owned | late.keys() | (self._in_flight - doubtful)
        for partition in sorted({*selected, *doubtful, *placed} - kept):
            entry, stored = self._entry(partition), selected.get(partition)
            changed, doubted = stored != entry.position, partition in doubtful
            if entry.error is not None or not (changed or doubted):
                continue  # as nearly all
            if not doubted and self._is_outdated(entry, stored, began):
                continue
            if stored is None and entry.stored:
                self._lose_row(entry)
                continue
            # What another instance drained or transferred may have successors that are not known.
            known = (None, "open", entry.status, entry.state.value)
            self._rediscover |= (stored and stored.status) not in known
            self._place(entry, stored, loaded_at=self._moment if changed else entry.loaded_at)
            entry.end = None
        self._unsure = late
        self._loaded = max(self._loaded, began)
        self._owned |= gained
        self._look_for_heirs()
        return self._told(self._all())

    def revoke(self, partitions: Iterable[int]) -> list[Action]:
        """Stop partitions whose lease is given away or lost. A batch in flight stays in flight."""
        lost = sorted(self._owned.intersection(partitions))
        self._forget(lost)
        return self._told(lost)

    def refused(self, partitions: Iterable[int]) -> list[Action]:
        """Note that a save of these was refused: the next `refresh` takes what is stored."""
        refused = sorted(self._entry(partition).id for partition in partitions)
        self._forget(refused)
        self._unsure |= dict.fromkeys(refused, self.begin_load())
        return self._told(dict.fromkeys([*refused, *self.graph.partitions]))

    def _forget(self, partitions: Collection[int]) -> None:
        self._owned.difference_update(partitions)
        for partition in partitions:
            self.entries[partition].reopened = False

    def overtaken(self, stored: Mapping[int, Position], began: int) -> set[int]:
        """Return the owned ones that are stored otherwise than saved here."""
        found = set()
        for id in self._owned & stored.keys() - self._unsure.keys():
            entry, at = self.entries[id], stored[id]
            if entry.position and entry.saved_at < began and at.revision != entry.position.revision:
                # Another instance saves an end once more, to compare it before what follows it.
                compared = _place(at) == _place(entry.position) and at.status != "open"
                if not compared or at.revision < entry.position.revision:  # the store went back
                    found.add(id)
        return found

    @property
    def looks_again(self) -> bool:
        """Whether a decision waits for the next `refresh` with the leases of others."""
        return self._shared and self._others is None

    def begin_load(self) -> int:
        """Return the present moment, for what is loaded or discovered from now on."""
        self._moment += 1
        return self._moment

    def saved(self, positions: Mapping[int, Position]) -> None:
        """Note that these are stored: no older load overwrites them."""
        self._moment += 1
        for partition, position in positions.items():
            entry = self._entry(partition)
            if entry.position == position:
                entry.saved_at, entry.stored = self._moment, True

    def leasable(self) -> list[tuple[int, ...]]:
        """Return the groups to lease: what can be read, and ancestors that go to one successor."""
        groups = [self._live(successor.cursor_from) for successor in self._unplaced()]
        transferred = [group for group in groups if group and not any(e.error for e in group)]
        readable = [[e] for e in self.entries.values() if e.running or e.state is State.ELSEWHERE]
        return [tuple(e.id for e in group) for group in readable + transferred]

    def parked(self) -> set[int]:
        """Return the owned partitions that are parked: nobody else is to fail at them, too."""
        return {p for p in self._owned if self.entries[p].state is State.PARKED}

    @property
    def reads(self) -> bool:
        return self._counts[_READING] > 0

    def is_closed(self, partition: int) -> bool:
        listed = self.graph.partitions.get(partition)
        return listed is not None and listed.closed

    def doubted(self, partition: int) -> bool:
        """Return whether a partition is drained elsewhere than its listed `lastCursor` (R6)."""
        end = self._last_cursor(partition)
        entry = self.entries.get(partition)
        return entry is not None and entry.state is _DRAINED and end not in (None, entry.cursor)

    def preceding(self, partition: int) -> list[int]:
        """Return what comes before a listed partition. For a successor at the first event that is
        the parent of its ancestor, if ever listed. Else it may be any closed partition that was not
        split by cursor and does not descend from this successor, or from a later one (larger id).
        """
        listed = self.graph.partitions[partition]
        if listed.starts_after is not None:
            return [listed.starts_after]
        if not listed.cursor_from or self.entries[partition].cursor != FIRST:
            return []
        parents = [self._parents[a] for a in listed.cursor_from if a in self._parents]
        if not parents:
            if self._closed is None:
                self._closed = self._above_closed()
            parents = [id for id, above in self._closed if above < partition]
        return [p for p in parents if p != partition]

    def _above_closed(self) -> list[tuple[int, int]]:
        listed = self.graph.partitions
        tops: dict[int, int] = {}
        for partition in listed.values():
            chain = []
            while partition.id not in tops:
                chain.append(partition.id)
                if partition.starts_after not in listed:
                    break
                partition = listed[partition.starts_after]
            top = tops.get(partition.id, partition.id if partition.cursor_from else -1)
            tops.update(dict.fromkeys(chain, top))
        closed = [p.id for p in listed.values() if p.closed and p.id not in self._successors]
        return [(id, tops[id]) for id in closed if self.entries[id].status != "superseded"]

    def listed_again(self) -> dict[int, str]:
        """Return what was over and is listed as open again, and what that means (R11)."""
        again = [self.entries[p] for p in sorted(self._listed_again)]
        over = {e.id: "drained" if e.reopened else e.status for e in again}
        return {id: _LISTED_AGAIN.format(_OVER[at]) for id, at in over.items() if at in _OVER}

    def _is_listed_again(self, e: Entry) -> bool:
        # A publisher may go on listing what it has split: then one with its cursor is listed, too.
        over = e.reopened or e.status in ("drained", "superseded")
        if not over or e.id not in self.graph or self.is_closed(e.id):
            return False
        if e.status != "superseded":
            return True
        seen, waiting = {e.id}, [e.id]
        while waiting:
            successors = self._successors.get(waiting.pop(), set()) - seen
            if any(id in self.graph for id in successors):
                return False  # at once: all of a long chain may be listed
            seen |= successors
            waiting += successors
        return True

    def finished(self) -> bool:
        """Return whether all is read and committed. What waits for an open parent is (R8)."""
        doubt = self.reads or self._in_flight or self._in_doubt
        return not doubt and not self.unfinished_elsewhere()

    def unfinished_elsewhere(self) -> bool:
        # Of a closed partition the end is not enough: its children start when it is drained.
        if self._counts[State.ELSEWHERE]:
            elsewhere = (e.id for e in self.entries.values() if e.state is State.ELSEWHERE)
            if any(p not in self._ended or self.is_closed(p) for p in elsewhere):
                return True
        if not self._shared or not self.graph.successors:
            return False  # at once: this is asked before each wait
        return any(self._is_others(a) and not self._parked([a]) for a in self._awaiting())

    # ------------------------------------------------------------------ facts -> states -> actions

    def _desired(self, e: Entry) -> tuple[State, Because]:
        """Return the state that follows from the facts, and why. The first that holds counts."""
        listed = self.graph.partitions.get(e.id)
        if e.error is not None:
            return State.PARKED, e.error  # final for this session (R18)
        if e.id in self._unsure:
            return State.ELSEWHERE, ()  # what is read next is what is stored (R17)
        if e.status == "superseded":
            return State.SUPERSEDED, ()  # no discovery revives it (R9)
        if self._is_drained(e):
            return _DRAINED, ()  # also when it is no longer listed (R6)
        if listed is None:
            return (State.VANISHED if e.gone else State.WAITING), ()  # R11; not discovered yet
        if not e.running and (held := self._held_back(e, listed)) is not None:
            return held  # what is being read has passed this, and is not taken back
        if not self._is_mine(e.id):
            return State.ELSEWHERE, ()
        if listed.closed and e.id not in self._in_flight and self._is_end(e, e.cursor):
            return _DRAINED, ()  # the end is committed (R6)
        return (State.CAUGHT_UP if e.caught_up and not listed.closed else _READING), ()

    def _held_back(self, e: Entry, listed: Partition) -> tuple[State, Because] | None:
        """Return what keeps a listed partition from being started; None if nothing does."""
        if e.position is not None and not comes_after(listed):
            return None  # as nearly all partitions of a large feed
        if e.position is None and self._is_outlived(e.id):
            return State.SUPERSEDED, ()  # its events are in a successor that is read (R9)
        if e.position is None and listed.cursor_from:  # where it starts is not decided yet (R9)
            lost = self._parked(listed.cursor_from)
            return (State.PARKED, lost) if lost else (State.WAITING, self._awaited(listed))
        parent = listed.starts_after
        if parent is not None and parent not in self.graph and self._is_lost(parent, e):
            text = f"starts after partition {parent}, which is no longer listed and was never read "
            text += "to its end. Set the cursor of both by hand"
            error = errors.LostPartitionError(text, feed=self.feed, partition=e.id)
            return State.PARKED, error  # R8
        blockers = self._blockers(e.id) if self._chains else ()
        if not blockers:
            return None
        stopped = self._parked(blockers)  # descendants stop, too (R18); others wait (R4, R8)
        return (State.PARKED, stopped) if stopped else (State.WAITING, blockers)

    def _settle(self, dirty: Iterable[int]) -> None:
        """Move partitions, and what depends on them, to their states; first transfer cursors."""
        begun: list[Entry] = []
        queue, above_heirs = deque(dirty), self.graph.successors
        if self._heirs and any(id in above_heirs or self._is_heir(id) for id in queue):
            queue.extendleft(reversed(self._transfer()))
        while queue:
            e = self.entries[queue.popleft()]
            state, because = self._desired(e)
            stays = state is e.state and not because and not e.waits_for
            # Of one that stays only its end may still have to be saved, or told.
            if not stays or state is _DRAINED or e.end is not None or e.status == "drained":
                if self._chains and not e.running and (e.cursor == FIRST or e.waits_for):
                    begun.append(e)
                queue.extend(self._move(e, state, because))
        if begun:
            self._compare_ends(begun)

    def _told(self, dirty: Iterable[int] = ()) -> list[Action]:
        """Settle. Return what there is to do: stop, save all that was decided at once, go on."""
        self._settle(dirty)
        actions: list[Action] = [a for a in self._actions if type(a) is Stop]
        if self._before:
            decided = {id: p for id in self._before if (p := self.entries[id].position)}
            known = [(id, p) for id, p in self._before.items() if p is not None]
            unchanged = {id for id, p in known if _place(p) == _place(self.entries[id].position)}
            actions.append(states.Save(decided, unchanged))
        actions += [a for a in self._actions if type(a) is not Stop]
        actions += [states.Rediscover()] if self._rediscover else []
        self._actions, self._before, self._rediscover = [], {}, False
        return actions

    def _decide(self, e: Entry, cursor: str, status: Status = "open") -> None:
        """Change what is stored: all decisions of an input are one save, with one random step."""
        self._step = self._step if self._before else model.draw_step()
        before = self._before.setdefault(e.id, e.position)
        e.finished |= status == "superseded" and self._is_drained(e)
        e.position = model.position_after(before, cursor, status, step=self._step)
        e.reopened, e.saved_at = False, math.inf

    def _move(self, e: Entry, state: State, because: Because) -> Collection[int]:
        """Change the state of a partition. Return those whose state may follow from that."""
        source, ran = e.state, e.running
        e.waits_for = because if isinstance(because, tuple) else ()
        for blocker in e.waits_for:
            self._waiters[blocker].add(e.id)
        if state is not source:
            self._change(e, state)
        runs = e.running
        if stopped := ran and not runs:
            self._actions.append(Stop(e.id))
            e.caught_up = False
        if runs and e.status == "drained":
            self._open_again(e)
        if state is not source:
            self._enter(e, because)
        if state is _DRAINED:
            self._store_end(e, read=ran)
        self._warn(e)
        if state is not source and (_DRAINED in (source, state) or state is State.PARKED):
            below = (*self.graph.children.get(e.id, ()), *self.graph.successors.get(e.id, ()))
            return sorted(self._waiters.pop(e.id, set()).union(below))
        return (e.id,) if stopped else ()  # now it can be held back

    def _compare_ends(self, begun: list[Entry]) -> None:
        """Save what begins with the ends before it, known from memory (R17): a store that went back
        lacks them, and would take what follows all the same.
        """
        for e in begun:
            now = e.state is _READING or (e.state is _DRAINED and e.saved_at == math.inf)
            if now and e.id in self.graph and not e.reopened and e.id not in self._in_flight:
                before = [self.entries[p] for p in self.preceding(e.id) if p in self.entries]
                ends = [b for b in before if b.status in _OVER and b.id not in self._in_flight]
                for each in (e, *ends) if ends else ():
                    self._decide(each, each.cursor, each.status or "open")

    def _store_end(self, e: Entry, *, read: bool) -> None:
        # Not at the transition: what is stored may change while the state stays the same.
        shown_now = not self._is_drained(e)
        if e.status != "drained":
            self._decide(e, e.cursor, "drained")
            e.loaded_at = 0
        e.reopened = False
        if shown_now or read:
            self._actions.append(states.Drained(e.id, e.cursor))

    def _change(self, e: Entry, state: State) -> None:
        self._counts[e.state] -= 1
        move_entry(e, state)
        self._counts[state] += 1

    def _enter(self, e: Entry, because: Because) -> None:
        match e.state:
            case State.READING:
                e.caught_up, e.end, e.warned = False, None, False
                self._actions.append(states.Start(e.id, e.cursor))
            case State.DRAINED:
                self._rediscover = True
            case State.SUPERSEDED if e.position is None:
                self._decide(e, FIRST, "superseded")
            case State.PARKED if isinstance(because, FeedError):
                # An error that a driver or another partition had is known already.
                if e.error is None and because.partition == e.id:
                    self._actions.append(states.Fail(e.id, because))
                e.error = because
            case State.VANISHED if e.position and e.id not in self.graph.successors:
                if self._is_mine(e.id):  # else who reads it may know a newer discovery
                    text = "is no longer listed, and no successor of it is read: it stops at its"
                    self._actions.append(Report(e.id, f"{text} cursor {shown(e.cursor)}"))

    def _open_again(self, e: Entry) -> None:
        """Save that a drained partition is read on: after a crash its end has to show anew (R6)."""
        self._decide(e, e.cursor)
        e.reopened = True

    # ------------------------------------------------------------------ facts

    def _entry(self, partition: int) -> Entry:
        if partition not in self.entries:
            self.entries[partition] = Entry(partition)
            self._counts[State.WAITING] += 1
        return self.entries[partition]

    def _all(self) -> list[int]:
        listed = self.graph.partitions
        return [*(id for id in self.entries if id not in listed), *listed]

    def _place(self, e: Entry, position: Position | None, *, loaded_at: int = 0) -> None:
        if position is not None and position.status == "superseded" and self._is_drained(e):
            e.finished = True
        e.position, e.reopened, e.saved_at, e.loaded_at = position, False, 0, loaded_at
        e.stored = e.stored or position is not None

    def _is_outdated(self, e: Entry, stored: Position | None, began: int) -> bool:
        # A lower revision alone doesn't say so: a database may have failed over.
        if e.position is None or (stored is not None and stored.revision >= e.position.revision):
            return False
        return began < max(self._loaded, e.saved_at) or began <= e.loaded_at

    def _lose_row(self, e: Entry) -> None:
        """Park a partition whose position was in the store and is not any more (R7, R17)."""
        over = e.status == "superseded" or (e.status == "drained" and e.id not in self.graph)
        if over and e.saved_at < math.inf:
            return  # nothing of it is to be read
        self._place(e, None)
        text = (
            "its position is no longer in the store, although this consumer saved it: the store "
            "went back, or somebody deleted the position, or moved it (feed_name=). Nothing is "
            "read again from the first event. Check 'feedapi cursors ls' before you start again"
        )
        e.error = errors.StoreError(text, feed=self.feed, partition=e.id)
        self._actions.append(states.Fail(e.id, e.error))

    def _position_of(self, partition: int) -> Position | None:
        return self.entries[partition].position if partition in self.entries else None

    def _is_mine(self, partition: int) -> bool:
        return not self._shared or partition in self._owned

    def _is_drained(self, e: Entry) -> bool:
        """Whether its end was committed, and it was not listed as open since (R6)."""
        if e.reopened or e.status != "drained":
            return False
        return e.id not in self.graph or self.is_closed(e.id) or self._listed <= e.loaded_at

    def _begun(self) -> Iterator[int]:
        """Yield the partitions that are read, or that have a position behind their beginning."""
        if self.starts_first and isinstance(self.start, Mapping):
            yield from self.start
        fresh = (None, (FIRST, "open"))
        for e in self.entries.values():
            if e.running or _place(e.position) not in fresh:
                yield e.id

    def _is_outlived(self, partition: int) -> bool:
        """Whether one that nobody read was listed as an ancestor of one that is read."""
        successors = self._successors.get(partition, ())
        return any(self.entries[id].position is not None for id in successors)

    def _gone(self, partition: int) -> int:
        known = self.entries.get(partition)
        return known.gone if known else self._selection.gone.get(partition, 0)

    def _is_lost(self, parent: int, child: Entry) -> bool:
        """Whether an unlisted parent was never read to its end (R8)."""
        known, other = self.entries.get(parent), self._selection.others.get(parent)
        if known is None:  # history at the first start, when the child has a position
            drained = other is not None and other.status == "drained"
            return child.position is None and self._gone(parent) != 1 and not drained
        if known.status == "superseded":
            return not known.finished and child.cursor == FIRST
        return known.gone > 1 and not self._is_drained(known)

    def _blockers(self, partition: int) -> tuple[int, ...]:
        # A drained parent may have one that is not: after a failover, or an operator has moved it.
        found: dict[int, None] = {}
        for id in self.preceding(partition):
            parent: int | None = id
            while parent is not None and not self._is_undrained(parent):
                listed = self.graph.partitions.get(parent)
                parent = listed.starts_after if listed else None
            if parent is not None and parent != partition:
                found[parent] = None
        return tuple(found)

    def _is_undrained(self, partition: int) -> bool:
        known = self.entries.get(partition)
        if known is None:
            return self._gone(partition) == 1
        if known.status == "superseded":
            return partition in self.graph and not known.finished
        return known.gone < 2 and (not self._is_drained(known) or partition in self._unsure)

    def _parked(self, partitions: Iterable[int]) -> FeedError | None:
        known = (self.entries[p] for p in partitions if p in self.entries)
        return next((entry.error for entry in known if entry.error is not None), None)

    def _last_cursor(self, partition: int) -> str | None:
        # What is listed is the end of all events, and means nothing to a selection of them.
        listed = self.graph.partitions.get(partition)
        if self._selects_events or listed is None or not listed.closed:
            return None
        return listed.last_cursor

    def _is_end(self, e: Entry, cursor: str) -> bool:
        return self.is_closed(e.id) and cursor == (self._last_cursor(e.id) or e.end)

    # ------------------------------------------------------------------ cursor transfer (R9)

    def _is_heir(self, partition: int) -> bool:
        # Also one whose cursor was moved back (R11): only then an ancestor is not superseded, too.
        listed, e = self.graph.partitions.get(partition), self.entries[partition]
        if listed is None or not listed.cursor_from or e.live:
            return False
        below = self._successors.get(partition, ())
        return e.position is None or bool(self._live(listed.cursor_from) and not self._live(below))

    def _look_for_heirs(self) -> None:
        self._heirs = [p for p in self.graph if p.cursor_from and not self.entries[p.id].live]

    def _unplaced(self) -> list[Partition]:
        self._heirs = [p for p in self._heirs if not self.entries[p.id].live]
        return [p for p in self._heirs if self._is_heir(p.id)]

    def _awaiting(self) -> Iterable[int]:
        return (ancestor for heir in self._unplaced() for ancestor in heir.cursor_from)

    def _live(self, partitions: Iterable[int]) -> list[Entry]:
        entries = self.entries
        return [entries[p] for p in partitions if p in entries and entries[p].live]

    def _transfer(self) -> list[int]:
        """Give successors without a position the cursor of their ancestor, in one save."""
        successors = [s for s in self._unplaced() if s.id not in self._in_flight]
        blocked = self._with_siblings(successors)
        # No other successor takes the cursor of an ambiguous one's ancestor: the next start would
        # find the other ancestor alone, and skip what this one has unread.
        live = {s.id: self._live(s.cursor_from) for s in successors}
        ambiguous = [id for id, found in live.items() if len({e.cursor for e in found}) > 1]
        disputed = {e.id: id for id in ambiguous for e in live[id]}
        self._missing = self._vanished()
        decided: dict[int, Begin] = {}
        touched: list[int] = []
        for successor in successors:
            entry = self.entries[successor.id]
            touched.append(entry.id)
            if self._parked(successor.cursor_from) or not blocked.isdisjoint(successor.cursor_from):
                continue
            try:
                found = self._inherited(successor, disputed)
            except LineageError as error:
                touched += self._move(entry, State.PARKED, error)
                continue
            if found:
                self._report_unknown_ancestors(successor)
            for partition, (cursor, status) in found.items():
                # A successor that is itself an ancestor of another one is superseded at once.
                if partition not in decided or status == "superseded":
                    decided[partition] = cursor, status
        for partition, (cursor, status) in decided.items():
            entry = self._entry(partition)
            self._decide(entry, cursor, status)
            if status == "superseded":
                self._move(entry, *self._desired(entry))
                touched += sorted(self._waiters.pop(partition, ())) if entry.finished else ()
            elif entry.running or entry.state is State.SUPERSEDED:
                # Its ancestors were not listed when it began, or it begins once more (R11).
                self._move(entry, State.WAITING, ())
        return touched

    def _with_siblings(self, successors: Iterable[Partition]) -> set[int]:
        """Return the ancestors that can't be superseded yet: undecided ones, and every live one
        that shares a successor with one of them. All of a merge are transferred in the same save.
        """
        unplaced = {s.id: s for s in successors}
        blocked = {a for s in successors for a in s.cursor_from if self._is_undecided(a)}
        waiting = list(blocked)
        while waiting:
            for id in self.graph.successors.get(waiting.pop(), ()):
                if (successor := unplaced.pop(id, None)) is not None:
                    more = {e.id for e in self._live(successor.cursor_from)} - blocked
                    blocked |= more
                    waiting += more
        return blocked

    def _awaited(self, s: Partition) -> tuple[int, ...]:
        undecided = [a for a in s.cursor_from if self._is_undecided(a)]
        live = [e.id for e in self._live(s.cursor_from)]
        return tuple(sorted(undecided or live or self._missing))

    def _is_undecided(self, ancestor: int) -> bool:
        return ancestor in self._in_flight or ancestor in self._unsure or self._is_others(ancestor)

    def _is_others(self, ancestor: int) -> bool:
        # Another instance transfers its cursor, or may commit its first one.
        if not self._shared or ancestor in self._owned:
            return False
        if self._others is None or ancestor in self._others:
            return True
        return ancestor in self.entries and self.entries[ancestor].live

    def _vanished(self) -> dict[int, int]:
        kept = self.graph.successors.keys() | self._selection.left_out
        gone = [e for e in self.entries.values() if e.gone and e.id not in kept and not e.error]
        return {e.id: e.gone for e in gone if e.status == "open"} | self._selection.gone

    def _inherited(self, s: Partition, disputed: dict[int, int]) -> dict[int, Begin]:
        """Return what has to be saved for a successor and its ancestors; nothing: not yet decided.
        Every ancestor named before the one whose cursor is taken is superseded too, known or not: a
        discovery that lags must not start it. Without any position all are: another consumer of
        this name may still commit one (R17). What was taken before is saved again, to be compared.
        """
        self._selection.check_ancestors(s)
        live = self._live(s.cursor_from)
        self._check_unambiguous(s, live, disputed)
        others = self._selection.others
        stored = {a: self._position_of(a) or others.get(a) for a in s.cursor_from}
        placed = [e.id for e in live] or [a for a in s.cursor_from if stored[a] is not None]
        source = placed[0] if placed else None
        if not live and self._missing:
            if max(self._missing.values()) == 1:
                return {}
            text = f"no ancestor of it holds a cursor, while {names(self._missing)} had one and "
            text += "vanished without a successor: what was read may come again. Set its cursor by "
            raise errors.LostPartitionError(f"{text}hand", feed=self.feed, partition=s.id)
        held_at = stored[source] if source is not None else None
        cursor = FIRST if held_at is None else held_at.cursor
        before = s.cursor_from[: None if source is None else s.cursor_from.index(source)]
        skipped = [a for a in before if a in self._selection and stored[a] is None]
        held = live or [self.entries[a] for a in placed[:1] if a in self.entries]
        taken = {e.id: e.cursor for e in held} | dict.fromkeys(skipped, cursor)
        return {s.id: (cursor, "open"), **{a: (at, "superseded") for a, at in taken.items()}}

    def _check_unambiguous(self, s: Partition, live: list[Entry], disputed: dict[int, int]) -> None:
        disputes = [disputed[e.id] for e in live if e.id in disputed]
        if disputes:
            other = s.id if len({e.cursor for e in live}) > 1 else disputes[0]
            apart = self._live(self.graph.partitions[other].cursor_from)[:_SHOWN]
            stand = ", ".join(f"{e.id} at {shown(e.cursor)}" for e in apart)
            text = f"can take no cursor: the ancestors of partition {other} stand at different ones"
            text += f": {stand}. Set the cursor of partition {other} by hand"
            raise errors.AmbiguousLineageError(text, feed=self.feed, partition=s.id)

    def _report_unknown_ancestors(self, successor: Partition) -> None:
        others = self._selection.others
        if any(a in self.entries or a in others for a in successor.cursor_from):
            return
        if others or any(entry.position is not None for entry in self.entries.values()):
            unknown = names(successor.cursor_from)
            text = f"begins at its first event: no position is stored of its ancestors ({unknown})"
            text += ". What was read under another name comes again"
            self._actions.append(Report(successor.id, text))

    def _warn(self, e: Entry) -> None:
        """Report once what can't go on by itself, and an end that is not where it is listed."""
        if e.warned:
            return
        text = None
        if e.state is State.WAITING and e.waits_for and not self._is_heir(e.id):
            if found := [b for b in e.waits_for if b in self.graph and not self.is_closed(b)]:
                text = f"waits for {names(found)}, listed as open: a parent has to be closed"
        elif e.end is not None and e.running and e.id not in self._in_flight:
            waiters = self._waiters.get(e.id, ())
            if found := [w for w in waiters if e.id in self.entries[w].waits_for]:
                text = f"was read to its end, which is not committed: {names(found)} can't start"
        elif e.state is _DRAINED and self.doubted(e.id):
            text = f"is stored as drained at {shown(e.cursor)}, and listed as closed with the last "
            text += f"cursor {shown(self._last_cursor(e.id) or '')}: it is asked once more"
        e.warned = text is not None
        if text is not None:
            self._actions.append(Report(e.id, text))


def _place(position: Position | None) -> tuple[str, Status] | None:
    return (position.cursor, position.status) if position else None
