"""What a person would ask a running consumer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from feedapi_client.lineage.planner import Entry, State
from feedapi_client.runtime.partition import Worker


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition at one moment.

    `state` is one of ``waiting for N``, ``reading``, ``caught up``, ``retrying``, ``parked``, ``drained``, ``superseded``, ``vanished``.
    `cursor` is the committed one. `lag` is 0 where the partition was at its end at the time of `last_contact`, otherwise "unknown": a cursor is opaque,
    so the events behind it can't be counted. `error` says why a partition retries or is parked, `since` when that began. Times are UTC.
    """

    partition: int
    state: str
    cursor: str | None
    events: int = 0
    last_event: datetime | None = None
    last_contact: datetime | None = None
    lag: int | Literal["unknown"] = "unknown"
    waits_for: tuple[int, ...] = ()
    error: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A snapshot of a consumer: the dialect, the bytes received and not yet taken, each partition by id, and the latest reports, oldest first."""

    feed: str
    dialect: str | None = None
    buffered_bytes: int = 0
    partitions: dict[int, PartitionStatus] = field(default_factory=dict)
    reports: tuple[str, ...] = ()

    @property
    def events(self) -> int:
        """Events delivered over all partitions."""
        return sum(p.events for p in self.partitions.values())

    def __getitem__(self, partition: int) -> PartitionStatus:
        return self.partitions[partition]


def partition_status(
    entry: Entry, worker: Worker | None, since: datetime | None
) -> PartitionStatus:
    """What planner and worker know of one partition, in the words of `PartitionStatus`."""
    error = entry.error or (worker.error if worker else None)
    state = entry.state.value
    if entry.state is State.WAITING and entry.waits_for:
        state = f"waiting for {', '.join(map(str, entry.waits_for))}"
    elif entry.running and error is not None:
        state = "retrying"
    committed = worker is None or entry.cursor == worker.read_cursor
    at_end = entry.state in (State.CAUGHT_UP, State.DRAINED) and committed and error is None
    return PartitionStatus(
        partition=entry.id,
        state=state,
        cursor=entry.position.cursor if entry.position else None,
        events=worker.events if worker else 0,
        last_event=worker.last_event if worker else None,
        last_contact=worker.contact if worker else None,
        lag=0 if at_end else "unknown",
        waits_for=entry.waits_for if entry.state is State.WAITING else (),
        error=str(error) if error else None,
        since=since if error else None,
    )
