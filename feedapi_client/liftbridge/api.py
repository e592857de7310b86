"""The broker's gRPC API: create streams, read them back, look at their state, keep cursors.

The API's definition (messages and stub) comes from gufo-liftbridge. Its client is not used: it can't create streams with optimistic concurrency control,
and it retries without end where a caller has to hear that the broker is gone. Here every call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.errors import BrokerUnavailableError, LiftbridgeError, StreamError
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.streams import Stream, require_asyncio

_MAX_MESSAGE = 16 * 1024 * 1024
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_RETRY_PAUSE = 0.2
_Code = grpc.StatusCode
_LATER = frozenset(
    {
        _Code.UNAVAILABLE,
        _Code.DEADLINE_EXCEEDED,
        _Code.FAILED_PRECONDITION,
        _Code.INTERNAL,
        _Code.ABORTED,
        _Code.CANCELLED,
    }
)

T = TypeVar("T")

Start = int | Literal["earliest", "latest", "new"]
_STARTS = {"earliest": api_pb2.EARLIEST, "latest": api_pb2.LATEST, "new": api_pb2.NEW_ONLY}


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """The state of a partition. Offsets are -1 while it is empty; readers see messages up to the high watermark."""

    id: int
    leader: str
    replicas: tuple[str, ...]
    isr: tuple[str, ...]
    high_watermark: int
    newest_offset: int
    paused: bool


@dataclass(frozen=True, slots=True)
class StreamMetadata:
    """A stream as the cluster knows it. The offsets of its partitions are only filled in by `LiftbridgeApi.partition_metadata`."""

    stream: Stream
    partitions: dict[int, PartitionMetadata]


@dataclass(frozen=True, slots=True)
class _Cluster:
    brokers: dict[str, str]
    streams: dict[str, StreamMetadata] = field(default_factory=dict)


class LiftbridgeApi:
    """A connection to a cluster, by the addresses (``host:port``) of one or several of its brokers. Use it in `async with`; it needs asyncio.

    `timeout` bounds each call, and each time that a subscription finds no broker. `credentials` make the channels secure. All methods raise
    `BrokerUnavailableError` when no broker answers in time, `StreamError` when the stream is missing, and may be called concurrently.
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
        self._timeout = timeout
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> LiftbridgeApi:
        require_asyncio()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Create the stream if it is missing; True when it was created. An existing one is left as it is, whatever its configuration."""
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
                    target.name, lambda stub: stub.CreateStream(request, timeout=self._timeout)
                )
            )
        except _AlreadyExistsError:
            return False
        return True

    async def delete_stream(self, stream: str) -> None:
        """Delete the stream and all that it holds."""
        request = api_pb2.DeleteStreamRequest(name=stream)
        await self._retry(
            lambda: self._call(
                stream, lambda stub: stub.DeleteStream(request, timeout=self._timeout)
            )
        )

    async def metadata(self, stream: str) -> StreamMetadata:
        """The stream's subject, partitions and leaders."""
        cluster = await self._retry(lambda: self._cluster(stream))
        return cluster.streams[stream]

    async def partition_metadata(self, stream: str, partition: int = 0) -> PartitionMetadata:
        """A partition's state, its offsets included, from its leader."""
        request = api_pb2.FetchPartitionMetadataRequest(stream=stream, partition=partition)

        async def ask() -> PartitionMetadata:
            address = await self._leader(stream, partition)
            answer = await self._call(
                stream,
                lambda stub: stub.FetchPartitionMetadata(request, timeout=self._timeout),
                [address],
            )
            return _partition(answer.metadata)

        return await self._retry(ask)

    async def subscribe(
        self,
        stream: str,
        start: Start = "earliest",
        *,
        partition: int = 0,
        until: int | None = None,
        idle_timeout: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """The messages of a partition from an offset, or ``"earliest"``, ``"latest"`` (the newest one stored) or ``"new"``, without end.

        With `until` it ends behind the message of that offset. When the broker goes away or the leader moves, it goes on with the next message.
        Raises `BrokerUnavailableError` when that fails for `timeout` seconds, and when no message comes for `idle_timeout` seconds.
        """
        failing_since: float | None = None
        while until is None or not isinstance(start, int) or start <= until:
            try:
                async for message in self._subscribe_once(stream, start, partition, idle_timeout):
                    yield message
                    start, failing_since = message.offset + 1, None
                    if until is not None and message.offset >= until:
                        return
            except BrokerUnavailableError as error:
                now = asyncio.get_running_loop().time()
                failing_since = failing_since or now
                if isinstance(error, _IdleError) or now - failing_since > self._timeout:
                    raise
                await asyncio.sleep(_RETRY_PAUSE)

    async def set_cursor(
        self, stream: str, cursor_id: str, offset: int, *, partition: int = 0
    ) -> None:
        """Keep an offset under a name in the cluster."""
        request = api_pb2.SetCursorRequest(
            stream=stream, partition=partition, cursorId=cursor_id, offset=offset
        )

        async def ask() -> None:
            await self._call(
                stream,
                lambda stub: stub.SetCursor(request, timeout=self._timeout),
                await self._brokers(),
            )

        await self._retry(ask)

    async def fetch_cursor(self, stream: str, cursor_id: str, *, partition: int = 0) -> int | None:
        """The offset kept under a name; None when there is none."""
        request = api_pb2.FetchCursorRequest(stream=stream, partition=partition, cursorId=cursor_id)

        async def ask() -> int | None:
            answer = await self._call(
                stream,
                lambda stub: stub.FetchCursor(request, timeout=self._timeout),
                await self._brokers(),
            )
            return int(answer.offset) if answer.offset >= 0 else None

        return await self._retry(ask)

    async def _subscribe_once(
        self, stream: str, start: Start, partition: int, idle_timeout: float | None
    ) -> AsyncGenerator[Message, None]:
        channel = self._channel(await self._leader(stream, partition))
        subscribe = channel.unary_stream(
            "/proto.API/Subscribe",
            request_serializer=api_pb2.SubscribeRequest.SerializeToString,
            response_deserializer=Message.FromString,
        )
        call = subscribe(_subscription(stream, start, partition))
        try:
            try:
                # The first message is empty: it says that the subscription stands.
                await self._read(stream, call, self._timeout)
            except _IdleError as error:
                raise BrokerUnavailableError(
                    f"stream {stream}: the broker did not confirm the subscription within {self._timeout:g} s"
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
            raise _translated(stream, error) from error
        if message is grpc.aio.EOF:
            raise BrokerUnavailableError(f"stream {stream}: the broker ended the subscription")
        assert isinstance(message, Message)
        return message

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again for `timeout` seconds while no broker answers, or the leader is another one than the metadata said."""
        now = asyncio.get_running_loop().time
        end = now() + self._timeout
        while True:
            try:
                return await ask()
            except BrokerUnavailableError:
                if now() >= end:
                    raise
            await asyncio.sleep(_RETRY_PAUSE)

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
        answer = await self._call(
            stream or "", lambda stub: stub.FetchMetadata(request, timeout=self._timeout)
        )
        cluster = _Cluster({broker.id: f"{broker.host}:{broker.port}" for broker in answer.brokers})
        for found in answer.streamMetadata:
            if found.error == api_pb2.StreamMetadata.OK:
                partitions = {key: _partition(value) for key, value in found.partitions.items()}
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
        """The answer of the first broker that gives one."""
        failure: LiftbridgeError | None = None
        for address in self._addresses if addresses is None else addresses:
            try:
                return await call(APIStub(self._channel(address)))  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError as error:
                failure = _translated(stream, error)
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
    """The stream is there: never leaves `create_stream`."""


class _IdleError(BrokerUnavailableError):
    """No message came for as long as the caller wanted to wait: not retried."""


def _translated(stream: str, error: grpc.aio.AioRpcError) -> LiftbridgeError:
    code, details = error.code(), error.details() or "no details"
    if code is _Code.ALREADY_EXISTS:
        return _AlreadyExistsError(details)
    if code is _Code.NOT_FOUND:
        return StreamError(details, stream=stream)
    if code in _LATER:
        return BrokerUnavailableError(
            f"stream {stream}: the broker answered {code.name} ({details})"
        )
    return LiftbridgeError(f"stream {stream}: the broker refused with {code.name} ({details})")


def _subscription(stream: str, start: Start, partition: int) -> api_pb2.SubscribeRequest:
    if isinstance(start, int):
        return api_pb2.SubscribeRequest(
            stream=stream, partition=partition, startPosition=api_pb2.OFFSET, startOffset=start
        )
    return api_pb2.SubscribeRequest(
        stream=stream, partition=partition, startPosition=_STARTS[start]
    )


def _partition(found: api_pb2.PartitionMetadata) -> PartitionMetadata:
    return PartitionMetadata(
        found.id,
        found.leader,
        tuple(found.replicas),
        tuple(found.isr),
        int(found.highWatermark),
        int(found.newestOffset),
        bool(found.paused),
    )
