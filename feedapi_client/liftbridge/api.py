"""The broker's gRPC API: create streams, read them back, look at their state, keep cursors.

The definition of the API (messages and stub) comes from gufo-liftbridge. Its client is not used: it
can't create streams with optimistic concurrency control, and it retries without end, where a caller
has to learn that the broker is gone. Here every call has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.errors import BrokerUnavailableError, LiftbridgeError, StreamError
from feedapi_client.liftbridge.event_loop import require_asyncio
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.retry import Backoff, retry

_MAX_MESSAGE = 16 * 1024 * 1024
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_RETRY_BASE_DELAY = 0.1
_RETRY_MAX_DELAY = 1.0
# What a broker answers while it starts, stops, or is not (yet, or any more) the leader.
_RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)

T = TypeVar("T")

Start = int | Literal["earliest", "latest", "new"]
"""An offset, the oldest message, the newest stored message, or the next one to be stored."""
_STARTS = {"earliest": api_pb2.EARLIEST, "latest": api_pb2.LATEST, "new": api_pb2.NEW_ONLY}


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """The state of a partition of a stream.

    Attributes:
        id: the partition.
        leader, replicas, isr: ids of brokers; `isr` are the in-sync replicas.
        high_watermark: the offset up to which readers see messages; -1 while it is empty.
        newest_offset: the offset of the newest message; -1 while it is empty.
        paused: whether the broker paused it.
    """

    id: int
    leader: str
    replicas: tuple[str, ...]
    isr: tuple[str, ...]
    high_watermark: int
    newest_offset: int
    paused: bool


@dataclass(frozen=True, slots=True)
class StreamMetadata:
    """A stream as the cluster describes it.

    The offsets of its partitions are not filled in: see `LiftbridgeApi.partition_metadata`.
    """

    stream: Stream
    partitions: dict[int, PartitionMetadata]


@dataclass(frozen=True, slots=True)
class _Cluster:
    brokers: dict[str, str]
    streams: dict[str, StreamMetadata] = field(default_factory=dict)


class LiftbridgeApi:
    """A connection to a cluster. Use it in `async with`. It needs asyncio.

    Arguments:
        addresses: ``host:port`` of one or several brokers of the cluster.
        timeout: seconds for a call, and for a subscription to find a broker. Also an attribute,
            for later calls.
        credentials: makes the channels secure.

    Raises, from all methods:
        BrokerUnavailableError: no broker answered within `timeout`.
        StreamError: the stream is missing.
        LiftbridgeError: the broker refused the request.

    Concurrency: methods may be called from several tasks.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:9292",
        *,
        timeout: float = 10.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise ValueError("LiftbridgeApi needs the address of at least one broker")
        self.timeout = timeout
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> LiftbridgeApi:
        require_asyncio()
        return self

    async def __aexit__(self, *exc: object) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def create_stream(
        self,
        stream: Stream | str,
        *,
        concurrency_control: bool = False,
        replication_factor: int = 1,
        min_isr: int | None = None,
    ) -> bool:
        """Create the stream if it is missing, and return whether it was created.

        An existing stream is left as it is, also when its configuration is another one.

        Arguments:
            concurrency_control: whether the broker checks the expected offset of each message.
            replication_factor: number of replicas.
            min_isr: minimum number of in-sync replicas; by default the broker's.
        """
        target = Stream(stream) if isinstance(stream, str) else stream
        request = api_pb2.CreateStreamRequest(
            name=target.name,
            subject=target.subject,
            partitions=target.partitions,
            replicationFactor=replication_factor,
        )
        if concurrency_control:
            request.optimisticConcurrencyControl.value = True
        if min_isr is not None:
            request.minIsr.value = min_isr
        try:
            await self._retry(
                lambda: self._call(
                    target.name, lambda stub: stub.CreateStream(request, timeout=self.timeout)
                )
            )
        except _AlreadyExistsError:
            return False
        return True

    async def delete_stream(self, stream: str) -> None:
        """Delete the stream and all its messages."""
        request = api_pb2.DeleteStreamRequest(name=stream)
        await self._retry(
            lambda: self._call(
                stream, lambda stub: stub.DeleteStream(request, timeout=self.timeout)
            )
        )

    async def metadata(self, stream: str) -> StreamMetadata:
        """Return the stream's subject, partitions and leaders."""
        cluster = await self._retry(lambda: self._cluster(stream))
        return cluster.streams[stream]

    async def partition_metadata(self, stream: str, partition: int = 0) -> PartitionMetadata:
        """Return the state of a partition, including its offsets, from its leader."""
        request = api_pb2.FetchPartitionMetadataRequest(stream=stream, partition=partition)

        async def call() -> PartitionMetadata:
            address = await self._leader(stream, partition)
            response = await self._call(
                stream,
                lambda stub: stub.FetchPartitionMetadata(request, timeout=self.timeout),
                [address],
            )
            return _partition_metadata(response.metadata)

        return await self._retry(call)

    async def subscribe(
        self,
        stream: str,
        start: Start = "earliest",
        *,
        partition: int = 0,
        until: int | None = None,
        idle_timeout: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Return the messages of a partition from `start` on, without end.

        When the broker goes away or the leader changes, it continues with the next message.

        Arguments:
            until: the offset to end at, inclusive.
            idle_timeout: maximum number of seconds to wait for a message.

        Raises:
            BrokerUnavailableError: no broker was found for `timeout` seconds, or no message came
                for `idle_timeout` seconds.
            StreamError: the stream or the partition is missing.
        """
        backoff = self._backoff(give_up_after=self.timeout)
        while until is None or not isinstance(start, int) or start <= until:
            try:
                async with aclosing(
                    self._subscribe_once(stream, start, partition, idle_timeout)
                ) as messages:
                    async for message in messages:
                        yield message
                        start = message.offset + 1
                        backoff.reset()
                        if until is not None and message.offset >= until:
                            return
            except BrokerUnavailableError as error:
                await asyncio.sleep(backoff.pause(error))

    async def set_cursor(
        self, stream: str, cursor_id: str, offset: int, *, partition: int = 0
    ) -> None:
        """Store an offset under a name in the cluster."""
        request = api_pb2.SetCursorRequest(
            stream=stream, partition=partition, cursorId=cursor_id, offset=offset
        )

        async def call() -> None:
            await self._call(
                stream,
                lambda stub: stub.SetCursor(request, timeout=self.timeout),
                await self._brokers(),
            )

        await self._retry(call)

    async def fetch_cursor(self, stream: str, cursor_id: str, *, partition: int = 0) -> int | None:
        """Return the offset stored under a name; None when there is none."""
        request = api_pb2.FetchCursorRequest(stream=stream, partition=partition, cursorId=cursor_id)

        async def call() -> int | None:
            response = await self._call(
                stream,
                lambda stub: stub.FetchCursor(request, timeout=self.timeout),
                await self._brokers(),
            )
            return int(response.offset) if response.offset >= 0 else None

        return await self._retry(call)

    async def _subscribe_once(
        self, stream: str, start: Start, partition: int, idle_timeout: float | None
    ) -> AsyncGenerator[Message, None]:
        channel = self._channel(await self._leader(stream, partition))
        subscribe = channel.unary_stream(
            "/proto.API/Subscribe",
            request_serializer=api_pb2.SubscribeRequest.SerializeToString,
            response_deserializer=Message.FromString,
        )
        call = subscribe(_subscribe_request(stream, start, partition))
        try:
            try:
                # The first message is empty: it confirms the subscription.
                await self._read(stream, call, self.timeout)
            except _IdleError as error:
                raise BrokerUnavailableError(
                    f"stream {stream}: the broker did not confirm the subscription "
                    f"within {self.timeout:g} s"
                ) from error
            while True:
                yield await self._read(stream, call, idle_timeout)
        finally:
            call.cancel()

    async def _read(self, stream: str, call: Any, timeout: float | None) -> Message:
        try:
            async with asyncio.timeout(timeout):
                message = await call.read()
        except TimeoutError as error:
            raise _IdleError(f"stream {stream}: no message within {timeout:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise _translate(stream, error) from error
        if message is grpc.aio.EOF:
            raise BrokerUnavailableError(f"stream {stream}: the broker ended the subscription")
        assert isinstance(message, Message)
        return message

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call for `timeout` seconds.

        It fails while no broker answers, and while the leader is not the one of the metadata.
        """
        backoff = self._backoff(deadline=time.monotonic() + self.timeout)
        return await retry(call, backoff, sleep=asyncio.sleep)

    def _backoff(
        self, *, give_up_after: float | None = None, deadline: float | None = None
    ) -> Backoff:
        return Backoff(
            base_delay=_RETRY_BASE_DELAY,
            max_delay=_RETRY_MAX_DELAY,
            give_up_after=give_up_after,
            deadline=deadline,
            retry_if=lambda error: (
                isinstance(error, BrokerUnavailableError) and not isinstance(error, _IdleError)
            ),
        )

    async def _brokers(self) -> list[str]:
        return list((await self._cluster(None)).brokers.values())

    async def _leader(self, stream: str, partition: int) -> str:
        cluster = await self._cluster(stream)
        found = cluster.streams[stream].partitions.get(partition)
        if found is None:
            raise StreamError(f"there is no partition {partition}", stream=stream)
        if found.leader not in cluster.brokers:
            raise BrokerUnavailableError(f"stream {stream}: partition {partition} has no leader")
        return cluster.brokers[found.leader]

    async def _cluster(self, stream: str | None) -> _Cluster:
        request = api_pb2.FetchMetadataRequest(streams=[stream] if stream else [])
        response = await self._call(
            stream or "", lambda stub: stub.FetchMetadata(request, timeout=self.timeout)
        )
        cluster = _Cluster(
            {broker.id: f"{broker.host}:{broker.port}" for broker in response.brokers}
        )
        for found in response.streamMetadata:
            if found.error == api_pb2.StreamMetadata.OK:
                partitions = {
                    partition: _partition_metadata(metadata)
                    for partition, metadata in found.partitions.items()
                }
                cluster.streams[found.name] = StreamMetadata(
                    Stream(found.name, found.subject, max(len(partitions), 1)), partitions
                )
        if stream and stream not in cluster.streams:
            raise StreamError("there is no such stream: create it first", stream=stream)
        return cluster

    async def _call(
        self,
        stream: str,
        call: Callable[[Any], Awaitable[Any]],
        addresses: Sequence[str] | None = None,
    ) -> Any:
        """Make a call to one broker after the other, and return the first response."""
        failure: LiftbridgeError | None = None
        for address in self._addresses if addresses is None else addresses:
            try:
                return await call(APIStub(self._channel(address)))  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError as error:
                failure = _translate(stream, error)
                failure.__cause__ = error
                if not isinstance(failure, BrokerUnavailableError):
                    raise failure from error
        raise failure or BrokerUnavailableError("the cluster lists no brokers")

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            if self._credentials is None:
                self._channels[address] = grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
            else:
                self._channels[address] = grpc.aio.secure_channel(
                    address, self._credentials, _CHANNEL_OPTIONS
                )
        return self._channels[address]


class _AlreadyExistsError(LiftbridgeError):
    """The stream exists. Handled by `create_stream`."""


class _IdleError(BrokerUnavailableError):
    """No message came within the caller's `idle_timeout`. Not retried."""


def _translate(stream: str, error: grpc.aio.AioRpcError) -> LiftbridgeError:
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.ALREADY_EXISTS:
        return _AlreadyExistsError(details)
    if code is grpc.StatusCode.NOT_FOUND:
        return StreamError(details, stream=stream)
    if code in _RETRIED:
        return BrokerUnavailableError(
            f"stream {stream}: the broker answered {code.name} ({details})"
        )
    return LiftbridgeError(f"stream {stream}: the broker refused with {code.name} ({details})")


def _subscribe_request(stream: str, start: Start, partition: int) -> api_pb2.SubscribeRequest:
    if isinstance(start, int):
        return api_pb2.SubscribeRequest(
            stream=stream, partition=partition, startPosition=api_pb2.OFFSET, startOffset=start
        )
    return api_pb2.SubscribeRequest(
        stream=stream, partition=partition, startPosition=_STARTS[start]
    )


def _partition_metadata(found: api_pb2.PartitionMetadata) -> PartitionMetadata:
    return PartitionMetadata(
        found.id,
        found.leader,
        tuple(found.replicas),
        tuple(found.isr),
        int(found.highWatermark),
        int(found.newestOffset),
        bool(found.paused),
    )
