"""The errors of `feedapi_client.liftbridge`::

FeedError
└── LiftbridgeError
    ├── EnvelopeError                bytes that are no envelope, or not of the expected type
    ├── BrokerUnavailableError       NATS or the gRPC API can't be reached
    ├── StreamError                  a stream is missing, or is not what it has to be
    │   ├── StreamPausedError            the broker paused the partition
    │   ├── StreamReadonlyError          the partition takes no messages
    │   └── StreamGapError               messages that are needed are missing
    ├── RelayFencedError             another relay writes the same stream (a FencedError too)
    └── PublishError                 a message was not stored, or may not have been
        ├── AckTimeoutError              no ack before the deadline: may be stored or not
        ├── NoStreamError                nobody listens on the stream's subject: not stored
        ├── IncorrectOffsetError         not the stream's next offset: not stored
        ├── MessageTooLargeError         over the broker's or NATS's limit: not stored
        ├── EncryptionError              the broker could not encrypt it: not stored
        └── PublishRefusedError          refused for an unknown reason: not stored
"""

from __future__ import annotations

import asyncio
from typing import Literal

from feedapi_client.errors import FeedError, FencedError
from feedapi_client.liftbridge.messages_pb2 import Ack

Check = Literal[
    "length", "magic", "version", "header length", "checksum header", "checksum", "type", "payload"
]


class LiftbridgeError(FeedError):
    """Root of the errors of `feedapi_client.liftbridge`."""


class EnvelopeError(LiftbridgeError):
    """The bytes are no valid envelope. `check` names the check that failed."""

    def __init__(self, message: str, *, check: Check) -> None:
        super().__init__(f"not a Liftbridge envelope ({check}): {message}")
        self.check: Check = check


class BrokerUnavailableError(LiftbridgeError):
    """NATS or the broker's gRPC API can't be reached, or gave up."""


class StreamError(LiftbridgeError):
    """A stream is missing, holds what no relay wrote, or can't be read. `stream` is its name."""

    def __init__(self, message: str, *, stream: str) -> None:
        super().__init__(f"stream {stream}: {message}")
        self.stream = stream


class RelayFencedError(LiftbridgeError, FencedError):
    """Another relay wrote to the stream after this relay read it. `stream` is its name."""

    def __init__(self, message: str, *, stream: str) -> None:
        super().__init__(f"stream {stream}: {message}")
        self.stream = stream


class StreamPausedError(StreamError):
    """The broker paused the partition, so nothing can be read, and messages over NATS are lost."""


class StreamReadonlyError(StreamError):
    """The partition is read-only: a message to it is neither stored nor acked."""


class StreamGapError(StreamError):
    """Messages are missing that were there: by retention or compaction, or the broker lost them.

    Attributes:
        offset: the first offset that is missing, or whose message is another one now.
    """

    def __init__(self, message: str, *, stream: str, offset: int) -> None:
        super().__init__(message, stream=stream)
        self.offset = offset


class PublishError(LiftbridgeError):
    """A message was not stored, or it is unknown whether it was.

    Attributes:
        correlation_id: the id of the message, as in the log of the broker.
        index: the position of the message among those of one `publish_many` call.
        acks: the acks of the messages before it.
    """

    def __init__(self, message: str, *, stream: str, correlation_id: str) -> None:
        super().__init__(f"stream {stream}, correlation id {correlation_id}: {message}")
        self.stream = stream
        self.correlation_id = correlation_id
        self.index = 0
        self.acks: list[Ack | None] = []


class AckTimeoutError(PublishError):
    """No ack before the deadline. Publish it again if a duplicate is better than a loss."""


class NoStreamError(PublishError):
    """The stream is missing, has another subject or fewer partitions; or its broker is down."""


class IncorrectOffsetError(PublishError):
    """The expected offset is not the stream's next one.

    Another writer published to the stream, or an earlier message was lost.
    """


class MessageTooLargeError(PublishError):
    """Over the broker's or NATS's limit: not sent where that is known."""


class EncryptionError(PublishError):
    """The broker failed to encrypt the message."""


class PublishRefusedError(PublishError):
    """The broker refused the message without a reason."""


def require_asyncio() -> None:
    """Raise `LiftbridgeError` when the caller runs on another event loop than asyncio's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise LiftbridgeError(
            "Liftbridge needs asyncio, because nats-py and grpc.aio do not run on trio"
        ) from error
