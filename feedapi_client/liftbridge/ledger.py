"""A partition of a stream with optimistic concurrency control: its end, appending, reading on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.liftbridge_errors import (
    IncorrectOffsetError,
    MessageTooLargeError,
    StreamError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.message_publisher import LiftbridgePublisher
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.stream_format import FORMAT, Row
from feedapi_client.liftbridge.stream_model import REPLICATION_LIMIT, PartitionMetadata, Stream

_IMPOSSIBLE_OFFSET = 2**62
# While replicas catch up, messages are hidden for a moment.
_COMMITTED_AFTER = 0.2

T = TypeVar("T", PartitionMetadata, PartitionMetadata | None)


async def writable(api: LiftbridgeApi, stream: str, partition: int) -> PartitionMetadata:
    """Wake a partition where it is paused. Raises `StreamReadonlyError`: it takes no messages."""
    found = await api.resume_partition(stream, partition)
    if found.readonly:
        raise readonly(stream, partition)
    return found


def readonly(stream: str, partition: int) -> StreamReadonlyError:
    return StreamReadonlyError(
        f"partition {partition} is read-only: nothing can be relayed to it", stream=stream
    )


async def reveal_newest(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, stream: Stream | str, *, partition: int = 0
) -> bool:
    """Let readers see the newest messages of a partition after its broker crashed.

    A broker that starts lets nobody read them until something is appended. Where that is so, this
    appends a message without content (header ``feedapi-format: no-op``), with the next offset as
    its expected one; after the broker lost messages as many as it takes. A relay that is exactly
    once does this by itself.

    Returns: whether a message was appended.

    Raises:
        PublishError: it could not be appended, or somebody else has just appended one.
        StreamError: the stream is missing or read-only.
        BrokerUnavailableError: no broker answered in time.
    """
    target = Stream(stream) if isinstance(stream, str) else stream
    return (await PartitionLog(publisher, api, target, partition).end()).appended


@dataclass(frozen=True, slots=True)
class EndOffsets:
    """The newest offset that can be read, -1 where there is none; and that of the next message."""

    newest: int
    next: int
    appended: bool = False


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """One partition. Each method tries once. Without a publisher each message is a call over gRPC.

    `written_to` is the offset after the newest message that was acked, as far as is known. Where
    the partition ends before it, nothing is appended: the broker lost messages, or it does not know
    yet that it no longer leads the partition.
    """

    publisher: LiftbridgePublisher | None
    api: LiftbridgeApi
    stream: Stream
    partition: int = 0

    @property
    def limit(self) -> int:
        return REPLICATION_LIMIT if self.publisher is None else self.publisher.message_limit

    async def end(self, written_to: int = 0, *, extend: bool = False) -> EndOffsets:
        """Return the end of the partition, when all up to it can be read.

        A broker that starts knows an old high watermark, above which nothing can be read, and
        raises it when something is appended. When it is too low, a message without content is
        appended. It has the next offset as its expected one, so it can't come between the messages
        of another relay unnoticed. With `extend` it is appended in any case.
        """
        found = await _look(
            lambda: writable(self.api, self.stream.name, self.partition), written_to
        )
        if not extend and _is_settled(found, written_to):
            return EndOffsets(found.newest_offset, found.newest_offset + 1)
        # A broker that lost messages may have a high watermark above its newest message, and then
        # lets nobody read until it has as many messages as before.
        count = max(1, found.high_watermark - found.newest_offset)
        no_op = Row(b"", None, {FORMAT: b"no-op"})
        await self.append([no_op] * count, found.newest_offset + 1)
        newest = found.newest_offset + count
        return EndOffsets(newest, newest + 1, appended=True)

    async def visible(self) -> EndOffsets:
        """Return the newest offset that can be read, and the next one. Appends nothing.

        Nothing can be read while a high watermark is above the newest message, after a loss.
        """
        found = await _look(lambda: self.api.resume_partition(self.stream.name, self.partition))
        is_readable = found.high_watermark <= found.newest_offset
        return EndOffsets(found.high_watermark if is_readable else -1, found.newest_offset + 1)

    async def hides(self, written_to: int) -> bool:
        """Whether the newest messages can't be read, as far as a broker answers at once."""
        found = await _look(lambda: self.api.glance(self.stream.name, self.partition), written_to)
        return not _is_settled(found, written_to)

    async def require_concurrency_control(self) -> None:
        """Raise `StreamError` when the stream does not check offsets.

        A second relay would not be noticed. The probe is a message with an impossible offset.
        """
        await writable(self.api, self.stream.name, self.partition)
        if not await self._refuses_offset(b""):
            raise StreamError(
                "it has no optimistic concurrency control, without which nothing is exactly once",
                stream=self.stream.name,
            )

    async def takes(self, size: int) -> bool:
        """Whether the broker takes a value of so many bytes. Nothing is stored.

        A broker looks at the size of a message before its offset, which is an impossible one here.
        """
        try:
            return await self._refuses_offset(bytes(size))
        except MessageTooLargeError:
            return False

    async def _refuses_offset(self, value: bytes) -> bool:
        try:
            await self.append([Row(value, None, {FORMAT: b"probe"})], _IMPOSSIBLE_OFFSET)
        except IncorrectOffsetError:
            return True
        return False

    async def append(
        self, rows: Sequence[Row], offset: int, shared: Mapping[str, bytes] | None = None
    ) -> None:
        """Append messages, the first of which has to get this offset. All have `shared` headers."""
        if self.publisher is not None:
            await self.publisher.publish_many(
                self.stream,
                [row.value for row in rows],
                keys=[row.key for row in rows],
                partition=self.partition,
                headers=shared,
                headers_each=[row.headers for row in rows],
                ack_policy=AckPolicy.ALL,
                expected_offset=offset,
            )
            return
        for place, row in enumerate(rows):
            await self.api.publish(
                self.stream.name,
                row.value,
                key=row.key,
                partition=self.partition,
                headers={**(shared or {}), **row.headers},
                ack_policy=AckPolicy.ALL,
                expected_offset=offset + place,
            )

    def messages(self, start: int, newest: int, timeout: float) -> AsyncGenerator[Message, None]:
        return self.api.subscribe(
            self.stream.name,
            start,
            partition=self.partition,
            until=newest,
            idle_timeout=timeout,
            resume=True,
        )


async def _look(ask: Callable[[], Awaitable[T]], written_to: int = 0) -> T:
    """Return what a broker says of a partition, of two times at most the one when it is settled."""
    if not _is_settled(found := await ask(), written_to):
        await asyncio.sleep(_COMMITTED_AFTER)
        found = await ask()
    return found


def _is_settled(found: PartitionMetadata | None, written_to: int) -> bool:
    """Whether all can be read, or nothing may be appended."""
    return (
        found is None
        or found.newest_offset + 1 < written_to
        or found.high_watermark == found.newest_offset
    )
