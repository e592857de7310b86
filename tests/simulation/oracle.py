"""What must hold in every history, whatever goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from feedapi_client.model import FIRST, FeedKey, Position
from feedapi_client.status import (
    ConsumerStatus,
    Health,
    PartitionState,
    PartitionStatus,
    ProblemName,
)
from tests.simulation.end_evidence import Evidence, Gaps
from tests.simulation.manners import Rate
from tests.simulation.store import Effect, SimulatedDatabase
from tests.simulation.trace import Trace
from tests.simulation.transport import Fetched, SimulatedTransport
from tests.simulation.world import Published, World, is_selected

SAME_REQUESTS_A_SECOND = 25
"""How often a process may send the very same request within one second."""

LONGEST_LAG = 15.0
"""How many seconds old a discovery may be."""

OLDEST_END = 60.0
"""How many seconds old an end may be when it is saved: of a replica that lags, by a slow store."""

STOP_SECONDS = 2.0
"""Within this time an iteration ends whose grace period is over: its last save may take a while."""

SLOWING_DOWN = 100
"""So many more requests than are granted may be refused, until the rate is found."""

NAMED_SECONDS = 3.0
"""Within this time after a discovery a partition that it lists as open again is a problem."""

IDLE_REQUESTS = 8
"""How often a process may ask for each partition, and discover, while it is watched idle."""
_BEHIND_THE_END = re.compile(r"partition (\d+): there is an event behind the end that is stored")
_FAILING = (PartitionState.RETRYING, PartitionState.PARKED)


class ViolationError(AssertionError):
    """A history in which something happened that must not.

    Attributes:
        rule: the name of what was violated; the same for all histories with the same defect.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Known(NamedTuple):
    """What the oracle knows of effects, for a database that goes back."""

    applied: dict[Any, int]
    done: int
    gaps: Gaps
    floating: set[int]
    """Entities of which it is not known yet where the consumer began, with ``start="last"``."""


@dataclass(slots=True)
class Seen:
    """How far the last two pages that were read of a partition could see it."""

    end: int = 0
    before: int = 0


