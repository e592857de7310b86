"""Publishing over the broker's gRPC API, for places that can't reach NATS."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.acks import AckGroup
from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.liftbridge.envelope import AckPolicy, as_bytes, check_headers
from feedapi_client.liftbridge.liftbridge_errors import (
    TOO_LARGE_TEXTS,
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
    require_asyncio,
)
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream_name import ANY_OFFSET, REPLICATION_LIMIT, Stream
from feedapi_client.liftbridge.stream_publisher import MessageRow, StreamPublisher

_ERRORS: dict[int, type[PublishError]] = {
    api_pb2.PublishAsyncError.NOT_FOUND: NoStreamError,
    api_pb2.PublishAsyncError.INCORRECT_OFFSET: IncorrectOffsetError,
    api_pb2.PublishAsyncError.ENCRYPTION_FAILED: EncryptionError,
}


class LiftbridgeGrpcPublisher(StreamPublisher):
    """Publishes as `LiftbridgePublisher` does, over the broker's gRPC API. Use it in `async with`.

    It is slower than NATS, because a broker passes each message on, and it wakes paused partitions.
    All messages go through one call; when that ends, the next message begins another one, at the
    next broker.

    Arguments:
        addresses: ``host:port`` of one or several brokers.
        max_in_flight: maximum number of messages that wait for their ack.
        ack_timeout: seconds from sending a message to its deadline.
        ack_policy: when the broker acks.
        max_message_bytes: the largest message that the broker stores; None when it is unknown.
        credentials: makes the channels secure.
        token: is sent as ``authorization: Bearer``.

    Concurrency: methods may be called from several tasks. Needs asyncio, because grpc.aio does.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:9292",
        *,
        max_in_flight: int = 1024,
        ack_timeout: float = 10.0,
        ack_policy: AckPolicy = AckPolicy.LEADER,
        max_message_bytes: int | None = REPLICATION_LIMIT,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise ValueError("a publisher needs the address of a broker")
        super().__init__(
            max_in_flight=max_in_flight,
            ack_timeout=ack_timeout,
            ack_policy=ack_policy,
            max_message_bytes=max_message_bytes,
        )
        metadata = [("authorization", f"Bearer {token}")] if token else []
        self._brokers = Brokers(self._addresses, ack_timeout, credentials, metadata)
        self._next_broker = itertools.cycle(self._addresses)
        self._opening = asyncio.Lock()
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> LiftbridgeGrpcPublisher:
        require_asyncio()
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        self._acks.fail_all("the publisher was closed")
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        if self._call is not None:
            self._call.cancel()
        await self._brokers.close()

    @property
    def message_limit(self) -> int:
        """The bytes of the largest message that can be stored, as far as is known."""
        return self.max_message_bytes or REPLICATION_LIMIT

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
        if partition is not None:
            stream.subject_of(partition)  # raises ValueError for an unknown one
        shared = api_pb2.PublishRequest(
            stream=stream.name,
            headers=headers,
            ackPolicy=api_pb2.AckPolicy.Name(int(ack_policy)),
        )
        requests = (
            self._request(
                shared,
                row,
                stream.partition_of(row[1]) if partition is None else partition,
                expected_offset + i if expected_offset != ANY_OFFSET else ANY_OFFSET,
            )
            for i, row in enumerate(rows)
        )
        await self._send(group, requests, ack_policy, timeout)

    def _request(
        self, shared: api_pb2.PublishRequest, row: MessageRow, partition: int, offset: int
    ) -> api_pb2.PublishRequest:
        value, key, headers = row
        check_headers(headers)
        request = api_pb2.PublishRequest(
            partition=partition,
            value=as_bytes(value),
            key=key,
            correlationId=f"{next(self._ids):x}",
            expectedOffset=offset,
        )
        request.MergeFrom(shared)
        request.headers.update(headers or {})
        return request

    async def _send(
        self,
        group: AckGroup,
        requests: Iterable[api_pb2.PublishRequest],
        policy: AckPolicy,
        timeout: float,
    ) -> None:
        for request in requests:
            if group.error is not None:
                return
            limit = self.max_message_bytes
            if limit is not None and request.ByteSize() > limit:
                text = f"a message of {request.ByteSize()} bytes is over the limit of {limit}"
                group.refuse_next(_error(MessageTooLargeError, text, request))
                return
            await self._acks.wait_for_room()
            call = await self._call_for(request, timeout)
            if policy is AckPolicy.NONE:
                group.add_without_ack()
            else:
                deadline = asyncio.get_running_loop().time() + timeout
                self._acks.add(request.correlationId, group, deadline)
            if not await _write(call, request, timeout):
                # Whoever reads the call fails all that is in flight, this message too.
                if policy is AckPolicy.NONE:
                    raise _error(AckTimeoutError, "the broker ended the call", request)
                return
            self.stats.published += 1

    async def _call_for(self, request: api_pb2.PublishRequest, timeout: float) -> Any:
        """Return the call that messages go through, after opening it where there is none."""
        if not self._open:
            raise LiftbridgeError("the publisher is not open: use it in `async with`")
        async with self._opening:
            if self._call is None:
                channel = await self._ready_channel(request, timeout)
                stub = APIStub(channel)  # type: ignore[no-untyped-call]
                self._call = stub.PublishAsync(metadata=self._brokers.call_metadata)
                self._reader = asyncio.create_task(self._read(self._call))
            return self._call

    async def _ready_channel(
        self, request: api_pb2.PublishRequest, timeout: float
    ) -> grpc.aio.Channel:
        for _ in self._addresses:
            channel = self._brokers.channel(next(self._next_broker))
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout / len(self._addresses)):
                    await channel.channel_ready()
                return channel
        raise _error(
            AckTimeoutError,
            "no broker was reachable before the deadline: the message was not sent",
            request,
        )

    async def _read(self, call: Any) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._receive(response)
        except grpc.aio.AioRpcError:
            pass  # what is in flight says it
        finally:
            self._call = None
            self.stats.reconnects += 1
            self._acks.fail_all("the broker ended the call")

    def _receive(self, response: api_pb2.PublishResponse) -> None:
        if not response.HasField("asyncError"):
            self._acks.receive(Ack.FromString(response.ack.SerializeToString()))
            return
        refused = response.asyncError
        kind = _ERRORS.get(refused.code, PublishRefusedError)
        if any(text in refused.message for text in TOO_LARGE_TEXTS):
            kind = MessageTooLargeError
        self._acks.refuse(
            response.correlationId, kind, f"the broker refused the message ({refused.message})"
        )


async def _write(call: Any, request: api_pb2.PublishRequest, timeout: float) -> bool:
    """Send a message; False when the call has ended, or ends because the broker takes nothing."""
    try:
        async with asyncio.timeout(timeout):
            await call.write(request)
    except TimeoutError:
        call.cancel()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    else:
        return True
    return False


def _error(kind: type[PublishError], text: str, request: api_pb2.PublishRequest) -> PublishError:
    return kind(text, stream=request.stream, correlation_id=request.correlationId)
