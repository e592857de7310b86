"""What each partition waits for. One that waits for nothing here is stalled."""

from __future__ import annotations

from feedapi_client.lineage.planner import Entry, State
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.status import PartitionWait

_ENDED = (State.DRAINED, State.SUPERSEDED, State.PARKED, State.VANISHED)


def is_over(entry: Entry, *, follow: bool) -> bool:
    """Whether a partition waits for nothing because nothing of it is to be read."""
    return entry.state in _ENDED or (entry.state is State.CAUGHT_UP and not follow)


def wait_of(
    driver: Driver, entry: Entry, partition: RuntimePartition | None
) -> PartitionWait | None:
    """Return what a partition waits for in a session that runs; None if that has no name.

    Each wait is looked at, and not just remembered: a partition for which nobody will do anything
    any more has none. `partition` is None for one that was never read in this session.
    """
    if partition is not None:
        wait = _for_application(partition)
        if wait is not None:
            return wait
    if entry.state is State.WAITING:
        return PartitionWait.PARENT
    if entry.state is State.ELSEWHERE:
        return PartitionWait.LEASE
    if is_over(entry, follow=driver.settings.follow):
        return None
    if entry.id in driver.paused:
        return PartitionWait.RESUME
    wait = None if partition is None else _for_publisher(driver, partition)
    if wait is None and driver.applying:
        return PartitionWait.SAVE  # one of the planner's actions, which are carried out in turn
    return wait


def _for_application(partition: RuntimePartition) -> PartitionWait | None:
    if partition.committing:
        return PartitionWait.SAVE
    if partition.in_flight:
        if partition.handling.attempt_began is not None:
            return PartitionWait.APPLICATION
        return PartitionWait.RETRY if partition.handling.retry_at else PartitionWait.SAVE
    if partition.deliverable and partition.queued:
        return PartitionWait.DELIVERY
    return PartitionWait.COMMIT if partition.at_end else None


def _for_publisher(driver: Driver, partition: RuntimePartition) -> PartitionWait | None:
    if partition.slot is not None and partition.slot.waits_for_room:
        return PartitionWait.BUFFER
    scheduled = driver.scheduler.is_scheduled(partition)
    if partition.evidence_since is not None and (partition.slot is not None or scheduled):
        return PartitionWait.EVIDENCE
    if partition.slot is not None:
        return PartitionWait.RESPONSE
    if scheduled:
        pauses = driver.scheduler.pauses_until(partition) is not None
        return PartitionWait.PAUSE if pauses else PartitionWait.SLOT
    return PartitionWait.DISCOVERY if partition.failures.refused else None
