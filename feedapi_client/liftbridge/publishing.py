"""What a relay needs of a publisher, whichever way its messages go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from feedapi_client.liftbridge.acks import PublisherStats
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream import ANY_OFFSET, Stream


class StreamPublisher(Protocol):
    """Publishes messages and returns their acks. See `LiftbridgePublisher` for what they mean."""

    stats: PublisherStats
    ack_timeout: float
    ack_policy: AckPolicy
    max_message_bytes: int | None

    @property
    def in_flight(self) -> int:
        """The number of messages that wait for their ack."""
        ...

    async def publish(
        self,
        stream: Stream | str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> Ack | None:
        """Publish one message."""
        ...

    async def publish_many(
        self,
        stream: Stream | str,
        values: Iterable[bytes],
        *,
        keys: Iterable[bytes | None] | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        headers_each: Iterable[Mapping[str, bytes]] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> list[Ack | None]:
        """Publish messages in order."""
        ...
