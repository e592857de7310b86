"""The end of a partition that a relay writes: where it is, and that all up to it can be read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    IncorrectOffsetError,
    PublishError,
    PublishRefusedError,
    StreamError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.headers import FORMAT
from feedapi_client.liftbridge.metadata import PartitionMetadata
from feedapi_client.liftbridge.publishing import StreamPublisher
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.retry import Backoff, retry

_IMPOSSIBLE_OFFSET = 2**62
# While replicas catch up, messages are hidden for a moment.
_COMMITTED_AFTER = 0.2
_RETRY_BASE_DELAY = 0.02
_RETRY_MAX_DELAY = 1.0


async def writable(api: LiftbridgeApi, stream: str, partition: int) -> PartitionMetadata:
    """Return a partition's state after making sure that messages to it over NATS are stored.

    A paused partition is woken.

    Raises:
        StreamError: the stream or the partition is missing.
        StreamReadonlyError: the partition takes no messages.
    """
    found = await api.resume_partition(stream, partition)
    if found.readonly:
        raise StreamReadonlyError(
            f"partition {partition} is read-only: nothing can be relayed to it", stream=stream
        )
    return found


def write_backoff(attempts: int, *retried: type[PublishError]) -> Backoff:
    """The pauses between attempts to write to the stream."""
    return Backoff(
        base_delay=_RETRY_BASE_DELAY,
        max_delay=_RETRY_MAX_DELAY,
        attempts=attempts,
        retry_if=lambda error: isinstance(error, retried),
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
    """The end of a partition with optimistic concurrency control.

    Arguments:
        attempts: number of attempts to write a message.
    """

    def __init__(
        self,
        publisher: StreamPublisher,
        api: LiftbridgeApi,
        stream: Stream,
        partition: int,
        attempts: int = 1,
    ) -> None:
        self._publisher = publisher
        self._api = api
        self._stream = stream
        self._partition = partition
        self._attempts = attempts

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
        backoff = write_backoff(
            self._attempts, IncorrectOffsetError, AckTimeoutError, PublishRefusedError
        )
        return await retry(lambda: self._find(written_to), backoff, sleep=asyncio.sleep)

    async def _find(self, written_to: int) -> EndOffsets:
        found = await writable(self._api, self._stream.name, self._partition)
        if self._needs_no_message(found, written_to):
            return EndOffsets(found.newest_offset, found.newest_offset + 1)
        return EndOffsets(found.newest_offset, await self._append_nothing(found) + 1)

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
        backoff = write_backoff(self._attempts, AckTimeoutError, PublishRefusedError)
        try:
            await retry(self._publish_probe, backoff, sleep=asyncio.sleep)
        except IncorrectOffsetError:
            return
        raise StreamError(
            "it has no optimistic concurrency control, without which nothing is exactly once",
            stream=self._stream.name,
        )

    async def _publish_probe(self) -> None:
        await writable(self._api, self._stream.name, self._partition)
        await self._publisher.publish(
            self._stream,
            b"",
            partition=self._partition,
            expected_offset=_IMPOSSIBLE_OFFSET,
            headers={FORMAT: b"probe"},
        )
