"""What `FeedConsumer.status` and `FeedConsumer.health` return: snapshots in plain values."""

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
    """At the present end of an open partition. `PartitionStatus.caught_up` says whether all before
    it is committed."""
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
    PAUSED = "paused"
    """The application has paused it: see `FeedConsumer.pause`."""


class PartitionWait(StrEnum):
    """What a partition waits for."""

    SLOT = "slot"
    """One of the `Limits.max_concurrent_fetches` places for requests."""
    RESPONSE = "response"
    """The publisher: a request is under way."""
    BUFFER = "buffer"
    """Room in the buffer: the application takes less than the publisher sends."""
    PAUSE = "pause"
    """The next poll, or the next attempt after a failure."""
    EVIDENCE = "evidence of its end"
    """More empty answers of a closed partition without `lastCursor`, see rule R6:
    `PartitionStatus.evidence_since` says since when."""
    DISCOVERY = "discovery"
    """A new discovery, after a request was refused."""
    DELIVERY = "delivery"
    """The application, to ask for the next batch."""
    APPLICATION = "application"
    """The application, which handles a batch."""
    RETRY = "retry"
    """The next attempt of a handler that failed."""
    COMMIT = "commit"
    """The application, to commit what it has got."""
    SAVE = "save"
    """The cursor store: a save is under way."""
    PARENT = "parent"
    """Other partitions: see `PartitionStatus.waits_for`."""
    LEASE = "lease"
    """A lease: another instance has it, or nobody yet."""
    RESUME = "resume"
    """The application, to call `FeedConsumer.resume`."""


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
    """Why it retries or is parked, or that its handler hangs. Never a payload."""
    since: datetime | None = None
    """When that began."""
    owner: str | None = None
    """The instance that reads it, where several share the feed."""
    events: int = 0
    """Events delivered in this iteration."""
    last_event: datetime | None = None
    last_contact: datetime | None = None
    """When the publisher last answered a request for it."""
    wait: PartitionWait | None = None
    """What it waits for. None for one that is read no more, and while nobody iterates."""
    unknown_commands: int = 0
    """Lines received in this iteration that were neither an event nor a checkpoint."""
    fetch_failures: int = 0
    """Requests that failed or were refused in this iteration."""
    handler_failures: int = 0
    """Times that the handler raised in this iteration."""
    attempts: int = 0
    """Times that the batch in flight was given to the handler; 0 without a batch in flight."""
    quarantined: int = 0
    """Events put into quarantine in this iteration."""
    passed_over: int = 0
    """Events not handled in this iteration, because one with their `event_id` is done already."""
    in_flight_since: datetime | None = None
    """When the batch in flight was delivered; None without one."""
    committed_at: datetime | None = None
    """When a cursor was last saved in this iteration."""
    evidence_since: datetime | None = None
    """Since when a closed partition without `lastCursor` has seemed to be at its end, and waits for
    evidence of that; None otherwise."""

    @property
    def behind_seconds(self) -> float | None:
        """Seconds since it was last caught up.

        None before the first time, and for a partition that this consumer reads no more.
        """
        return None if self.state in _READ_NO_MORE else _seconds_since(self.caught_up_at)

    @property
    def in_flight_seconds(self) -> float | None:
        """Seconds for which the application has had the batch in flight; None without one."""
        return _seconds_since(self.in_flight_since)

    @property
    def evidence_seconds(self) -> float | None:
        """Seconds for which evidence of its end is awaited; None where it is not."""
        return _seconds_since(self.evidence_since)

    @property
    def commit_age_seconds(self) -> float | None:
        """Seconds since the last commit of this iteration; None before the first one."""
        return _seconds_since(self.committed_at)


_READ_NO_MORE = (
    PartitionState.DRAINED,
    PartitionState.SUPERSEDED,
    PartitionState.VANISHED,
    PartitionState.ELSEWHERE,
)


def _seconds_since(time: datetime | None) -> float | None:
    return None if time is None else max(0.0, (datetime.now(UTC) - time).total_seconds())


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
    began: datetime | None = None
    """When this iteration was opened."""

    @property
    def events(self) -> int:
        """Events delivered over all partitions."""
        return sum(p.events for p in self.partitions.values())

    def __getitem__(self, partition: int) -> PartitionStatus:
        return self.partitions[partition]


class ProblemName(StrEnum):
    """The names of problems. The first ones say that something hangs."""

    HANDLER_STUCK = "handler-stuck"
    """The application has had a batch, or in a loop over events an event, for longer than
    `Limits.stall_timeout`."""
    STORE_STUCK = "store-stuck"
    """An operation of the cursor store takes longer than `Limits.stall_timeout`."""
    FETCH_STUCK = "fetch-stuck"
    """A request shows no sign of life for longer than `Limits.stall_timeout`."""
    DISCOVERY_STUCK = "discovery-stuck"
    """A discovery takes, or is overdue for, longer than `Limits.stall_timeout`."""
    STALLED = "stalled"
    """A partition waits for nothing that has a name, for longer than `Limits.stall_timeout`."""
    EVENT_LOOP_BLOCKED = "event-loop-blocked"
    """Something has kept the event loop from running for longer than `Limits.stall_timeout`."""
    HANDLER_FAILING = "handler-failing"
    """The handler raises, and is called again with the same batch."""
    FETCH_FAILING = "fetch-failing"
    """The requests of a partition fail, and are repeated."""
    DISCOVERY_FAILING = "discovery-failing"
    """The discoveries fail, and are repeated. The last good one counts."""
    UNCOMMITTED = "uncommitted"
    """A closed partition is read to its end, and the application has not committed that for longer
    than `Limits.stall_timeout`. Its children wait for it."""
    END_UNPROVEN = "end-unproven"
    """A closed partition without `lastCursor` seems to be at its end, and evidence of that is late
    by 60 seconds: its requests, the discoveries or half of the feed's answers fail again and again.
    Its children wait for it."""
    PARKED = "parked"
    """A partition can't go on (``on_error="park"``)."""
    VANISHED = "vanished"
    """An open partition is not listed any more, and has no successor."""
    ROLLED_BACK = "rolled-back"
    """A partition that was drained, or whose successors hold its cursor, is listed as open again:
    the publisher may have been rolled back. The consumer is not ready until that has passed or the
    cursor was moved back (``feedapi cursors restore``)."""
    FAILED = "failed"
    """An error has ended the iteration."""
    NOT_OPEN = "not-open"
    """The consumer is not entered, not through with entering, or left."""
    NOT_ITERATING = "not-iterating"
    """The consumer is open and nobody iterates, so that nothing is fetched."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a consumer, or one partition, from going on.

    Attributes:
        name: what kind of problem it is; the names do not change.
        partition: the partition that has it; None if it concerns the whole consumer.
        since: when it began, in UTC.
        text: what happened, for people. Without secrets and payloads.
    """

    name: ProblemName
    partition: int | None
    since: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a consumer works.

    Attributes:
        live: False if only a new process helps: something hangs that the consumer can't restart,
            or an error has ended the iteration.
        ready: whether the consumer makes progress or is at the end of the feed: the feed is
            discovered, somebody iterates, and no problem concerns the whole consumer. False while
            requests fail and no partition was answered soundly for 60 seconds, and while every
            handler fails.
        problems: what is wrong, the oldest first, and all of it: an outage makes each of up to
            32,768 partitions fail. A problem of a single partition that passes by itself, such as a
            handler that fails and is called again, leaves the consumer live, and ready where others
            get on.
    """

    live: bool
    ready: bool
    problems: tuple[Problem, ...] = ()
