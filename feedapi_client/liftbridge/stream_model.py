"""Streams: what they are called, how they are made, what a cluster says of them, their headers."""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum

from google.protobuf.message import DecodeError
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.liftbridge_errors import StreamError
from feedapi_client.liftbridge.messages_pb2 import Message

ANY_OFFSET = -1
"""The expected offset that disables the check of optimistic concurrency control."""
REPLICATION_LIMIT = 1_048_576
"""The largest message in bytes that a broker replicates by default."""
SNAPSHOT_MESSAGES = 10_000
"""Messages after which a relay that is exactly once writes all its positions again."""
SNAPSHOT_BYTES = 64 * 1024 * 1024
"""Bytes after which it does."""
SNAPSHOT_SECONDS = 3600.0
"""Seconds after which it does, also while its feed is idle."""
ACTIVITY_STREAM = "__activity"

_NAME_BYTES = 255
"""The longest name of a folder: the broker keeps a stream in one of the stream's name."""
_SUBJECT_BYTES = 2048
"""Half of the line of 4,096 bytes in which NATS takes a subject and the subject of its reply."""
_NAME = re.compile(r"[^\s*>./\\\x00-\x1f\x7f]+(\.[^\s*>./\\\x00-\x1f\x7f]+)*")
_SUBJECT = re.compile(r"[^.\x00-\x20\x7f]+(\.[^.\x00-\x20\x7f]+)*")
_TIMES = 4
"""How often a ledger has to keep what is written from one snapshot to the next one: a broker
removes whole segments, of which the newest may just have begun, and a batch may be long."""
_USUAL_SEGMENT = 256 * 1024 * 1024
"""The broker's default for the bytes of a segment."""
_SMALLEST_MESSAGE = 128
"""Bytes that a message of a ledger takes at least, with its headers."""


# ------------------------------------------------------------------ names


