"""What `FeedConsumer.status` returns: a snapshot of every partition, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum


class PartitionState(StrEnum):
    """Where a partition stands."""

    WAITING = "waiting"
    """Other partitions come first: see `PartitionStatus.waits_for`."""
    READING = "reading"
    CAUGHT_UP = "caught up"
    """At the present end of an open partition."""
    RETRYING = "retrying"
    """The last request failed; see `PartitionStatus.error` and `PartitionStatus.retry_at`."""
    PARKED = "parked"
    """It failed for good, or descends from one that did (``on_error="park"``)."""
    DRAINED = "drained"
    """Closed, and committed to its end."""
    SUPERSEDED = "superseded"
    """Its successors hold its cursor."""
    VANISHED = "vanished"
    """Open, no longer listed, and without a successor."""
    ELSEWHERE = "elsewhere"
    """Another instance reads it: see `PartitionStatus.owner`."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition at one moment. Times are UTC.

    A cursor is opaque: the events behind it can't be counted, and no number is invented.
    """

    partition: int
    state: PartitionState
    cursor: str | None
    """The committed cursor; None when nothing ever was committed."""
    waits_for: tuple[int, ...] = ()
    """The partitions that have to be drained first, or whose batch in flight decides the cursor."""
    caught_up: bool | None = None
    """Whether everything that the publisher had at `last_contact` is committed; None where that
    can't be known, as before the first answer and while requests fail."""
    caught_up_at: datetime | None = None
    """When it was last caught up."""
    retry_at: datetime | None = None
    """When a partition that is retrying is asked again."""
    error: str | None = None
    """Why it retries or is parked."""
    since: datetime | None = None
    """When that began."""
    owner: str | None = None
    """The instance that reads it, where several share the feed."""
    events: int = 0
    """Events delivered in this iteration."""
    last_event: datetime | None = None
    last_contact: datetime | None = None
    """When the publisher last answered a request for it."""

    @property
    def behind_seconds(self) -> float | None:
        """Seconds since it was last caught up; None before the first time."""
        if self.caught_up_at is None:
            return None
        return max(0.0, (datetime.now(UTC) - self.caught_up_at).total_seconds())


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A snapshot of a consumer.

    `buffered_bytes` were received and not yet taken, `reports` are the latest ones, oldest first.
    """

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
