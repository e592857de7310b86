"""The status of one partition, as `FeedConsumer.status` shows it."""

from __future__ import annotations

from datetime import datetime

from feedapi_client.errors import FeedError
from feedapi_client.lineage.planner import Entry, State
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.status import PartitionState, PartitionStatus, PartitionWait

_STATES = {state: PartitionState(state.value) for state in State}
_READ_NO_MORE = (State.DRAINED, State.SUPERSEDED, State.ELSEWHERE)


def partition_status(
    entry: Entry,
    partition: RuntimePartition | None,
    since: datetime | None,
    *,
    unsaved: bool = False,
    new: bool = False,
    owner: str | None = None,
    wait: PartitionWait | None = None,
    paused: bool = False,
) -> PartitionStatus:
    """Return a snapshot of the state of one partition in planner and runtime.

    `partition` is None for one that was never read in this session, `since` the time of its error.
    `unsaved`: the store does not have the position of the planner yet. `new`: it has none of this
    partition. `owner`: the instance that reads it. `wait`: what it waits for. `paused`: by the
    application.
    """
    error = entry.error or (partition.error if partition else None)
    if entry.state in _READ_NO_MORE:
        error = None  # of requests that nobody makes again
    cursor = None if new or entry.position is None else entry.position.cursor
    waits_for = entry.waits_for if entry.state is State.WAITING else ()
    text, since = str(error) if error else None, since if error else None
    if partition is None:
        return PartitionStatus(
            partition=entry.id,
            state=_state(entry, error, unsaved=unsaved, paused=paused),
            cursor=cursor,
            waits_for=waits_for,
            caught_up=entry.state is State.DRAINED or None,
            error=text,
            since=since,
            owner=owner,
            wait=wait,
        )
    caught_up = None
    if error is None and (partition.last_contact or entry.state is State.DRAINED):
        caught_up = partition.is_caught_up
    if entry.state is State.ELSEWHERE:
        caught_up = None
    handling = partition.handling
    hanging_since = handling.in_flight_since if handling.hangs else None
    state = _state(entry, error or handling.error, unsaved=unsaved, paused=paused)
    if state is PartitionState.CAUGHT_UP and handling.hangs:
        state = PartitionState.READING  # all is read, but the application does not get on with it
    return PartitionStatus(
        partition=entry.id,
        state=state,
        cursor=cursor,
        waits_for=waits_for,
        caught_up=caught_up,
        error=text or handling.error or handling.hangs,
        since=since or handling.since or hanging_since,
        owner=owner,
        wait=wait,
        # Another instance knows how far behind it is.
        caught_up_at=None if entry.state is State.ELSEWHERE else partition.caught_up_at,
        retry_at=partition.failures.retry_at if error is not None else handling.retry_at,
        events=partition.events,
        last_event=partition.last_event,
        last_contact=partition.last_contact,
        unknown_commands=partition.unknown_commands,
        fetch_failures=partition.failures.total,
        handler_failures=handling.failures,
        attempts=handling.attempts,
        quarantined=handling.quarantined,
        passed_over=handling.passed_over,
        in_flight_since=handling.in_flight_since,
        committed_at=handling.committed_at,
        evidence_since=partition.evidence_since,
    )


def _state(
    entry: Entry, error: FeedError | str | None, *, unsaved: bool, paused: bool
) -> PartitionState:
    """Return the state for `status()`: the planner's, paused, or retrying while requests fail."""
    if entry.running and paused:
        return PartitionState.PAUSED
    if entry.running and error is not None:
        return PartitionState.RETRYING
    if entry.state is State.SUPERSEDED and unsaved:
        return PartitionState.READING  # its successors hold its cursor only after the save
    return _STATES[entry.state]
