"""Publishing to Liftbridge, whichever way the messages go: what both publishers have in common."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import repeat
from typing import Any

from feedapi_client.liftbridge.acks import AckGroup, AckTracker, PublisherStats
from feedapi_client.liftbridge.envelope import AckPolicy, BytesLike, check_headers
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream_name import ANY_OFFSET, Stream

MessageRow = tuple[BytesLike, bytes | None, Mapping[str, bytes] | None]
"""Value, key and own headers of a message."""


class StreamPublisher(ABC):
    """Publishes messages and returns their acks, whichever way the messages go.

    `LiftbridgePublisher` sends them over NATS, `LiftbridgeGrpcPublisher` over the broker's gRPC
    API.

    Attributes:
        stats: what was sent and acked.
        ack_timeout: seconds from sending a message to its deadline.
        ack_policy: when the broker acks.
        max_message_bytes: the largest message that the broker stores; None when it is unknown.

    Concurrency: methods may be called from several tasks.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        ack_timeout: float,
        ack_policy: AckPolicy,
        max_message_bytes: int | None,
    ) -> None:
        if max_in_flight < 1 or ack_timeout <= 0:
            raise ValueError("max_in_flight and ack_timeout must be positive")
        self.stats = PublisherStats()
        self.ack_timeout = ack_timeout
        self.ack_policy = ack_policy
        self.max_message_bytes = max_message_bytes
        self._acks = AckTracker(max_in_flight, self.stats)
        self._ids = itertools.count(1)

    @property
    @abstractmethod
    def message_limit(self) -> int:
        """The bytes of the largest message that can be stored, as far as is known."""

    @property
    def in_flight(self) -> int:
        """The number of messages that wait for their ack."""
        return len(self._acks)

    async def publish(
        self,
        stream: Stream | str,
        value: BytesLike,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> Ack | None:
        """Publish one message and return its ack, or None with `AckPolicy.NONE`.

        Arguments:
            partition: the partition to publish to; by default the one of the key.
            expected_offset: the offset that the message must get, on a stream with optimistic
                concurrency control.
            timeout: replaces `ack_timeout`.

        Raises:
            PublishError: one of its subclasses.
            BrokerUnavailableError: over NATS: its connection is closed.
            ValueError: a header is named ``subject`` or ``reply``, which the broker overwrites; or
                the subject, the partition or the timeout is not valid.
            TypeError: the value is not bytes, a bytearray or a memoryview.

        Cancellation: the message may be stored or not.
        """
        acks = await self.publish_many(
            stream,
            [value],
            keys=[key],
            partition=partition,
            headers=headers,
            ack_policy=ack_policy,
            expected_offset=expected_offset,
            timeout=timeout,
        )
        return acks[0]

    async def publish_many(
        self,
        stream: Stream | str,
        values: Iterable[BytesLike],
        *,
        keys: Iterable[bytes | None] | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        headers_each: Iterable[Mapping[str, bytes]] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> list[Ack | None]:
        """Publish messages in order and return their acks in the same order.

        A message does not wait for the ack of the one before. After the first error nothing
        further is sent; the acks of what was sent are awaited before the error is raised.

        Arguments:
            headers: headers of all messages.
            headers_each: additional headers of each message.
            expected_offset: that of the first message; it counts up.

        Raises:
            PublishError: as `publish`, for the earliest failed message. `index` is its position.
            ValueError, TypeError: as `publish`; or there are not as many of each.
        """
        target = Stream(stream) if isinstance(stream, str) else stream
        policy = self.ack_policy if ack_policy is None else ack_policy
        check_headers(headers)
        seconds = _seconds_to_ack(timeout, self.ack_timeout)
        group = AckGroup(target)
        try:
            await self._publish_rows(
                group,
                _message_rows(values, keys, headers_each),
                target,
                partition,
                headers=headers,
                ack_policy=policy,
                expected_offset=expected_offset,
                timeout=seconds,
            )
            return await group.wait()
        except BaseException:
            self._acks.discard(group)
            raise

    @abstractmethod
    async def _publish_rows(
        self,
        group: AckGroup,
        rows: Iterable[MessageRow],
        stream: Stream,
        partition: int | None,
        *,
        headers: Mapping[str, bytes] | None,
        ack_policy: AckPolicy,
        expected_offset: int,
        timeout: float,
    ) -> None:
        """Send messages of one call, and add each to the group. Stops when the group has failed."""


def _seconds_to_ack(timeout: float | None, usual: float) -> float:
    """Return the timeout, or the usual one without. Raises ValueError unless it is positive."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout}: None is the usual ack_timeout")
    return usual if timeout is None else timeout


def _message_rows(
    values: Iterable[BytesLike],
    keys: Iterable[bytes | None] | None,
    headers_each: Iterable[Mapping[str, bytes]] | None,
) -> Iterable[MessageRow]:
    """Return the messages of a `publish_many`.

    Raises ValueError unless there are as many of each: at once where their numbers are known,
    otherwise behind the last complete message.
    """
    given: dict[str, Any] = {"values": values, "keys": keys, "headers_each": headers_each}
    counts = {name: len(each) for name, each in given.items() if isinstance(each, Sized)}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"publish_many takes as many of each, not {numbers}")
    if len(counts) == len([each for each in given.values() if each is not None]):
        count = counts["values"]
        every_key = repeat(None, count) if keys is None else keys
        own_headers = repeat(None, count) if headers_each is None else headers_each
        return zip(values, every_key, own_headers, strict=True)
    return _in_step(given)


def _in_step(given: Mapping[str, Iterable[Any] | None]) -> Iterator[Any]:
    """Yield messages of what has no length. Raises ValueError where something ends too soon."""
    columns = {name: iter(each) for name, each in given.items() if each is not None}
    number, missing = 0, object()
    while True:
        row = {name: next(column, missing) for name, column in columns.items()}
        ended = [name for name, each in row.items() if each is missing]
        if len(ended) == len(columns):
            return
        if ended:
            more = ", ".join(name for name in columns if name not in ended)
            raise ValueError(
                f"publish_many takes as many of each: there are {number} {' and '.join(ended)}, "
                f"and more {more}"
            )
        number += 1
        yield row["values"], row.get("keys"), row.get("headers_each")
