"""One subscription to a partition, which lives through restarts of brokers and new leaders."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.brokers import (
    Brokers,
    NoMessageError,
    NotServedError,
    StreamMissingError,
)
from feedapi_client.liftbridge.group_membership import GroupMembership
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    StreamPausedError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.metadata import PartitionMetadata
from feedapi_client.liftbridge.metadata import partition_metadata as decode_partition
from feedapi_client.liftbridge.returned import LookBackError, ReturnedMessages

Start = int | Literal["earliest", "latest", "new"] | datetime | timedelta
"""Where a subscription starts: at an offset, the oldest message, the newest stored message, the
next one to be stored, the first message stored at a time, or so long ago."""
Until = int | Literal["latest"] | datetime
"""Where a subscription ends, inclusive: an offset, the newest message at its start, or the newest
message that was stored at a time."""

# What a broker says where a subscription has no more messages to come: it was asked to end at a
# time, or the partition is read-only. It treats the end of a read-only partition as one asked for.
_ENDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: ("End of readonly partition", "Stop offset", "is empty"),
    grpc.StatusCode.INVALID_ARGUMENT: ("Stop offset is before start offset",),
}
_METHOD = "/proto.API/Subscribe"
# A subscription that stood so many seconds counts as a success: the next failure is a new one.
_STEADY = 5.0
# Seconds after which a partition that is not served is looked at again.
_PAUSED_AGAIN = 0.2


@dataclass(frozen=True, slots=True)
class StreamSubscription:
    """What to subscribe to. The arguments of `LiftbridgeApi.subscribe`.

    Attributes:
        member: on behalf of which member of a consumer group. The broker ends the subscription when
            another member with a newer epoch subscribes.
    """

    stream: str
    partition: int = 0
    start: Start = "earliest"
    until: Until | None = None
    idle_timeout: float | None = None
    resume: bool = False
    from_replica: bool = False
    member: GroupMembership | None = None

    def request(self) -> api_pb2.SubscribeRequest:
        """Return the broker's request. `start` is no longer ``"latest"`` or ``"new"``."""
        request = api_pb2.SubscribeRequest(
            stream=self.stream,
            partition=self.partition,
            startPosition=api_pb2.EARLIEST,
            resume=self.resume,
            readISRReplica=self.from_replica,
        )
        if isinstance(self.start, int):
            request.startPosition, request.startOffset = api_pb2.OFFSET, self.start
        elif isinstance(self.start, datetime):
            request.startPosition = api_pb2.TIMESTAMP
            request.startTimestamp = nanoseconds(self.start)
        if self.member is not None:
            request.consumer.groupId = self.member.group
            request.consumer.consumerId = self.member.consumer_id
            request.consumer.groupEpoch = self.member.epoch
        if isinstance(self.until, datetime):
            request.stopPosition = api_pb2.STOP_TIMESTAMP
            request.stopTimestamp = nanoseconds(self.until)
        return request

    def precedes(self, message: Message) -> bool:
        """Whether the message comes before the start.

        A broker sends such messages when the start is above its high watermark.
        """
        if isinstance(self.start, int):
            return message.offset < self.start
        return isinstance(self.start, datetime) and message.timestamp < nanoseconds(self.start)

    def ends_before(self, offset: int) -> bool:
        """Whether the message with this offset comes after the end."""
        return isinstance(self.until, int) and offset > self.until

    def may_come_twice(self, message: Message) -> bool:
        """Whether this is the last message, and another one with its offset may follow.

        A broker that is killed between its write to the log and the one to its index hands out the
        offset of the last message a second time. Whoever reads on gets both. Only the second one
        was acked, and a subscription that starts at the offset gets that one alone.
        """
        return message.offset == self.until and self.start != self.until


