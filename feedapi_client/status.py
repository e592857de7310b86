"""What a person would ask a running consumer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal


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
