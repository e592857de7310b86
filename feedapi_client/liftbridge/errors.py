"""The errors of the Liftbridge side::

FeedError
└── LiftbridgeError
    ├── EnvelopeError                bytes that are no envelope, or not the one that was asked for
    ├── BrokerUnavailableError       NATS or the gRPC API can't be reached
    ├── StreamError                  a stream is missing, or is not what it has to be
    ├── RelayFencedError             another relay writes the same stream (also a FencedError)
    └── PublishError                 a message was not stored, or nobody knows; names stream and correlation id
        ├── AckTimeoutError              no ack before the deadline: stored or not
        ├── IncorrectOffsetError         the stream's next offset is not the expected one: not stored
        ├── MessageTooLargeError         over the broker's, or NATS's, limit: not stored
        ├── EncryptionError              the broker could not encrypt it: not stored
        └── PublishRefusedError          refused for a reason that the broker does not name: not stored
"""

from __future__ import annotations

from typing import Literal

from feedapi_client.errors import FeedError, FencedError

Check = Literal[
    "length", "magic", "version", "header length", "checksum header", "checksum", "type", "payload"
]


class LiftbridgeError(FeedError):
    """Root of the errors of `feedapi_client.liftbridge`."""


class EnvelopeError(LiftbridgeError):
    """Bytes that are no envelope. `check` names the check that failed."""

    def __init__(self, message: str, *, check: Check) -> None:
        super().__init__(f"not a Liftbridge envelope ({check}): {message}")
        self.check: Check = check


class BrokerUnavailableError(LiftbridgeError):
    """NATS, or the broker's gRPC API, can't be reached or gave up."""


class StreamError(LiftbridgeError):
    """A stream is missing, or holds what a relay did not write, or can't be read back. `stream` is its name."""

    def __init__(self, message: str, *, stream: str) -> None:
        super().__init__(f"stream {stream}: {message}")
        self.stream = stream


class RelayFencedError(LiftbridgeError, FencedError):
    """Another relay wrote to the stream since this one read it. `stream` is its name."""

    def __init__(self, message: str, *, stream: str) -> None:
        super().__init__(f"stream {stream}: {message}")
        self.stream = stream


class PublishError(LiftbridgeError):
    """One message was not stored, or nobody knows. `stream` and `correlation_id` say which, `index` its place among those published together."""

    def __init__(self, message: str, *, stream: str, correlation_id: str) -> None:
        super().__init__(f"stream {stream}, correlation id {correlation_id}: {message}")
        self.stream = stream
        self.correlation_id = correlation_id
        self.index = 0


class AckTimeoutError(PublishError):
    """No ack came before the deadline: the message may be stored or not. Publish it again if twice is better than never."""


class IncorrectOffsetError(PublishError):
    """The stream has optimistic concurrency control and its next offset is not the expected one: someone else wrote, or a message before this was lost."""


class MessageTooLargeError(PublishError):
    """The message is larger than the broker replicates or NATS carries. Found before sending where the limit is known."""


class EncryptionError(PublishError):
    """The broker failed to encrypt the message."""


class PublishRefusedError(PublishError):
    """The broker refused the message and does not say why."""
