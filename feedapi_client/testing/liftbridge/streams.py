"""The streams of the stand-in broker: messages, and what is accepted. No network."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nats.aio.subscription import Subscription

from feedapi_client.liftbridge.envelope import AckError
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.stream_name import ANY_OFFSET, REPLICATION_LIMIT, Stream


class BrokerFault(StrEnum):
    """What goes wrong with one publish."""

    LOSE = "lose"
    """Not stored and not acked."""
    DROP_ACK = "drop-ack"
    """Stored and not acked."""
    DOUBLE_ACK = "double-ack"
    """Acked twice."""
    FOREIGN_ACK = "foreign-ack"
    """Before the ack comes one for another stream with the same correlation id."""
    UNKNOWN_ACK = "unknown-ack"
    """Before the ack comes one with an unknown correlation id."""
    GARBAGE = "garbage"
    """Before the ack come bytes that aren't an envelope."""
    REFUSE = "refuse"
    """Not stored, acked with the error UNKNOWN."""
    ENCRYPTION = "encryption"
    """Not stored, acked with the error ENCRYPTION."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a partition. An opaque one arrived without an envelope and has only a value."""

    offset: int
    value: bytes
    key: bytes = b""
    headers: dict[str, bytes] = field(default_factory=dict)
    timestamp: int = 0
    subject: str = ""
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class GroupReader:
    """A member of a group that reads a partition, with the epoch of its assignment."""

    member: str
    epoch: int


@dataclass(slots=True)
class BrokerStream:
    """A stream of the stand-in broker: its configuration, and the messages of its partitions.

    `high_watermark` is the offset up to which readers see messages, and `checkpoint` the one that a
    crash leaves of it, both by partition. `ever_paused` is what metadata calls paused: like a real
    broker, it does not take that back.
    """

    stream: Stream
    concurrency_control: bool
    max_message_bytes: int
    compact: bool
    partitions: list[list[StoredMessage]]
    next_offset: list[int]
    high_watermark: list[int]
    checkpoint: list[int]
    changed: asyncio.Condition
    paused: set[int] = field(default_factory=set)
    ever_paused: set[int] = field(default_factory=set)
    readonly: set[int] = field(default_factory=set)
    subscriptions: list[Subscription] = field(default_factory=list)
    group_readers: dict[tuple[int, str], GroupReader] = field(default_factory=dict)

    def takes_messages(self, partition: int) -> bool:
        """Whether a message over NATS is received at all."""
        return partition not in self.paused and partition not in self.readonly

    def visible(self, partition: int, start: int) -> list[StoredMessage]:
        """Return the messages from an offset on that readers may see."""
        messages = self.partitions[partition]
        at = bisect_left(messages, start, key=lambda message: message.offset)
        # Of two messages with one offset a reader that starts there gets the second one.
        while at + 1 < len(messages) and messages[at + 1].offset == start:
            at += 1
        end = self.high_watermark[partition]
        return [message for message in messages[at:] if message.offset <= end]

    async def notify(self) -> None:
        """Wake the subscriptions."""
        async with self.changed:
            self.changed.notify_all()