class Oracle:
    """Checks each effect, each status and the end of a run.

    Violations are kept rather than raised at once: an exception would become a failure of the
    consumer's store or handler. `check` raises the first one.

    Arguments:
        world: what was published.
        transactional: whether the application keeps cursors and effects in one transaction.
        selected: whether the consumer selects events.
        ordered: whether it keeps children behind their parents. Otherwise the events of an entity
            are in order only among those of one family of partitions.
        shared: whether several instances share the feed: what comes after what one of them did may
            be done by another one.
        from_the_end: whether the consumer starts at the end of the feed.
        trace: gets a line for each violation.
    """

    def __init__(
        self,
        world: World,
        *,
        transactional: bool,
        selected: bool = False,
        ordered: bool = True,
        shared: bool = False,
        from_the_end: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.violations: list[ViolationError] = []
        self.applied: dict[Any, int] = {}
        """The highest number of an event of each entity whose effect is durable.

        With ``ordered=False`` of each entity in each family of partitions, counted from 1.
        """
        self.done = 0
        """Events whose effects are durable, each counted once."""
        self.effects = 0
        self._world = world
        self._transactional = transactional
        self._selected = selected
        self._ordered = ordered
        self._shared = shared
        self._from_the_end = from_the_end
        self.false_ends: set[int] = set()
        """Partitions that were drained before their last events were seen, as they may be (R6)."""
        self.reported: set[int] = set()
        """Those of them behind which a later session has found events, and reported them."""
        self.gaps = Gaps()
        self.changes = 0
        """How often positions were changed by others than the consumers."""
        self.chosen: set[int] | None = None
        """The partitions that the consumer reads; None for all."""
        self._trace = trace
        self.calm = False
        """Whether all faults have ended: what the application does must succeed from now on."""
        self._last: dict[tuple[int, Any], int] = {}
        self._floating: set[int] = set()
        self._outset: dict[int, str] = {}
        """Where partitions were drained at a first start at the end: the publisher need not say
        where that is, and a replica that lags says an older place."""
        self._history = 0
        """The newest event that a consumer which starts at the end must not be given."""
        self._seen: dict[int, Seen] = {}

    def violated(self, rule: str, text: str) -> None:
        """Record a violation."""
        self.violations.append(ViolationError(rule, text))
        if self._trace is not None:
            self._trace.add("violated: {}: {}", rule, text)

    @property
    def changed(self) -> bool:
        """Whether positions were changed by others than the consumers."""
        return self.changes > 0

    def check(self) -> None:
        """Raise the first violation."""
        if self.violations:
            raise self.violations[0]

    # ------------------------------------------------------------------ effects

    def began(self, process: int = 0) -> None:
        """A new iteration of a process reads what was not committed again."""
        for key in [key for key in self._last if key[0] == process]:
            del self._last[key]

    def effect(self, effect: Effect) -> None:
        """An effect became durable: in order, and exactly once (at least once without one
        transaction of cursors and effects).
        """
        self.effects += 1
        if self.chosen is not None and effect.partition not in self.chosen:
            self.violated("partitions", f"partition {effect.partition} is not to be read")
        if effect.entity in self._floating:
            self._start_at(effect)
        lane, n = self._lane(effect)
        key = effect.process, lane
        if self.gaps.take(lane, n):
            self.done += 1
            if self._last.get(key, n) < n:
                del self._last[key]  # what follows may be done: it came before the late one
            return
        done = self.applied.get(lane, 0)
        last = done if self._transactional else self._last.get(key)
        if self._shared and not self._transactional:
            last = None
        in_order = n <= done + 1 if last is None else n == last + 1
        passed_over = range((done if last is None else last) + 1, n)
        if not in_order and self._may_come_late(effect, passed_over):
            self.gaps.add(lane, passed_over)
            self.done -= len(passed_over)
        elif not in_order and n <= done and self._may_repeat_late(effect):
            return
        elif not in_order:
            known = "applied already" if n <= done else f"expected {effect.n - n + done + 1}"
            rule = "exactly-once" if n <= done else "order"
            self.violated(rule, f"event {effect.n} of entity {effect.entity}: {known}")
        self._last[key] = n
        if n > done:
            self.applied[lane] = n
            self.done += n - done

    def _may_come_late(self, effect: Effect, passed_over: range) -> bool:
        """Return whether all of these events are behind an end that was a false one (R6)."""
        if not self.false_ends or not passed_over or not self._ordered:
            return False
        behind = {
            event.n
            for id in self.false_ends
            for event in self._world.partitions[id].events
            if event.entity == effect.entity
        }
        return behind.issuperset(passed_over)

    def _may_repeat_late(self, effect: Effect) -> bool:
        """Return whether an effect before what came last may be there again.

        It is behind a false end, and a process did it that did not commit it. The next one first
        came to what is behind the end (R6), and may do it again then.
        """
        return not self._transactional and effect.partition in self.false_ends

    def _lane(self, effect: Effect) -> tuple[Any, int]:
        """Return among which events an event has an order, and its number among them."""
        return self._place(effect.entity, effect.n)

    def _place(self, entity: int, n: int) -> tuple[Any, int]:
        if self._ordered:
            return entity, n
        _, family, place = self._world.lane(entity, n)
        return (entity, family), place

    def started(self, partition: int, cursor: str, stored: Position, *, known: int = 0) -> None:
        """A partition is read after its lease was claimed: on from what was stored by then.

        `known`: how many changes there were by then. After another one something else is stored.
        """
        if known != self.changes or cursor == "_last" or not stored.cursor.startswith("f"):
            return
        found = self._world.partitions[partition]
        asked, claimed = found.sequence_of(cursor), found.sequence_of(stored.cursor)
        if asked is not None and claimed is not None and asked < claimed:
            self.violated("start", f"partition {partition} is read from {cursor}, stored: {stored}")

    def delivered(
        self,
        partition: int,
        positions: Mapping[int, Position],
        *,
        known: int = 0,
        loaded: Mapping[int, Position] | None = None,
    ) -> None:
        """A batch came: the parent of its partition must be drained before (R4, R8).

        `known`: how many changes there were when its process started, and `loaded` the positions
        that it has loaded, or saved since: it can't know of later changes, nor that another process
        has come to a drained parent again, which a server of an old version lists.
        """
        parent, unknown = self._world.partitions[partition].starts_after, known != self.changes
        if parent is None or not self._ordered or unknown or parent in self.false_ends:
            return  # a parent that is read again has been drained before
        if self.chosen is not None and parent not in self.chosen:
            return
        stored_or_known = (positions.get(parent), (loaded or {}).get(parent))
        if any(position is not None and position.status != "open" for position in stored_or_known):
            return
        self.violated(
            "parent-first", f"partition {partition} is delivered before {parent} is drained"
        )

    # ------------------------------------------------------------------ positions that are changed

    def known(self) -> Known:
        """Return what is known of effects now."""
        return Known(dict(self.applied), self.done, self.gaps.copy(), set(self._floating))

    def went_back(self, known: Known | None) -> None:
        """The database lost its last saves, and with `known` the effects that were saved with them.

        Without it the cursors went back alone: what they covered takes effect again.
        """
        self.changes += 1
        self._last.clear()
        if known is not None:
            self.applied, self.done, self.gaps, self._floating = known

    def rewound(self, events: Iterable[Published]) -> None:
        """An operator wants these events again."""
        self.changes += 1
        for event in events:
            lane, n = self._place(event.entity, event.n)
            done = self.applied.get(lane, 0)
            if n <= done:
                self.done -= done - (n - 1)
                self.applied[lane] = n - 1

    def skipped(self, events: Iterable[Published]) -> None:
        """An operator wants none of these events."""
        self.changes += 1
        for event in events:
            lane, n = self._place(event.entity, event.n)
            done = self.applied.get(lane, 0)
            if self.gaps.take(lane, n):
                self.done += 1
            elif n > done:
                self.done += n - done
                self.applied[lane] = n

    # ------------------------------------------------------------------ ends of partitions

    def draining(
        self,
        positions: Mapping[int, Position],
        stored: Mapping[int, Position],
        evidence: Evidence,
        now: float,
    ) -> None:
        """A process is about to save that partitions are drained: there must be evidence (R6)."""
        if self._from_the_end and not stored:
            self._outset = {id: p.cursor for id, p in positions.items() if p.status == "drained"}
            return
        found = {id: before.revision for id, before in stored.items()}
        if self._from_the_end and any(p.replaces != found.get(id) for id, p in positions.items()):
            return  # a first start that comes second: all of it will be refused
        for id, position in positions.items():
            before = stored.get(id)
            if position.status != "drained" or (before and before.status == "drained"):
                continue
            unread = self._unread(id, position)
            if self._world.last_cursor and not self._selected:
                if unread:
                    self.violated("drained", f"partition {id} at {position}, {unread} unread")
            elif (lacking := evidence.lacks(id, now)) is not None:
                self.violated("evidence", f"partition {id} is saved as drained: {lacking}")
            elif unread:
                self.false_ends.add(id)

    def heard(self, reports: Iterable[str]) -> None:
        """A process has reported this: what it says of ends must be true (R6)."""
        for line in reports:
            if (match := _BEHIND_THE_END.search(line)) is None:
                continue
            id = int(match[1])
            if id in self.false_ends:
                self.reported.add(id)
            elif not self.changed and not self._from_the_end:
                self.violated("report", f"nothing was passed over: {line}")

    def left_behind(self, positions: Mapping[int, Position]) -> dict[int, int]:
        """Return how many events each partition has behind a stored end that was a false one."""
        return {
            id: unread
            for id in sorted(self.false_ends)
            if id in positions
            and positions[id].status == "drained"
            and (unread := self._unread(id, positions[id]))
        }

    def rolled_back(self, positions: Mapping[int, Position]) -> set[int]:
        """Return the partitions that are open again after their successors took their cursors."""
        return {
            id
            for id, position in positions.items()
            if position.status == "superseded"
            and (partition := self._world.partitions[id]).retired == float("inf")
            and partition.closed == float("inf")
        }

    def shows_rollback(self, health: Health, since: Mapping[int, float], now: float) -> None:
        """Check that a partition which was over and is listed as open is a problem (R11).

        `since`: the partitions to be named, and since when each discovery has listed them so.
        """
        shown = {p.partition for p in health.problems if p.name is ProblemName.ROLLED_BACK}
        for id, listed in since.items():
            if now - listed > NAMED_SECONDS and id not in shown:
                self.violated("report", f"partition {id} is open again, and no problem says so")

    def passing(self, positions: Mapping[int, Position], stored: Mapping[int, Position]) -> None:
        """Cursors are about to be saved by key: no event before them is unfinished (R5)."""
        if self.changed or self.false_ends:
            return
        for id, position in positions.items():
            partition, before = self._world.partitions[id], stored.get(id)
            if before is None:
                continue  # where it begins
            place = partition.sequence_of_selected if self._selected else partition.sequence_of
            since, until = place(before.cursor), place(position.cursor)
            for event in partition.events:
                if since is None or until is None or not since < event.sequence <= until:
                    continue
                if event.entity in self._floating or (
                    self._selected and not is_selected(event.entity)
                ):
                    continue
                lane, n = self._place(event.entity, event.n)
                if n > self.applied.get(lane, 0):
                    self.violated(
                        "passed",
                        f"partition {id} at {position} is behind event {event.n} of entity "
                        f"{event.entity}, which is not done",
                    )

    def _unread(self, id: int, position: Position) -> int:
        """Return how many events a partition has behind a position."""
        partition = self._world.partitions[id]
        read = (partition.sequence_of_selected if self._selected else partition.sequence_of)(
            position.cursor
        )
        return sum(
            event.sequence > (read or 0) and (not self._selected or is_selected(event.entity))
            for event in partition.events
        )

    def paced(self, rate: Rate) -> None:
        """Check that a rate limit was respected in the long run (R14)."""
        if rate.refused > rate.granted + SLOWING_DOWN:
            self.violated("pace", f"{rate.refused} requests refused, {rate.granted} granted")

    # ------------------------------------------------------------------ requests

    def fetched(self, fetched: Fetched) -> None:
        """A page was read to its end."""
        seen, end = self._seen.get(fetched.partition), fetched.end
        if seen is None:
            self._seen[fetched.partition] = Seen(end, min(0, end))
        else:
            seen.before, seen.end = min(seen.end, end), end

    def traffic(self, transport: SimulatedTransport) -> None:
        """Check the requests of one process that ended: their rate, and that none is left open."""
        if transport.open:
            self.violated("leak", f"{transport.open} responses were never closed")
        self.rate(transport)

    def rate(self, transport: SimulatedTransport) -> None:
        """Check how often the same request was sent."""
        times, request = transport.busiest
        if times > SAME_REQUESTS_A_SECOND:
            self.violated("busy", f"{times} times within a second: {request}")

    def ends(self, ends_by: float, now: float) -> None:
        """Check that an iteration has ended that was stopped with a grace period."""
        if now > ends_by + STOP_SECONDS:
            self.violated("stop", f"it should have ended at {ends_by:.3f} s")

    def idled(self, requests: int) -> None:
        """Check the requests of a consumer at the end of a feed in which nothing happens."""
        allowed = IDLE_REQUESTS * (1 + len(self._world.partitions))
        if requests > allowed:
            self.violated("idle", f"{requests} requests within seconds, and nothing to read")

    # ------------------------------------------------------------------ status

    def status(
        self,
        status: ConsumerStatus,
        positions: Mapping[int, Position],
        limit: int,
        *,
        alone: bool = True,
    ) -> None:
        """Check that a status claims nothing that is not so.

        `alone`: no other process of the same name has run beside this one.
        """
        self.buffered(status.buffered_bytes, limit)
        for id, found in status.partitions.items():
            stored = positions.get(id)
            self._check_error(found)
            if self._from_the_end and not positions:
                continue  # the first save is under way
            if self._from_the_end and stored is not None and stored.replaces is None:
                continue  # maybe closed from the outset
            if not self._selected and not self.changed:
                self._check_state(found, stored, alone=alone)
            if alone:
                self._check_cursor(found, stored)

    def buffered(self, used: int, limit: int) -> None:
        """Check how many bytes are buffered."""
        if used > limit:
            self.violated("buffer", f"{used} bytes are buffered of {limit}")

    def _check_error(self, found: PartitionStatus) -> None:
        if found.state in _FAILING and not found.error:
            self.violated(
                "status", f"partition {found.partition} is {found.state}: no error says why"
            )

    def _check_state(self, found: PartitionStatus, stored: Position | None, *, alone: bool) -> None:
        id = found.partition
        if found.state is PartitionState.DRAINED:
            self._check_drained(id, stored)
        elif found.state is PartitionState.SUPERSEDED:
            if stored is None or stored.status != "superseded":
                self.violated("status", f"partition {id} is shown superseded: {stored}")
        elif found.caught_up and id in self._seen and alone:
            self._check_caught_up(id, stored)

    def _check_cursor(self, found: PartitionStatus, stored: Position | None) -> None:
        """The cursor of a status is a committed one."""
        id, partition = found.partition, self._world.partitions[found.partition]
        if found.cursor is None:
            return
        shown = partition.sequence_of(found.cursor)
        if stored is None or stored.cursor == found.cursor:
            saved = None if stored is None else shown
        else:
            saved = partition.sequence_of(stored.cursor)
        if saved is None or (shown or 0) > saved:
            self.violated("status", f"partition {id} is shown at {found.cursor}, stored: {stored}")

    def _check_drained(self, id: int, stored: Position | None) -> None:
        partition = self._world.partitions[id]
        if (stored is None or stored.status == "open") and not self._world.last_cursor:
            return  # its save is under way, which `draining` checks
        at_end = stored is not None and (id in self.false_ends or not self._unread(id, stored))
        if stored is not None and self._world.last_cursor:
            at_end = stored.cursor == partition.cursor(partition.closed_sequence)
        elif stored is not None and stored.cursor == self._outset.get(id):
            at_end = True  # it is saved once more before what comes after it
        if stored is None or partition.closed == float("inf") or not at_end:
            self.violated("status", f"partition {id} is shown drained, and stored as {stored}")

    def _check_caught_up(self, id: int, stored: Position | None) -> None:
        partition = self._world.partitions[id]
        sequence = None if stored is None else partition.sequence_of(stored.cursor)
        # The consumer may still be at work on the last page: it is done with the one before.
        known = self._seen[id].before
        if known <= (sequence or 0):
            return
        unread = [e for e in partition.events if (sequence or 0) < e.sequence <= known]
        if unread:
            self.violated(
                "status",
                f"partition {id} is shown caught up, and {len(unread)} events are not committed",
            )

    def is_ambiguous(self, positions: Mapping[int, Position]) -> bool:
        """Return whether some partition was merged of ancestors that stand at different cursors.

        Of an ancestor and its own successor only one may be open: the save of the successor has to
        supersede the ancestor.
        """
        partitions = self._world.partitions
        for partition in partitions.values():
            stored = [id for id in partition.cursor_from if id in positions]
            replaced = {ancestor for id in stored for ancestor in partitions[id].cursor_from}
            live = (positions[id] for id in stored if id not in replaced)
            if len({position.cursor for position in live if position.status == "open"}) > 1:
                return True
        return False

    # ------------------------------------------------------------------ the end

    def complete(self) -> bool:
        """Return whether every event was applied.

        Of the chosen partitions, where not all are read. One that was split by cursor transfer is
        not listed any more: its events are those of its successors.
        """
        if self.chosen is None:
            return self.done == self._world.total(selected=self._selected)
        chosen = (self._world.partitions[id] for id in self.chosen)
        return not self.gaps.count and all(
            self.applied.get(event.entity, 0) >= event.n
            for partition in chosen
            if partition.retired == float("inf")
            for event in partition.events
            if not self._selected or is_selected(event.entity)
        )

    def read_to_the_end(self, positions: Mapping[int, Position]) -> None:
        """A process without ``follow`` has ended: nothing may be left, once all is calm.

        But for what is behind a false end that an earlier process has stored: nobody knows any more
        whether an operator did. It must be reported.
        """
        if self.complete():
            return
        left = self._world.total(selected=self._selected) - self.done
        behind = self.left_behind(positions)
        told = behind.keys() <= self.reported
        if not (behind and told and (self.chosen is not None or left == sum(behind.values()))):
            self.violated("end", f"a consumer without follow has ended, and {left} events are left")

    def is_gone(self, partitions: Collection[int], known: Collection[int]) -> bool:
        """Return whether no discovery will list one of the partitions, which is not `known`."""
        missing = [self._world.partitions[id] for id in partitions if id not in known]
        return any(p.retired < float("inf") for p in missing)

    def is_unlisted(self, partitions: Collection[int], known: Collection[int], now: float) -> bool:
        """Return whether a discovery may lack one of the partitions, which is not `known` either.

        It was split before the consumer saw it, or a replica that lags doesn't list it yet, or not
        again after a rollback.
        """
        missing = [self._world.partitions[id] for id in partitions if id not in known]
        return any(
            p.retired <= now
            or now - p.created < LONGEST_LAG
            or any(now - listed < LONGEST_LAG for _, listed in p.absent)
            for p in missing
        )

    def started_at_the_end(self) -> None:
        """The consumer begins behind everything that was published so far."""
        for entity, count in self._world.published.items():
            if self._selected and not is_selected(entity):
                continue
            self.done += count - self.applied.get(entity, 0)
            self.applied[entity] = count
            self._floating.add(entity)
        self._history = self._world.sequence_before(OLDEST_END)

    def _start_at(self, effect: Effect) -> None:
        """The first effect of an entity shows where the end was when the consumer asked for it.

        That was before it saved its positions: what was published meanwhile is to be delivered.
        """
        self._floating.discard(effect.entity)
        events = self._world.partitions[effect.partition].events
        same = (e.sequence for e in events if (e.entity, e.n) == (effect.entity, effect.n))
        if next(same) <= self._history:
            self.violated("start", f"event {effect.n} of entity {effect.entity} is no new one")
        assumed = self.applied[effect.entity]
        if effect.n <= assumed:
            self.done -= assumed - (effect.n - 1)
            self.applied[effect.entity] = effect.n - 1

    def finished(self, database: SimulatedDatabase, key: FeedKey, stray: list[str]) -> None:
        """Check a finished run."""
        for request in stray:
            self.violated("cursor", f"a cursor of other partitions was sent: {request}")
        for id, position in database.positions.get(key, {}).items():
            partition = self._world.partitions[id]
            if position.status == "drained" and partition.closed == float("inf"):
                self.violated("drained", f"open partition {id} is stored as drained")
        self.progressed()

    def progressed(self) -> None:
        """Check that every event was applied by now."""
        if not self.complete():
            total = self._world.total(selected=self._selected)
            left = total - self.done
            gone = f", passed over at a false end: {self.gaps}" if self.gaps.count else ""
            self.violated("progress", f"{left} of {total} events were never applied{gone}")


class Reports:
    """The reports that one process owes its operator (R9).

    A successor of unknown ancestors begins at its first event. If anything was read before, that
    may bring it again: no such position may be saved without a report of that partition.

    Arguments:
        world: what the publisher has.
        transport: knows which partitions the process has seen.
        oracle: gets the violations.
        shown: returns the reports of the session that is open.
    """

    def __init__(
        self,
        world: World,
        transport: SimulatedTransport,
        oracle: Oracle,
        shown: Callable[[], Sequence[str]],
    ) -> None:
        self._world = world
        self._transport = transport
        self._oracle = oracle
        self._shown = shown
        self._owed: set[int] = set()

    def saving(self, positions: Mapping[int, Position], stored: Mapping[int, Position]) -> None:
        """Positions are about to be saved."""
        for id, position in positions.items():
            first = (position.cursor, position.status, position.replaces) == (FIRST, "open", None)
            if stored and first and self._is_unknown(id, stored):
                self._owed.add(id)
        if self._owed:
            self._pay()  # what is left is a report of a session that is being opened

    def check(self) -> None:
        """A session is open: every report that is owed must be shown."""
        if not self._owed:
            return
        self._pay()
        for id in sorted(self._owed):
            self._oracle.violated(
                "report", f"partition {id} begins at its first event, and no report says so"
            )
        self._owed.clear()

    def forget(self) -> None:
        """The session was left: its reports are gone."""
        self._owed.clear()

    def _pay(self) -> None:
        shown = self._shown()
        self._owed = {id for id in self._owed if not any(_is_about(id, line) for line in shown)}

    def _is_unknown(self, id: int, stored: Mapping[int, Position]) -> bool:
        ancestors = self._world.partitions[id].cursor_from
        if self._oracle.chosen is not None or self._oracle.changed or not ancestors:
            return False
        return all(a not in stored and a not in self._transport.listed for a in ancestors)


def _is_about(id: int, report: str) -> bool:
    return f"partition {id}: begins at its first event" in report