def key_partition(key: bytes, partitions: int) -> int:
    """Return the usual partition of a key: its CRC-32 (IEEE) modulo their number."""
    return zlib.crc32(key) % partitions


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream by name, on a NATS subject (by default its name), with so many partitions.

    Raises ValueError when no broker can have a stream of that name or subject.
    """

    name: str
    subject: str = ""
    partitions: int = 1

    def __post_init__(self) -> None:
        if self.partitions < 1:
            raise ValueError(f"a stream needs at least one partition, not {self.partitions}")
        # Liftbridge 1.9.0 ends with a panic, and for ever because the name is in its Raft log: over
        # a wildcard, over what can't be the name of a folder, over a subject that NATS refuses.
        if _NAME.fullmatch(self.name) is None or len(self.name.encode()) > _NAME_BYTES:
            raise ValueError(
                f"{self.name[:40]!r} can't be the name of a stream: it is made of parts without "
                "spaces, wildcards (* and >) and slashes, with dots between them, and has at most "
                f"{_NAME_BYTES} bytes"
            )
        subject = self.subject or self.name
        object.__setattr__(self, "subject", subject)
        *parts, last = subject.split(".")
        further = last == ">" and self.partitions > 1  # append their number to it
        if not _is_subject(subject) or ">" in parts or further:
            raise ValueError(
                f"{subject[:40]!r} can't be the subject of a stream with {self.partitions} "
                "partitions: it is made of parts without spaces, with dots between them, > is the "
                f"last part, of one partition, and it has at most {_SUBJECT_BYTES:,} bytes"
            )

    def subject_of(self, partition: int) -> str:
        """Return the NATS subject of a partition. Raises ValueError for an unknown partition."""
        if not 0 <= partition < self.partitions:
            raise ValueError(
                f"stream {self.name} has the partitions 0 to {self.partitions - 1}, not {partition}"
            )
        return f"{self.subject}.{partition}" if partition else self.subject

    def partition_of(self, key: bytes | None) -> int:
        """Return the partition that `key` belongs to; 0 without a key."""
        return key_partition(key, self.partitions) if key is not None else 0


def check_publishable(subject: str) -> None:
    """Raise ValueError for a subject that nothing can be published to.

    NATS takes the message, and nobody gets it: a part that is * or > is no wildcard there.
    """
    if not _is_subject(subject) or {"*", ">"} & set(subject.split(".")):
        raise ValueError(
            f"{subject[:40]!r} is no subject that can be published to: it is made of parts without "
            "spaces, with dots between them, and none of them is * or >"
        )


def _is_subject(subject: str) -> bool:
    return _SUBJECT.fullmatch(subject) is not None and len(subject.encode()) <= _SUBJECT_BYTES


# ------------------------------------------------------------------ new streams


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a new stream does with its messages. None leaves an option to the broker's settings.

    Attributes:
        group: the NATS queue group; a message goes to one stream of the group.
        retention_bytes, retention_messages, retention_seconds: the oldest segments are removed
            when a partition has more. 0: no limit.
        cleaner_seconds: the interval of removing and compacting.
        segment_bytes, segment_seconds: when a new segment begins.
        compact: keep the newest message of each key only.
        compact_goroutines: how many of the broker's goroutines compact a partition at once.
        auto_pause_seconds: pause a partition that got no message for so long. 0: never.
        auto_pause_unless_subscribed: do not pause while somebody is subscribed.
        encryption: encrypt values; the broker needs a key.
    """

    group: str = ""
    retention_bytes: int | None = None
    retention_messages: int | None = None
    retention_seconds: float | None = None
    cleaner_seconds: float | None = None
    segment_bytes: int | None = None
    segment_seconds: float | None = None
    compact: bool | None = None
    compact_goroutines: int | None = None
    auto_pause_seconds: float | None = None
    auto_pause_unless_subscribed: bool | None = None
    encryption: bool | None = None

    def __post_init__(self) -> None:
        # With a negative interval, or a group that NATS refuses, a broker ends with a panic when it
        # makes the stream, and each time when it is started again (Liftbridge 1.9.0).
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{each.name} must be a number that is not negative, not {value}")
        if any(character.isspace() for character in self.group):
            raise ValueError(f"the group of a stream has no spaces, and {self.group!r} has")

    def write_to(self, request: api_pb2.CreateStreamRequest) -> None:
        request.group = self.group
        for name, value in (
            ("retentionMaxBytes", self.retention_bytes),
            ("retentionMaxMessages", self.retention_messages),
            ("retentionMaxAge", _milliseconds(self.retention_seconds)),
            ("cleanerInterval", _milliseconds(self.cleaner_seconds)),
            ("segmentMaxBytes", self.segment_bytes),
            ("segmentMaxAge", _milliseconds(self.segment_seconds)),
            ("compactEnabled", self.compact),
            ("compactMaxGoroutines", self.compact_goroutines),
            ("autoPauseTime", _milliseconds(self.auto_pause_seconds)),
            ("autoPauseDisableIfSubscribers", self.auto_pause_unless_subscribed),
            ("encryption", self.encryption),
        ):
            if value is not None:
                # The assignment of a default value would leave the option unset.
                getattr(request, name).SetInParent()
                getattr(request, name).value = value

    def for_ledger(self) -> StreamOptions:
        """Return options with which an idle relay keeps its positions. Raises ValueError."""
        if self.compact or self.retention_seconds:
            raise ValueError(
                "a stream with concurrency control is neither compacted nor cleaned by age: a "
                "relay that is exactly once keeps its cursors there, and would lose them while it "
                "is stopped. Use retention_messages or retention_bytes"
            )
        least = {
            "retention_messages": _TIMES * SNAPSHOT_MESSAGES,
            "retention_bytes": _TIMES * SNAPSHOT_BYTES,
        }
        for name, needed in least.items():
            if 0 < (kept := getattr(self, name) or 0) < needed:
                raise ValueError(
                    f"{name}={kept:,} is too little for a stream with concurrency control: a relay "
                    f"that is exactly once would lose its positions. Keep {needed:,}, or all (0)"
                )
        kept_bytes = (self.retention_bytes, (self.retention_messages or 0) * _SMALLEST_MESSAGE)
        largest = min((limit // _TIMES for limit in kept_bytes if limit), default=_USUAL_SEGMENT)
        segment = self.segment_bytes
        if any(kept_bytes) and (segment or 0) > largest:
            raise ValueError(
                f"segment_bytes={segment:,} is too much beside what is kept: a broker "
                f"removes whole segments. It is at most {largest:,}; by default it fits"
            )
        if not segment and largest < _USUAL_SEGMENT:
            segment = largest
        return replace(
            self,
            compact=False,
            auto_pause_seconds=self.auto_pause_seconds or 0,
            retention_seconds=0,
            segment_bytes=segment,
        )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


# ------------------------------------------------------------------ what a cluster says


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """A broker: its gRPC API, and how many partitions it has a replica of, or leads."""

    id: str
    address: str
    partitions: int = 0
    leaders: int = 0


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When something happened to a partition for the first and for the last time; None: never."""

    first: datetime | None = None
    latest: datetime | None = None


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """The state of a partition of a stream.

    Attributes:
        leader, replicas, isr: ids of brokers; `isr` are the in-sync replicas.
        high_watermark: the offset up to which readers see messages; -1 while it is empty. After a
            restart of the broker it can be below `newest_offset` until something is published.
        newest_offset: -1 while it is empty.
        paused: whether the broker paused it; in `StreamMetadata` whether it ever was: the broker
            does not take that back.
        messages_received: when its leader received messages, since it leads.
        pauses: when it was paused or resumed, since its broker runs.
        readonly_changes: when it was made read-only, or writable again.
    """

    id: int
    leader: str
    replicas: tuple[str, ...]
    isr: tuple[str, ...]
    high_watermark: int
    newest_offset: int
    paused: bool
    readonly: bool
    messages_received: EventTimes = EventTimes()
    pauses: EventTimes = EventTimes()
    readonly_changes: EventTimes = EventTimes()


@dataclass(frozen=True, slots=True)
class StreamMetadata:
    """A stream as the cluster describes it, and when it was created.

    The offsets of its partitions are not filled in: see `LiftbridgeApi.partition_metadata`.
    """

    stream: Stream
    partitions: dict[int, PartitionMetadata]
    created: datetime | None = None


@dataclass(frozen=True, slots=True)
class ConsumerGroupMetadata:
    """A consumer group: its id, the id of the broker that coordinates it, and its epoch."""

    id: str
    coordinator: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """Brokers by id, streams by name, and the consumer groups that were asked for, by id."""

    brokers: dict[str, BrokerMetadata]
    streams: dict[str, StreamMetadata] = field(default_factory=dict)
    groups: dict[str, ConsumerGroupMetadata] = field(default_factory=dict)


def cluster_metadata(response: api_pb2.FetchMetadataResponse) -> ClusterMetadata:
    """Decode an answer of the broker. Streams and groups that it doesn't know are left out."""
    cluster = ClusterMetadata(
        {
            each.id: BrokerMetadata(
                each.id, f"{each.host}:{each.port}", each.partitionCount, each.leaderCount
            )
            for each in response.brokers
        }
    )
    for found in response.streamMetadata:
        if found.error == api_pb2.StreamMetadata.OK:
            partitions = {id: partition_metadata(each) for id, each in found.partitions.items()}
            stream = Stream(found.name, found.subject, max(len(partitions), 1))
            cluster.streams[found.name] = StreamMetadata(
                stream, partitions, _moment(found.creationTimestamp)
            )
    for group in response.groupMetadata:
        if group.error == api_pb2.ConsumerGroupMetadata.OK:
            cluster.groups[group.groupId] = ConsumerGroupMetadata(
                group.groupId, group.coordinator, group.epoch
            )
    return cluster


def partition_metadata(found: api_pb2.PartitionMetadata) -> PartitionMetadata:
    return PartitionMetadata(
        found.id,
        found.leader,
        tuple(found.replicas),
        tuple(found.isr),
        int(found.highWatermark),
        int(found.newestOffset),
        bool(found.paused),
        bool(found.readonly),
        _times(found.messagesReceivedTimestamps),
        _times(found.pauseTimestamps),
        _times(found.readonlyTimestamps),
    )


def _times(found: api_pb2.PartitionEventTimestamps) -> EventTimes:
    return EventTimes(_moment(found.firstTimestamp), _moment(found.latestTimestamp))


def _moment(nanoseconds: int) -> datetime | None:
    # The broker sends the nanoseconds of its zero time where there is none, which is negative.
    return None if nanoseconds <= 0 else datetime.fromtimestamp(nanoseconds / 1e9, UTC)


# ------------------------------------------------------------------ the activity stream


class ActivityKind(StrEnum):
    """What happened."""

    CREATE_STREAM = "create-stream"
    DELETE_STREAM = "delete-stream"
    PAUSE_STREAM = "pause-stream"
    RESUME_STREAM = "resume-stream"
    SET_STREAM_READONLY = "set-stream-readonly"
    JOIN_CONSUMER_GROUP = "join-consumer-group"
    LEAVE_CONSUMER_GROUP = "leave-consumer-group"
    UNKNOWN = "unknown"
    """Something that a newer broker tells."""


@dataclass(frozen=True, slots=True)
class ActivityEvent:
    """A change in the cluster.

    Attributes:
        offset: its offset in the activity stream.
        id: the index of the change in the log of the cluster. The broker may tell one twice.
        partitions: empty where all are meant.
        readonly: whether the partitions became read-only, or writable again.
        resume_all: whether what wakes one of the paused partitions wakes all.
        expired: whether the member did not leave by itself.
    """

    offset: int
    id: int
    kind: ActivityKind
    streams: tuple[str, ...] = ()
    partitions: tuple[int, ...] = ()
    group: str = ""
    consumer: str = ""
    readonly: bool = False
    resume_all: bool = False
    expired: bool = False


_FIELDS = {
    api_pb2.CREATE_STREAM: ("createStreamOp", ActivityKind.CREATE_STREAM),
    api_pb2.DELETE_STREAM: ("deleteStreamOp", ActivityKind.DELETE_STREAM),
    api_pb2.PAUSE_STREAM: ("pauseStreamOp", ActivityKind.PAUSE_STREAM),
    api_pb2.RESUME_STREAM: ("resumeStreamOp", ActivityKind.RESUME_STREAM),
    api_pb2.SET_STREAM_READONLY: ("setStreamReadonlyOp", ActivityKind.SET_STREAM_READONLY),
    api_pb2.JOIN_CONSUMER_GROUP: ("joinConsumerGroupOp", ActivityKind.JOIN_CONSUMER_GROUP),
    api_pb2.LEAVE_CONSUMER_GROUP: ("leaveConsumerGroupOp", ActivityKind.LEAVE_CONSUMER_GROUP),
}


def activity_event(message: Message) -> ActivityEvent:
    """Decode a message of the activity stream. Raises `StreamError` for any other."""
    try:
        event = api_pb2.ActivityStreamEvent.FromString(message.value)
    except DecodeError as error:
        raise StreamError(
            f"the message at offset {message.offset} is no event of the cluster",
            stream=ACTIVITY_STREAM,
        ) from error
    if event.op not in _FIELDS:
        return ActivityEvent(message.offset, int(event.id), ActivityKind.UNKNOWN)
    name, kind = _FIELDS[event.op]
    change = getattr(event, name)
    stream = getattr(change, "stream", "")
    partitions = getattr(change, "partitions", ())
    # A new stream has a number of partitions, and all others name them.
    numbers = range(partitions) if isinstance(partitions, int) else partitions
    return ActivityEvent(
        message.offset,
        int(event.id),
        kind,
        (stream,) if stream else tuple(getattr(change, "streams", ())),
        tuple(numbers),
        getattr(change, "groupId", ""),
        getattr(change, "consumerId", ""),
        getattr(change, "readonly", False),
        getattr(change, "resumeAll", False),
        getattr(change, "expired", False),
    )
