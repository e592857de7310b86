"""The end of a partition that a relay writes: where it is, and that all up to it can be read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.headers import FORMAT
from feedapi_client.liftbridge.liftbridge_errors import (
    IncorrectOffsetError,
    MessageTooLargeError,
    StreamError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.metadata import PartitionMetadata
from feedapi_client.liftbridge.stream_name import Stream
from feedapi_client.liftbridge.stream_publisher import StreamPublisher

_IMPOSSIBLE_OFFSET = 2**62
# While replicas catch up, messages are hidden for a moment.
_COMMITTED_AFTER = 0.2


async def writable(api: LiftbridgeApi, stream: str, partition: int) -> PartitionMetadata:
    """Return a partition's state after making sure that messages to it over NATS are stored.

    A paused partition is woken.

    Raises:
        StreamError: the stream or the partition is missing.
        StreamReadonlyError: the partition takes no messages.
    """
    found = await api.resume_partition(stream, partition)
    if found.readonly:
        raise readonly(stream, partition)
    return found


def readonly(stream: str, partition: int) -> StreamReadonlyError:
    """Return the error of a partition that takes no messages."""
    return StreamReadonlyError(
        f"partition {partition} is read-only: nothing can be relayed to it", stream=stream
    )


def check_same(wanted: Stream, found: Stream) -> None:
    """Raise `StreamError` when the broker knows the stream otherwise than a publisher does.

    Messages would go to subjects that nobody stores, or all to one partition.
    """
    if wanted.partitions != found.partitions:
        raise StreamError(
            f"it has {found.partitions} partitions, and the publisher was told "
            f"{wanted.partitions}: Stream({found.name!r}, partitions={found.partitions}), or "
            f"--partitions {found.partitions}",
            stream=found.name,
        )
    if wanted.subject != found.subject:
        raise StreamError(
            f"it is attached to the subject {found.subject}, and the publisher was told "
            f"{wanted.subject}: Stream({found.name!r}, {found.subject!r}), or "
            f"--subject {found.subject}",
            stream=found.name,
        )


async def reveal_newest(
    publisher: StreamPublisher, api: LiftbridgeApi, stream: Stream | str, *, partition: int = 0
) -> bool:
    """Let readers see the newest messages of a partition after its broker crashed.

    A broker that starts lets nobody read them until something is appended. Appends a message
    without content (header ``feedapi-format: no-op``), with the next offset as its expected one,
    when that is so; after the broker lost messages as many as it takes. A relay that is exactly
    once does this by itself.

    Returns: whether a message was appended.

    Raises:
        PublishError: it could not be appended, or somebody else has just appended one.
        StreamError: the stream is missing or read-only.
        BrokerUnavailableError: no broker answered in time.
    """
    target = Stream(stream) if isinstance(stream, str) else stream
    return await StreamEnd(publisher, api, target, partition).reveal()


@dataclass(frozen=True, slots=True)
class EndOffsets:
    """The end of a partition.

    Attributes:
        newest: the newest message of a relay or a publisher; -1 where there is none.
        next: the offset that the next message gets.
    """

    newest: int
    next: int


class StreamEnd:
    """The end of a partition with optimistic concurrency control. Each method tries once."""

    def __init__(
        self, publisher: StreamPublisher, api: LiftbridgeApi, stream: Stream, partition: int
    ) -> None:
        self._publisher = publisher
        self._api = api
        self._stream = stream
        self._partition = partition

    async def reveal(self, written_to: int = 0) -> bool:
        """Append a message without content when the newest messages can't be read.

        Arguments: as those of `find`. Nothing is appended when messages before `written_to` are
            lost.

        Returns: whether a message was appended.
        """
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await writable(self._api, self._stream.name, self._partition)
            if self._needs_no_message(found, written_to):
                return False
        await self._append_nothing(found)
        return True

    async def find(self, written_to: int = 0) -> EndOffsets:
        """Return the end of the partition, when all up to it can be read.

        A broker that starts knows an old high watermark, above which nothing can be read, and
        raises it when something is appended. When it is too low, a message without content is
        appended. It has the next offset as its expected one, so it can't come between the messages
        of another relay unnoticed.

        Arguments:
            written_to: the offset after the newest message that was acked, as far as is known.
                Where the partition ends before it, nothing is appended: the broker lost messages,
                or it does not know yet that it no longer leads the partition.

        Raises:
            PublishError: the message could not be appended.
            StreamError: as `writable`.
        """
        found = await writable(self._api, self._stream.name, self._partition)
        if self._needs_no_message(found, written_to):
            return EndOffsets(found.newest_offset, found.newest_offset + 1)
        return await self._extended(found)

    async def visible(self) -> EndOffsets:
        """Return the newest offset that can be read, and the next one. Appends nothing.

        A paused partition is woken, so that it can be read. Where the broker lost messages and its
        high watermark is above the newest one, nothing can be read.

        Raises:
            StreamError: the stream or the partition is missing.
        """
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await self._api.resume_partition(self._stream.name, self._partition)
            if found.high_watermark == found.newest_offset:
                break
        is_readable = found.high_watermark <= found.newest_offset
        return EndOffsets(found.high_watermark if is_readable else -1, found.newest_offset + 1)

    async def extend(self) -> EndOffsets:
        """Append a message without content, which can be read for certain, and return the end."""
        return await self._extended(await writable(self._api, self._stream.name, self._partition))

    async def _extended(self, found: PartitionMetadata) -> EndOffsets:
        newest = await self._append_nothing(found)
        return EndOffsets(newest, newest + 1)

    async def hides(self, written_to: int) -> bool:
        """Whether the newest messages can't be read, as far as a broker answers at once."""
        for pause in (0.0, _COMMITTED_AFTER):
            await asyncio.sleep(pause)
            found = await self._api.glance(self._stream.name, self._partition)
            if found is None or self._needs_no_message(found, written_to):
                return False
        return True

    @staticmethod
    def _needs_no_message(found: PartitionMetadata, written_to: int) -> bool:
        """Whether all can be read, or nothing may be appended."""
        is_short = found.newest_offset + 1 < written_to
        return is_short or found.high_watermark == found.newest_offset

    async def _append_nothing(self, found: PartitionMetadata) -> int:
        """Append messages without content until all can be read, and return the last offset.

        One raises a high watermark that is too low. A broker that lost messages may have one above
        its newest message, and then lets nobody read until it has as many messages as before.
        """
        count = max(1, found.high_watermark - found.newest_offset)
        await self._publisher.publish_many(
            self._stream,
            [b""] * count,
            partition=found.id,
            ack_policy=AckPolicy.ALL,
            expected_offset=found.newest_offset + 1,
            headers={FORMAT: b"no-op"},
        )
        return found.newest_offset + count

    async def require_concurrency_control(self) -> None:
        """Raise `StreamError` when the stream does not check offsets.

        Without the check a second relay would not be noticed. The probe is a message with an
        offset that is impossible, which a stream with the check refuses.
        """
        await writable(self._api, self._stream.name, self._partition)
        if await self._refuses_offset(b""):
            return
        raise StreamError(
            "it has no optimistic concurrency control, without which nothing is exactly once",
            stream=self._stream.name,
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
            await self._publisher.publish(
                self._stream,
                value,
                partition=self._partition,
                expected_offset=_IMPOSSIBLE_OFFSET,
                headers={FORMAT: b"probe"},
            )
        except IncorrectOffsetError:
            return True
        return False
