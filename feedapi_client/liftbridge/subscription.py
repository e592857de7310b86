"""One subscription to a partition, which lives through restarts of brokers and new leaders.

Brokers that lose two leaders within seconds may lose messages that all replicas had, and that were
read and acked (seen on Liftbridge 1.9.0: a follower that can't reach its new leader truncates its
log to its high watermark, which is behind the leader's, and may be the next leader). Their offsets
are given to the next messages. A subscription that only asked for the next offset would miss those.
So a later call begins with the oldest message that is remembered, and compares. Two messages with
one offset differ in the time at which a leader received them, in nanoseconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, Protocol

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.brokers import (
    Brokers,
    NoMessageError,
    NotServedError,
    StreamMissingError,
)
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    StreamGapError,
    StreamPausedError,
    StreamReadonlyError,
)
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.stream_model import PartitionMetadata
from feedapi_client.liftbridge.stream_model import partition_metadata as decode_partition

logger = logging.getLogger(__name__)

Start = int | Literal["earliest", "latest", "new"] | datetime
"""Where a subscription starts: at an offset, the oldest message, the newest stored message, the
next one to be stored, or the first message stored at a time."""
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
_REMEMBERED = 2048
"""Messages that are remembered at least, to be compared after a failure; at most twice as many."""
_STEADY = 5.0
"""Seconds after which a subscription counts as a success: the next failure is a new one."""
_PAUSED_AGAIN = 0.2
"""Seconds after which a partition that is not served is looked at again."""


class Member(Protocol):
    """A member of a consumer group, whose epoch changes."""

    group: str
    consumer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamSubscription:
    stream: str
    partition: int = 0
    start: Start = "earliest"
    until: Until | None = None
    idle_timeout: float | None = None
    resume: bool = False
    member: Member | None = None

    def request(self) -> api_pb2.SubscribeRequest:
        request = api_pb2.SubscribeRequest(
            stream=self.stream,
            partition=self.partition,
            startPosition=api_pb2.EARLIEST,
            resume=self.resume,
        )
        if isinstance(self.start, int):
            request.startPosition, request.startOffset = api_pb2.OFFSET, self.start
        elif isinstance(self.start, datetime):
            request.startPosition = api_pb2.TIMESTAMP
            request.startTimestamp = _nanoseconds(self.start)
        if self.member is not None:
            request.consumer.groupId = self.member.group
            request.consumer.consumerId = self.member.consumer_id
            # The broker ends the subscription when another member comes with a newer one.
            request.consumer.groupEpoch = self.member.epoch
        if isinstance(self.until, datetime):
            request.stopPosition = api_pb2.STOP_TIMESTAMP
            request.stopTimestamp = _nanoseconds(self.until)
        return request

    def precedes(self, message: Message) -> bool:
        """Whether the message comes before the start.

        A broker sends such messages when the start is above its high watermark.
        """
        if isinstance(self.start, int):
            return message.offset < self.start
        return isinstance(self.start, datetime) and message.timestamp < _nanoseconds(self.start)

    def is_over(self) -> bool:
        if not isinstance(self.until, int):
            return False
        return self.until < 0 or (isinstance(self.start, int) and self.start > self.until)


class Subscriber:
    """Reads what a `StreamSubscription` says, with as many calls to brokers as it takes."""

    def __init__(self, brokers: Brokers, wanted: StreamSubscription) -> None:
        self._brokers = brokers
        self._wanted = wanted
        self._confirmed_at = math.inf
        # Offset and time of the newest messages that were returned, in their order.
        self._returned: dict[tuple[int, int], None] = {}
        self._forgot_some = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        backoff = self._brokers.backoff(give_up_after=self._brokers.timeout)
        self._wanted = await self._brokers.retry(self._resolve)
        while not self._wanted.is_over():
            try:
                async with aclosing(self._new_messages()) as messages:
                    async for message in messages:
                        yield message
                        backoff.reset()
            except (BrokerUnavailableError, StreamMissingError) as error:
                if time.monotonic() - self._confirmed_at > _STEADY:
                    backoff.reset()
                if isinstance(error, NotServedError) and not self._wanted.resume:
                    await self._brokers.retry(self._raise_if_paused)
                await asyncio.sleep(backoff.pause(error))

    async def _new_messages(self) -> AsyncGenerator[Message, None]:
        """Return the messages of one call that were not returned before.

        It ends where the subscription does, or where the last message has to be asked for alone.
        """
        wanted, before = self._wanted, None
        # A broker that is killed between its write to the log and the one to its index hands out
        # the offset of the last message a second time. Whoever reads on gets both. Only the second
        # one was acked, and a call that starts at the offset gets that one alone.
        alone = wanted.start == wanted.until
        if self._returned and not alone:
            oldest = next(iter(self._returned))[0]
            wanted = replace(wanted, start=oldest)
        async with aclosing(self._session(wanted)) as messages:
            async for message in messages:
                offset = message.offset
                is_second, before = offset == before, offset
                if wanted.precedes(message) if alone else self._is_old(message, is_second):
                    continue
                is_last = isinstance(wanted.until, int) and offset >= wanted.until
                if is_last and not (alone and offset == wanted.until):
                    # Over, or to be asked for alone.
                    self._wanted = replace(wanted, start=offset)
                    return
                self._remember(message)
                self._wanted = replace(wanted, start=offset + 1)
                yield message
                if self._wanted.is_over():
                    return

    def _is_old(self, message: Message, is_second: bool) -> bool:
        """Whether the message was returned before, or comes before the start."""
        if not self._returned:
            return self._wanted.precedes(message)
        oldest, newest = next(iter(self._returned))[0], next(reversed(self._returned))[0]
        if message.offset > newest:
            return False
        if (message.offset, message.timestamp) in self._returned or message.offset < oldest:
            return True
        if is_second:  # of two messages with one offset, which come in one call
            return False
        if self._forgot_some and message.offset == oldest:
            raise StreamGapError(
                f"the broker lost messages that were read, from offset {oldest} or less on: read "
                "again from an earlier offset",
                stream=self._wanted.stream,
                offset=oldest,
            )
        logger.warning(
            "stream %s: the broker lost messages that were read, from offset %d on, and stored "
            "others there",
            self._wanted.stream,
            message.offset,
            extra={"stream": self._wanted.stream, "offset": message.offset},
        )
        kept = [each for each in self._returned if each[0] < message.offset]
        self._returned = dict.fromkeys(kept)
        return False

    def _remember(self, message: Message) -> None:
        self._returned[message.offset, message.timestamp] = None
        if len(self._returned) > 2 * _REMEMBERED:
            self._returned = dict.fromkeys(list(self._returned)[-_REMEMBERED:])
            self._forgot_some = True

    async def _raise_if_paused(self) -> None:
        await partition_metadata(self._brokers, self._wanted.stream, self._wanted.partition)

    async def _resolve(self) -> StreamSubscription:
        wanted = self._wanted
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

    async def _session(self, wanted: StreamSubscription) -> AsyncGenerator[Message, None]:
        self._confirmed_at = math.inf
        call = await _open(self._brokers, wanted)
        try:
            await _confirm(self._brokers, wanted.stream, call)
            self._confirmed_at = time.monotonic()
            while True:
                yield await _read(self._brokers, wanted.stream, call, wanted.idle_timeout)
        except _EndError as end:
            if isinstance(wanted.until, datetime):
                self._wanted = replace(wanted, until=-1)  # over
            else:
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
    """Return the state of a partition from its leader. Raises `StreamPausedError`."""
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


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000


class _EndError(Exception):
    """The broker said that no further message comes."""
