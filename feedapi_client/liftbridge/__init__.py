"""Publish feeds to Liftbridge. Needs the extra ``liftbridge``.

The envelope codec, a publisher over NATS with acks, the relay and its reader, and the broker's gRPC
API. All that connects to a broker needs asyncio, because nats-py and grpc.aio do.
"""

try:
    import google_crc32c as _google_crc32c
    import gufo.liftbridge as _gufo
    import nats as _nats
    from google import protobuf as _protobuf
except ImportError as error:
    raise ImportError(
        "feedapi_client.liftbridge needs its extra: "
        f"pip install 'feedapi-client[liftbridge]' (missing: {error.name})"
    ) from error

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import (
    AckError,
    AckPolicy,
    Envelope,
    MsgType,
    decode,
    encode,
)
from feedapi_client.liftbridge.groups import GroupConsumer
from feedapi_client.liftbridge.ledger import reveal_newest
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    EncryptionError,
    EnvelopeError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
    RelayFencedError,
    StreamError,
    StreamGapError,
    StreamPausedError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.message_publisher import LiftbridgePublisher, PublisherStats
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.reader import RelayedBatch, RelayReader
from feedapi_client.liftbridge.relay import OnOversized, Relay, RelayProgress
from feedapi_client.liftbridge.stream_format import OutgoingBatch, RowId, row_id
from feedapi_client.liftbridge.stream_model import (
    ANY_OFFSET,
    ActivityEvent,
    ActivityKind,
    BrokerMetadata,
    ClusterMetadata,
    ConsumerGroupMetadata,
    EventTimes,
    PartitionMetadata,
    Stream,
    StreamMetadata,
    StreamOptions,
    key_partition,
)
from feedapi_client.liftbridge.stream_store import StreamCursorStore

__all__ = [
    "ANY_OFFSET",
    "Ack",
    "AckError",
    "AckPolicy",
    "AckTimeoutError",
    "ActivityEvent",
    "ActivityKind",
    "BrokerMetadata",
    "BrokerUnavailableError",
    "ClusterMetadata",
    "ConsumerGroupMetadata",
    "EncryptionError",
    "Envelope",
    "EnvelopeError",
    "EventTimes",
    "GroupConsumer",
    "IncorrectOffsetError",
    "LiftbridgeApi",
    "LiftbridgeError",
    "LiftbridgePublisher",
    "Message",
    "MessageTooLargeError",
    "MsgType",
    "NoStreamError",
    "OnOversized",
    "OutgoingBatch",
    "PartitionMetadata",
    "PublishError",
    "PublishRefusedError",
    "PublisherStats",
    "Relay",
    "RelayFencedError",
    "RelayProgress",
    "RelayReader",
    "RelayedBatch",
    "RowId",
    "Stream",
    "StreamCursorStore",
    "StreamError",
    "StreamGapError",
    "StreamMetadata",
    "StreamOptions",
    "StreamPausedError",
    "StreamReadonlyError",
    "decode",
    "encode",
    "key_partition",
    "reveal_newest",
    "row_id",
]

del _google_crc32c, _gufo, _nats, _protobuf
