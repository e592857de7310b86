"""Feeds onto Liftbridge: the envelope, an acked publisher over NATS, the relay, and the broker's gRPC API. Needs the extra ``liftbridge``.

Everything here that talks to a broker needs asyncio, since nats-py and grpc.aio do.
"""

try:
    import google_crc32c as _google_crc32c
    import gufo.liftbridge as _gufo
    import nats as _nats
    from google import protobuf as _protobuf
except ImportError as error:
    raise ImportError(
        f"feedapi_client.liftbridge needs its extra: pip install 'feedapi-client[liftbridge]' (missing: {error.name})"
    ) from error

from feedapi_client.liftbridge.api import LiftbridgeApi, PartitionMetadata, StreamMetadata
from feedapi_client.liftbridge.envelope import (
    AckError,
    AckPolicy,
    Envelope,
    MsgType,
    decode,
    encode,
)
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    EncryptionError,
    EnvelopeError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
    RelayFencedError,
    StreamError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.pending import PublisherStats
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.reader import RelayedBatch, RelayReader, RowId, row_id
from feedapi_client.liftbridge.relay import Relay, RelayProgress
from feedapi_client.liftbridge.stream_store import OutgoingBatch, StreamCursorStore
from feedapi_client.liftbridge.streams import ANY_OFFSET, Stream, key_partition

__all__ = [
    "ANY_OFFSET",
    "Ack",
    "AckError",
    "AckPolicy",
    "AckTimeoutError",
    "BrokerUnavailableError",
    "EncryptionError",
    "Envelope",
    "EnvelopeError",
    "IncorrectOffsetError",
    "LiftbridgeApi",
    "LiftbridgeError",
    "LiftbridgePublisher",
    "Message",
    "MessageTooLargeError",
    "MsgType",
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
    "StreamMetadata",
    "decode",
    "encode",
    "key_partition",
    "row_id",
]

del _google_crc32c, _gufo, _nats, _protobuf