class Subscriber:
    """Reads what a `StreamSubscription` says, with as many calls to brokers as it takes."""

    def __init__(self, brokers: Brokers, wanted: StreamSubscription) -> None:
        self._brokers = brokers
        self._first = self._wanted = wanted
        self._confirmed_at = math.inf
        self._returned = ReturnedMessages(wanted.stream)
        self._ended = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Return the messages, without end or to the end that was asked for."""
        backoff = self._brokers.backoff(give_up_after=self._brokers.timeout)
        self._first = self._wanted = await self._brokers.retry(self._resolve)
        while not self._at_end():
            try:
                async with aclosing(self._new_messages()) as messages:
                    async for message in messages:
                        yield message
                        backoff.reset()
            except LookBackError:
                self._returned.compare_all()
            except (BrokerUnavailableError, StreamMissingError) as error:
                # A call for the last message alone is for the second one with its offset.
                if self._wanted.start != self._wanted.until:
                    self._returned.compare_newest()
                if time.monotonic() - self._confirmed_at > _STEADY:
                    backoff.reset()
                if isinstance(error, NotServedError) and not self._wanted.resume:
                    await self._brokers.retry(self._raise_if_paused)
                await asyncio.sleep(backoff.pause(error))
            else:
                if self._ended:
                    return

    async def _new_messages(self) -> AsyncGenerator[Message, None]:
        """Return the messages of one call that were not returned before.

        It ends where the subscription does, or where the last message has to be asked for alone.
        """
        wanted, self._ended = self._wanted, True
        self._returned.begin_call()
        async with aclosing(self._session()) as messages:
            async for message in messages:
                if self._is_old(message):
                    continue
                if wanted.ends_before(message.offset):
                    return
                if wanted.may_come_twice(message):
                    self._wanted = replace(wanted, start=message.offset)
                    self._returned.compare_from, self._ended = None, False
                    return
                self._returned.add(message)
                self._wanted = replace(wanted, start=message.offset + 1)
                yield message
                if self._at_end():
                    return

    def _is_old(self, message: Message) -> bool:
        """Whether the message was returned before, or comes before the start."""
        if self._returned:
            return self._returned.includes(message)
        return self._first.precedes(message)

    async def _next_call(self) -> StreamSubscription:
        """Return what to ask for: in later calls from a message on that was returned.

        It has to be one that can be read, or the call would wait for a message above it.
        """
        returned, wanted = self._returned, self._wanted
        if returned.compare_from is None:
            return wanted
        found = await partition_metadata(
            self._brokers, wanted.stream, wanted.partition, resume=wanted.resume
        )
        # After the broker lost messages its high watermark may be above the newest one.
        readable = min(found.high_watermark, found.newest_offset)
        return replace(wanted, start=returned.compare_up_to(readable))

    async def _raise_if_paused(self) -> None:
        await partition_metadata(self._brokers, self._wanted.stream, self._wanted.partition)

    def _at_end(self) -> bool:
        start, until = self._wanted.start, self._wanted.until
        if not isinstance(until, int):
            return False
        return until < 0 or (isinstance(start, int) and start > until)

    async def _resolve(self) -> StreamSubscription:
        """Turn what is relative to the present into what stays the same in later calls."""
        wanted = self._wanted
        if isinstance(wanted.start, timedelta):
            wanted = replace(wanted, start=datetime.now(UTC) - wanted.start)
        if wanted.start not in ("latest", "new") and wanted.until != "latest":
            return wanted
        newest = (
            await partition_metadata(
                self._brokers, wanted.stream, wanted.partition, resume=wanted.resume
            )
        ).newest_offset
        if wanted.until == "latest":
            wanted = replace(wanted, until=newest)
        if wanted.start == "latest":
            wanted = replace(wanted, start=max(newest, 0))
        return replace(wanted, start=newest + 1) if wanted.start == "new" else wanted

    async def _session(self) -> AsyncGenerator[Message, None]:
        """Return the messages of one call, to the end that the broker says."""
        self._confirmed_at = math.inf
        wanted = await self._next_call()
        call = await _open(self._brokers, wanted)
        try:
            await _confirm(self._brokers, wanted.stream, call)
            self._confirmed_at = time.monotonic()
            while True:
                yield await _read(self._brokers, wanted.stream, call, wanted.idle_timeout)
        except _EndError as end:
            if not isinstance(wanted.until, datetime):
                raise StreamReadonlyError(
                    f"partition {wanted.partition} is read-only, and all its messages were read: "
                    "no further one comes until it is made writable",
                    stream=wanted.stream,
                ) from end
        finally:
            call.cancel()


async def partition_metadata(
    brokers: Brokers, stream: str, partition: int, *, resume: bool = False
) -> PartitionMetadata:
    """Return the state of a partition, including its offsets, from its leader.

    Raises:
        StreamPausedError: it is paused, and `resume` is false.
    """
    try:
        return await _ask_leader(brokers, stream, partition)
    except NotServedError:
        # Or another broker has just become the leader.
        await asyncio.sleep(_PAUSED_AGAIN)
    if resume and await _seems_paused(brokers, stream, partition):
        await _wake(brokers, stream, partition)
    try:
        return await _ask_leader(brokers, stream, partition)
    except NotServedError as error:
        if resume or not await _seems_paused(brokers, stream, partition):
            raise
        raise StreamPausedError(
            f"the broker paused partition {partition}: a message over gRPC, or a subscription "
            "with resume=True, wakes it",
            stream=stream,
        ) from error


async def _ask_leader(brokers: Brokers, stream: str, partition: int) -> PartitionMetadata:
    request = api_pb2.FetchPartitionMetadataRequest(stream=stream, partition=partition)
    address = await brokers.leader(stream, partition)
    response = await brokers.call(stream, "FetchPartitionMetadata", request, [address])
    # The broker never takes "paused" back, but a leader of a paused partition does not answer.
    return replace(decode_partition(response.metadata), paused=False)


async def _seems_paused(brokers: Brokers, stream: str, partition: int) -> bool:
    """Whether the partition was ever paused. The broker does not say whether it still is."""
    found, _ = await brokers.find(stream, partition)
    return found.paused


async def _wake(brokers: Brokers, stream: str, partition: int) -> None:
    """Resume a paused partition. A subscription does, and needs no message in the stream."""
    call = await _open(brokers, StreamSubscription(stream, partition, start=0, resume=True))
    try:
        await _confirm(brokers, stream, call)
    except _EndError:
        return
    finally:
        call.cancel()


async def _open(brokers: Brokers, wanted: StreamSubscription) -> Any:
    if wanted.from_replica:
        address = await brokers.replica(wanted.stream, wanted.partition)
    else:
        address = await brokers.leader(wanted.stream, wanted.partition)
    subscribe = brokers.channel(address).unary_stream(
        _METHOD,
        request_serializer=api_pb2.SubscribeRequest.SerializeToString,
        response_deserializer=Message.FromString,
    )
    return subscribe(wanted.request(), metadata=brokers.call_metadata)


async def _confirm(brokers: Brokers, stream: str, call: Any) -> None:
    """Wait for the first message, which is empty: it confirms the subscription."""
    try:
        await _read(brokers, stream, call, brokers.call_timeout)
    except NoMessageError as error:
        raise BrokerUnavailableError(
            f"stream {stream}: the broker did not confirm the subscription "
            f"within {brokers.call_timeout:g} s"
        ) from error


async def _read(brokers: Brokers, stream: str, call: Any, timeout: float | None) -> Message:
    try:
        async with asyncio.timeout(timeout):
            message = await call.read()
    except TimeoutError as error:
        raise NoMessageError(f"stream {stream}: no message within {timeout:g} s") from error
    except grpc.aio.AioRpcError as error:
        if any(text in (error.details() or "") for text in _ENDS.get(error.code(), ())):
            raise _EndError from error
        raise brokers.translate(stream, error) from error
    if message is grpc.aio.EOF:
        raise BrokerUnavailableError(f"stream {stream}: the broker ended the subscription")
    assert isinstance(message, Message)
    return message


def nanoseconds(moment: datetime) -> int:
    """Return a time as the broker has it. A time without a zone is local."""
    return int(moment.timestamp() * 1_000_000) * 1000


class _EndError(Exception):
    """The broker said that no further message comes."""
