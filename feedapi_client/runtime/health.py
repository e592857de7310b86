"""The health of a session: what hangs, what fails, and whether somebody iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.lineage.planner import State
from feedapi_client.runtime.discovery import Discovery
from feedapi_client.runtime.iteration import Iteration
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.trouble import is_of_gateway
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
_OVER = (State.DRAINED, State.SUPERSEDED, State.VANISHED)
_RESTARTED = (ProblemName.FETCH_STUCK, ProblemName.DISCOVERY_STUCK, ProblemName.STALLED)
_STATES = {
    PartitionState.PARKED: ProblemName.PARKED,
    PartitionState.VANISHED: ProblemName.VANISHED,
    PartitionState.RETRYING: ProblemName.FETCH_FAILING,
}


def health_of(
    planning: Planning,
    watchdog: Watchdog,
    discovery: Discovery,
    status: Callable[[], ConsumerStatus],
    *,
    opening: bool,
) -> Health:
    """Return the health of a session. `opening`: it does not iterate yet."""
    iteration = planning.iteration
    now = iteration.clock()
    problems = [
        *_of_session(iteration, watchdog, opening=opening),
        *_of_discovery(discovery),
        *_of_rollback(planning, discovery),
        *_of_partitions(planning, watchdog, status()),
    ]
    helpless = any(problem.name in _NEED_A_RESTART for problem in problems)
    for hang in watchdog.look():
        problems.append(_problem(hang, now))
        helpless |= hang.name in _NEED_A_RESTART
        # What was restarted and still hangs is beyond the watchdog's reach.
        late = now - hang.began >= 2 * iteration.limits.stall_timeout
        helpless |= late and hang.name in _RESTARTED
    problems.sort(key=lambda problem: problem.since)
    return Health(
        live=not helpless,
        ready=not (
            helpless
            or any(map(_concerns_all, problems))
            or _is_parked(planning)
            or _is_unanswered(planning, now)
            or _every_handler_fails(planning)
        ),
        problems=tuple(problems),
    )


def _is_unanswered(planning: Planning, now: float) -> bool:
    """Whether requests fail, and no partition was answered soundly for too long.

    What is in flight, waits for the application or is held open until there is news, is asked for
    nothing meanwhile. So something has to fail.
    """
    if now - planning.iteration.sound_at < ANSWER_SECONDS:
        return False
    partitions = planning.partitions.values()
    if any(each.turn is not None and each.turn.sound for each in partitions):
        return False
    return any(each.started and each.trouble.error is not None for each in partitions)


def _every_handler_fails(planning: Planning) -> bool:
    """Whether all batches in flight have failed, and none was handled since the last one began to.

    One event that can't be handled does not make the consumer unready while others can.
    """
    handled, since = planning.iteration.handled_at, None
    for partition in planning.partitions.values():
        if (began := partition.handling.last_since) is not None:
            since = began if since is None else max(since, began)
        elif partition.in_flight:
            return False
    return since is not None and (handled is None or handled < since)


def _is_parked(planning: Planning) -> bool:
    """Whether all that is left to read is parked, or access is refused, which is to all of it."""
    if planning.iteration.settings.on_error == "raise":
        return False
    left = [e for e in planning.planner.entries.values() if e.state not in _OVER]
    parked = [e for e in left if e.state is State.PARKED]
    if parked and len(parked) == len(left):
        return True
    return any(_no_access(e.error) for e in parked)


def _no_access(error: FeedError | None) -> bool:
    refused = None if error is None else error.__cause__
    return isinstance(error, AuthenticationError) or is_of_gateway(refused)


def _of_session(iteration: Iteration, watchdog: Watchdog, *, opening: bool) -> Iterator[Problem]:
    began = _moment(iteration.clock() - iteration.began_at)
    if opening:
        text = f"the consumer is being entered, and waits {waits_for(iteration, watchdog.waits)}"
        yield Problem(ProblemName.NOT_OPEN, None, began, text)
    elif iteration.handler_failure is not None:
        yield iteration.handler_failure
    elif iteration.failure is not None:
        known = isinstance(iteration.failure, FeedError)
        text = str(iteration.failure) if known else type(iteration.failure).__qualname__
        yield Problem(ProblemName.FAILED, None, iteration.failed_at, text)
    elif iteration.over or not iteration.iterating:
        text = "the iteration has ended" if iteration.over else "nobody iterates over the consumer"
        yield Problem(ProblemName.NOT_ITERATING, None, began, text)
    if blocked := watchdog.blocked_seconds:
        text = f"the event loop has not run for {blocked:.1f} s"
        yield Problem(ProblemName.EVENT_LOOP_BLOCKED, None, _moment(blocked), text)


def _of_discovery(discovery: Discovery) -> Iterator[Problem]:
    if discovery.error is not None and discovery.failing_since is not None:
        since, text = discovery.failing_since, str(discovery.error)
        yield Problem(ProblemName.DISCOVERY_FAILING, None, since, text)


def _of_rollback(planning: Planning, discovery: Discovery) -> Iterator[Problem]:
    for partition, text in planning.planner.listed_again().items():
        since = discovery.rollback.since.get(partition, datetime.now(UTC))
        yield Problem(ProblemName.ROLLED_BACK, partition, since, text)


def _concerns_all(problem: Problem) -> bool:
    return problem.partition is None or problem.name is ProblemName.ROLLED_BACK


def _of_partitions(
    planning: Planning, watchdog: Watchdog, shown: ConsumerStatus
) -> Iterator[Problem]:
    ended = planning.iteration.handler_failure
    for id, status in shown.partitions.items():
        runtime = planning.partitions.get(id)
        failing = runtime is not None and runtime.handling.error is not None
        if failing and runtime is not None and (ended is None or ended.partition != id):
            handling = runtime.handling
            since = handling.since or datetime.now(UTC)
            oldest = watchdog.oldest(id)
            held_back = "" if oldest is None else f"; {oldest.held_back}"
            text = f"{handling.error}{held_back}"
            yield Problem(ProblemName.HANDLER_FAILING, id, since, text)
        if runtime is not None and runtime.is_end_overdue(planning.iteration.clock()):
            yield _of_end(status)
        if not failing or (runtime is not None and runtime.trouble.error is not None):
            yield from _of_state(status)


def _of_end(status: PartitionStatus) -> Problem:
    since = status.evidence_since or datetime.now(UTC)
    text = (
        f"evidence of its end has been awaited for {status.evidence_seconds or 0.0:.0f} s: its "
        "requests, the discoveries or half of the feed's answers fail again and again. If nothing "
        f"is missing, 'feedapi cursors drain {status.partition}' ends it here"
    )
    return Problem(ProblemName.END_UNPROVEN, status.partition, since, text)


def _of_state(status: PartitionStatus) -> Iterator[Problem]:
    name = _STATES.get(status.state)
    if name is not None:
        text = status.error or "it is not listed any more, and nobody inherits from it"
        yield Problem(name, status.partition, status.since or datetime.now(UTC), text)


def _problem(hang: Stall, now: float) -> Problem:
    return Problem(hang.name, hang.partition, _moment(now - hang.began), hang.text)


def _moment(seconds_ago: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=max(0.0, seconds_ago))