class BrokerStreams:
    """The streams of a broker by name.

    `create_requests` are the requests of the gRPC API that created streams, by name.
    """

    def __init__(self) -> None:
        self.streams: dict[str, BrokerStream] = {}
        self.create_requests: dict[str, Any] = {}
        self.answers_without_streams = 0

    async def create_stream(
        self,
        name: str,
        subject: str = "",
        partitions: int = 1,
        *,
        concurrency_control: bool = False,
        max_message_bytes: int = REPLICATION_LIMIT,
        compact: bool = False,
    ) -> BrokerStream:
        """Create a stream. Raises ValueError when there is one of that name."""
        return self.add_stream(
            Stream(name, subject, partitions),
            concurrency_control=concurrency_control,
            max_message_bytes=max_message_bytes,
            compact=compact,
        )

    def add_stream(
        self,
        stream: Stream,
        *,
        concurrency_control: bool = False,
        max_message_bytes: int = REPLICATION_LIMIT,
        compact: bool = False,
    ) -> BrokerStream:
        """Add a stream without any message. Raises ValueError when there is one of its name."""
        if stream.name in self.streams:
            raise ValueError(f"there is a stream {stream.name}")
        self.streams[stream.name] = BrokerStream(
            stream,
            concurrency_control,
            max_message_bytes,
            compact,
            [[] for _ in range(stream.partitions)],
            [0] * stream.partitions,
            [-1] * stream.partitions,
            [-1] * stream.partitions,
            asyncio.Condition(),
        )
        return self.streams[stream.name]

    async def delete_stream(self, name: str) -> None:
        """Delete a stream and its messages. Raises KeyError when there is none."""
        await self.streams.pop(name).notify()

    def messages(self, stream: str, partition: int = 0) -> list[StoredMessage]:
        """Return the messages of a partition, oldest first."""
        return self.streams[stream].partitions[partition]

    def expire(self, stream: str, partition: int, before: int) -> None:
        """Drop the messages with offsets below `before`, as retention does."""
        broker_stream = self.streams[stream]
        broker_stream.next_offset[partition] = max(broker_stream.next_offset[partition], before)
        messages = broker_stream.partitions[partition]
        messages[:] = [message for message in messages if message.offset >= before]

    async def compact(self, stream: str) -> None:
        """Drop all messages of a key but the newest, if the stream is compacted."""
        broker_stream = self.streams[stream]
        if not broker_stream.compact:
            return
        for messages in broker_stream.partitions:
            newest = {message.key: message.offset for message in messages}
            messages[:] = [m for m in messages if not m.key or newest[m.key] == m.offset]

    def checkpoint(self) -> None:
        """Write down the high watermarks, as a real broker does every few seconds."""
        for stream in self.streams.values():
            stream.checkpoint[:] = stream.high_watermark

    def recover(self) -> None:
        """Take the high watermarks that were written down, as after a crash."""
        for stream in self.streams.values():
            stream.high_watermark[:] = stream.checkpoint

    def tear(self, stream: str, partition: int = 0) -> None:
        """Hand out the newest offset again.

        A real broker does when it is killed between its write to the log and the one to the index.
        Whoever reads on gets both messages.
        """
        self.streams[stream].next_offset[partition] -= 1

    def lose(
        self, stream: str, count: int, partition: int = 0, *, keep_high_watermark: bool = False
    ) -> None:
        """Lose the newest messages, although they were acked, and hand out their offsets again.

        Real brokers do when two leaders of a partition die within seconds. They may keep the high
        watermark, and then nothing can be read until there are as many messages as before. The
        broker has to be stopped.
        """
        broker_stream = self.streams[stream]
        newest = broker_stream.next_offset[partition] - count - 1
        messages = broker_stream.partitions[partition]
        messages[:] = [message for message in messages if message.offset <= newest]
        broker_stream.next_offset[partition] = newest + 1
        for marks in (broker_stream.high_watermark, broker_stream.checkpoint):
            kept = newest + count if keep_high_watermark else min(marks[partition], newest)
            marks[partition] = kept

    def next_offset(self, stream: str, partition: int = 0) -> int:
        """Return the offset that the next message of a partition gets."""
        return self.streams[stream].next_offset[partition]

    async def accept(
        self,
        stream: BrokerStream,
        partition: int,
        subject: str,
        message: Message,
        size: int,
        fault: BrokerFault | None = None,
    ) -> Ack:
        """Check and store a message of `size` bytes as a broker does.

        Returns: the ack, which says whether it was stored, and at which offset.
        """
        ack = Ack(
            stream=stream.stream.name,
            partitionSubject=stream.stream.subject_of(partition),
            msgSubject=subject,
            ackInbox=message.ackInbox,
            correlationId=message.correlationId,
            ackPolicy=message.ackPolicy,
            receptionTimestamp=time.time_ns(),
        )
        if error := self._refusal(stream, partition, message, size, fault):
            ack.ackError = Ack.Error.Name(error)  # type: ignore[assignment]
        else:
            ack.offset = await self.store(
                stream, partition, _stored(message, subject, ack.receptionTimestamp)
            )
            ack.commitTimestamp = time.time_ns()
        return ack

    def _refusal(
        self,
        stream: BrokerStream,
        partition: int,
        message: Message,
        size: int,
        fault: BrokerFault | None,
    ) -> AckError:
        if fault is BrokerFault.REFUSE:
            return AckError.UNKNOWN
        if fault is BrokerFault.ENCRYPTION:
            return AckError.ENCRYPTION
        if size > stream.max_message_bytes:
            return AckError.TOO_LARGE
        if stream.concurrency_control and message.offset not in (
            ANY_OFFSET,
            self.next_offset(stream.stream.name, partition),
        ):
            return AckError.INCORRECT_OFFSET
        return AckError.OK

    async def store(self, stream: BrokerStream, partition: int, message: StoredMessage) -> int:
        """Append a message without any check, and return its offset."""
        offset = self.next_offset(stream.stream.name, partition)
        stored = StoredMessage(
            offset,
            message.value,
            message.key,
            message.headers,
            message.timestamp or time.time_ns(),
            message.subject,
            message.opaque,
        )
        stream.partitions[partition].append(stored)
        stream.next_offset[partition] = offset + 1
        stream.high_watermark[partition] = max(stream.high_watermark[partition], offset)
        await stream.notify()
        return offset


def _stored(message: Message, subject: str, timestamp: int) -> StoredMessage:
    headers = {**message.headers, "subject": subject.encode(), "reply": b""}
    return StoredMessage(0, message.value, message.key, headers, timestamp, subject)
