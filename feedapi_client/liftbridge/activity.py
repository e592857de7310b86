"""The activity stream: what a cluster says of changes to its streams and consumer groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import DecodeError
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.liftbridge_errors import StreamError
from feedapi_client.liftbridge.messages_pb2 import Message

ACTIVITY_STREAM = "__activity"


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
        kind: what happened.
        streams: the streams that it is about.
        partitions: the partitions; empty where all are meant.
        group, consumer: the consumer group, and its member.
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
    field, kind = _FIELDS[event.op]
    change = getattr(event, field)
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
