"""What a session shows of itself: its status, and its health."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from feedapi_client.errors import FeedError
from feedapi_client.lineage.states import Entry, State
from feedapi_client.runtime.discovery import Discovery
from feedapi_client.runtime.partition import BufferBudget, RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.topology import Topology
from feedapi_client.runtime.watchdog import Stall, Watchdog, waits_for
from feedapi_client.status import (
    ConsumerStatus,
    Health,
    PartitionState,
    PartitionStatus,
    Problem,
    ProblemName,
)

ANSWER_SECONDS = 60.0
"""After which a consumer none of whose partitions was answered soundly is not ready."""
_NEED_A_RESTART = (
    ProblemName.HANDLER_STUCK,
    ProblemName.STORE_STUCK,
    ProblemName.EVENT_LOOP_BLOCKED,
    ProblemName.FAILED,
)
_RESTARTED = (ProblemName.FETCH_STUCK, ProblemName.DISCOVERY_STUCK, ProblemName.STALLED)
_OVER = (State.DRAINED, State.SUPERSEDED, State.VANISHED)
_READ_NO_MORE = (State.DRAINED, State.SUPERSEDED, State.ELSEWHERE)
_STATES = {state: PartitionState(state.value) for state in State}
_PROBLEMS = {
    PartitionState.PARKED: ProblemName.PARKED,
    PartitionState.VANISHED: ProblemName.VANISHED,
    PartitionState.RETRYING: ProblemName.FETCH_FAILING,
}


class Board:
    """Looks at the parts of a session, which do not know of it."""

    def __init__(
        self,
        planning: Planning,
        topology: Topology,
        buffer: BufferBudget,
        watchdog: Watchdog,
        discovery: Discovery,
    ) -> None:
        self._planning, self._iteration = planning, planning.iteration
        self._topology = topology
        self._buffer = buffer
        self._watchdog = watchdog
        self._discovery = discovery

    # ------------------------------------------------------------------ status

    def status(self) -> ConsumerStatus:
        planning, iteration, info = self._planning, self._iteration, self._topology.info
        entries, unsaved = planning.planner.entries, planning.unsaved
        return ConsumerStatus(
            feed=iteration.feed,
            dialect=info.dialect if info else None,
            buffered_bytes=self._buffer.used,
            partitions={id: self._partition(entries[id], unsaved) for id in sorted(entries)},
            reports=tuple(iteration.reports),
            began=iteration.began,
        )

    def _partition(self, entry: Entry, unsaved: Mapping[int, bool]) -> PartitionStatus:
        """Return a snapshot of one partition.

        `unsaved` has those of which the store does not have the planner's position yet; True: it
        has none.
        """
        planning, own, state = self._planning, self._planning.partitions.get(entry.id), entry.state
        paused = entry.id in self._iteration.settings.paused
        error = entry.error or (own.trouble.error if own else None)
        if state in _READ_NO_MORE:
            error = None  # that of requests that nobody makes again is over
        position = None if unsaved.get(entry.id, False) else entry.position
        status = PartitionStatus(
            partition=entry.id,
            state=_state(entry, error, unsaved=entry.id in unsaved, paused=paused),
            cursor=None if position is None else position.cursor,
            waits_for=entry.waits_for if state is State.WAITING else (),
            caught_up=state is State.DRAINED or None,
            error=str(error) if error else None,
            since=self._failing_since(entry, own) if error else None,
            owner=None if planning.sharing is None else planning.sharing.owner(entry.id),
            wait=self._watchdog.wait_of(entry, own) if self._iteration.iterating else None,
        )
        return status if own is None else self._read(status, entry, own, error)

    def _read(
        self,
        status: PartitionStatus,
        entry: Entry,
        own: RuntimePartition,
        error: FeedError | None,
    ) -> PartitionStatus:
        handling, state = own.handling, status.state
        elsewhere = entry.state is State.ELSEWHERE  # another instance knows how far behind it is
        is_known = error is None and (own.last_contact or entry.state is State.DRAINED)
        if error is None and handling.error and state is not PartitionState.PAUSED:
            state = PartitionState.RETRYING if entry.running else state
        if state is PartitionState.CAUGHT_UP and handling.hangs:
            state = PartitionState.READING  # all is read, but the application does not get on
        hanging_since = handling.in_flight_since if handling.hangs else None
        return replace(
            status,
            state=state,
            caught_up=own.is_caught_up if is_known and not elsewhere else None,
            error=status.error or handling.error or handling.hangs,
            since=status.since or handling.since or hanging_since,
            caught_up_at=None if elsewhere else own.caught_up_at,
            retry_at=own.trouble.retry_at if error is not None else handling.retry_at,
            events=own.events,
            last_event=own.last_event,
            last_contact=own.last_contact,
            unknown_commands=own.unknown_commands,
            fetch_failures=own.trouble.total,
            handler_failures=handling.failures,
            attempts=handling.attempts,
            quarantined=handling.quarantined,
            passed_over=handling.passed_over,
            in_flight_since=handling.in_flight_since,
            committed_at=handling.committed_at,
            evidence_since=own.evidence_since,
        )

    def _failing_since(self, entry: Entry, own: RuntimePartition | None) -> datetime | None:
        """When the error began. For a descendant that is when its ancestor's began."""
        if own is not None and own.trouble.since is not None:
            return own.trouble.since
        if entry.error is None or entry.error.partition is None:
            return None
        origin = self._planning.partitions.get(entry.error.partition)
        return origin.trouble.since if origin else None

    # ------------------------------------------------------------------ health

    def health(self, *, opening: bool = False) -> Health:
        """Return the health. Costs time linear in the number of partitions.

        `opening`: it does not iterate yet.
        """
        iteration, now = self._iteration, self._iteration.clock()
        problems = [
            *self._of_session(opening=opening),
            *self._of_discovery(),
            *self._of_rollback(),
            *self._of_partitions(),
        ]
        hangs = self._watchdog.look()
        problems += [_problem(hang, now) for hang in hangs]
        problems.sort(key=lambda problem: problem.since)
        # What was restarted and still hangs is beyond the watchdog's reach.
        late = now - 2 * iteration.limits.stall_timeout
        helpless = any(problem.name in _NEED_A_RESTART for problem in problems) or any(
            hang.name in _RESTARTED and hang.began <= late for hang in hangs
        )
        concern_all = any(
            problem.partition is None or problem.name is ProblemName.ROLLED_BACK
            for problem in problems
        )
        unready = self._is_parked() or self._is_unanswered(now) or self._every_handler_fails()
        return Health(
            live=not helpless,
            ready=not (helpless or concern_all or unready),
            problems=tuple(problems),
        )

    def _is_unanswered(self, now: float) -> bool:
        """Whether requests fail, and no partition was answered soundly for too long.

        What is in flight, waits for the application or is held open until there is news, is asked
        for nothing meanwhile. So something has to fail.
        """
        if now - self._iteration.sound_at < ANSWER_SECONDS:
            return False
        partitions = self._planning.partitions.values()
        if any(each.turn is not None and each.turn.sound for each in partitions):
            return False
        return any(each.started and each.trouble.error is not None for each in partitions)

    def _every_handler_fails(self) -> bool:
        """Whether all in flight has failed, and none was handled since the last of it began to.

        One event that can't be handled does not make the consumer unready while others can.
        """
        handled, since = self._iteration.handled_at, None
        for partition in self._planning.partitions.values():
            if (began := partition.handling.last_since) is not None:
                since = began if since is None else max(since, began)
            elif partition.in_flight:
                return False
        return since is not None and (handled is None or handled < since)

    def _is_parked(self) -> bool:
        if self._iteration.settings.on_error == "raise":
            return False
        left = [e for e in self._planning.planner.entries.values() if e.state not in _OVER]
        parked = [e for e in left if e.state is State.PARKED]
        return bool(parked) and len(parked) == len(left)

    def _of_session(self, *, opening: bool) -> Iterator[Problem]:
        iteration = self._iteration
        began = _moment(iteration.clock() - iteration.began_at)
        if opening:
            waits = waits_for(iteration, self._watchdog.waits)
            text = f"the consumer is being entered, and waits {waits}"
            yield Problem(ProblemName.NOT_OPEN, None, began, text)
        elif iteration.handler_failure is not None:
            yield iteration.handler_failure
        elif iteration.failure is not None:
            known = isinstance(iteration.failure, FeedError)
            text = str(iteration.failure) if known else type(iteration.failure).__qualname__
            yield Problem(ProblemName.FAILED, None, iteration.failed_at, text)
        elif iteration.over or not iteration.iterating:
            text = (
                "the iteration has ended" if iteration.over else "nobody iterates over the consumer"
            )
            yield Problem(ProblemName.NOT_ITERATING, None, began, text)
        if blocked := self._watchdog.blocked_seconds:
            text = f"the event loop has not run for {blocked:.1f} s"
            yield Problem(ProblemName.EVENT_LOOP_BLOCKED, None, _moment(blocked), text)

    def _of_discovery(self) -> Iterator[Problem]:
        discovery = self._discovery
        if discovery.error is not None and discovery.failing_since is not None:
            since, text = discovery.failing_since, str(discovery.error)
            yield Problem(ProblemName.DISCOVERY_FAILING, None, since, text)

    def _of_rollback(self) -> Iterator[Problem]:
        for partition, text in self._planning.planner.listed_again().items():
            since = self._discovery.rollback.since.get(partition, datetime.now(UTC))
            yield Problem(ProblemName.ROLLED_BACK, partition, since, text)

    def _of_partitions(self) -> Iterator[Problem]:
        ended, now = self._iteration.handler_failure, self._iteration.clock()
        for id, status in self.status().partitions.items():
            own = self._planning.partitions.get(id)
            handling = None if own is None else own.handling
            failing = handling is not None and handling.error is not None
            if handling is not None and failing and (ended is None or ended.partition != id):
                oldest = self._watchdog.oldest(id)
                held_back = "" if oldest is None else f"; {oldest.held_back}"
                since, text = handling.since or datetime.now(UTC), f"{handling.error}{held_back}"
                yield Problem(ProblemName.HANDLER_FAILING, id, since, text)
            if own is not None and own.is_end_overdue(now):
                yield _of_end(status)
            name = _PROBLEMS.get(status.state)
            if name is not None and (
                not failing or (own is not None and own.trouble.error is not None)
            ):
                text = status.error or "it is not listed any more, and nobody inherits from it"
                yield Problem(name, id, status.since or datetime.now(UTC), text)


def _state(entry: Entry, error: FeedError | None, *, unsaved: bool, paused: bool) -> PartitionState:
    if entry.running and paused:
        return PartitionState.PAUSED
    if entry.running and error is not None:
        return PartitionState.RETRYING
    if entry.state is State.SUPERSEDED and unsaved:
        return PartitionState.READING  # its successors hold its cursor only after the save
    return _STATES[entry.state]


def _of_end(status: PartitionStatus) -> Problem:
    text = (
        f"evidence of its end has been awaited for {status.evidence_seconds or 0.0:.0f} s: its "
        "requests, the discoveries or half of the feed's answers fail again and again. If nothing "
        f"is missing, 'feedapi cursors drain {status.partition}' ends it here"
    )
    since = status.evidence_since or datetime.now(UTC)
    return Problem(ProblemName.END_UNPROVEN, status.partition, since, text)


def _problem(hang: Stall, now: float) -> Problem:
    return Problem(hang.name, hang.partition, _moment(now - hang.began), hang.text)


def _moment(seconds_ago: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=max(0.0, seconds_ago))
