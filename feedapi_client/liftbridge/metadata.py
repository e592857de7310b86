"""What a cluster says of its brokers, streams, partitions and consumer groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.stream_name import Stream


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """A broker of the cluster.

    Attributes:
        id: its id, as in `PartitionMetadata.leader`.
        address: its gRPC API as ``host:port``.
        partitions: how many partitions it has a replica of.
        leaders: how many partitions it leads.
    """

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
        id: the partition.
        leader, replicas, isr: ids of brokers; `isr` are the in-sync replicas.
        high_watermark: the offset up to which readers see messages; -1 while it is empty. After a
            restart of the broker it can be below `newest_offset` until something is published.
        newest_offset: the offset of the newest message; -1 while it is empty.
        paused: whether the broker paused it. Without offsets, in `StreamMetadata`, whether it was
            ever paused: the broker does not take that back.
        readonly: whether it takes no messages.
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
            broker.id: BrokerMetadata(
                broker.id,
                f"{broker.host}:{broker.port}",
                broker.partitionCount,
                broker.leaderCount,
            )
            for broker in response.brokers
        }
    )
    for found in response.streamMetadata:
        if found.error == api_pb2.StreamMetadata.OK:
            partitions = {
                partition: partition_metadata(metadata)
                for partition, metadata in found.partitions.items()
            }
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
    """Decode the metadata of a partition."""
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
