"""The gRPC API of the stand-in broker.

It has the parts of Liftbridge's API that manage streams and read them back. The API definition is
that of gufo-liftbridge.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIServicer, add_APIServicer_to_server

from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.messages_pb2 import Message as Published
from feedapi_client.testing.liftbridge.streams import BrokerStream, BrokerStreams, StoredMessage

_BROKER = "stand-in"


async def serve(broker: BrokerStreams, port: int) -> tuple[Any, int]:
    """Serve the API on loopback. Return the server and its port; a `port` of 0 picks a free one."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = _Servicer(broker)
    add_APIServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    servicer.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, servicer.port


class _Servicer(APIServicer):
    def __init__(self, broker: BrokerStreams) -> None:
        self._broker = broker
        self.port = 0

    async def CreateStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not request.name or not request.subject:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a stream needs a name and a subject"
            )
        if request.name in self._broker.streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "the stream exists")
        await self._broker.create_stream(
            request.name,
            request.subject,
            request.partitions or 1,
            concurrency_control=request.optimisticConcurrencyControl.value,
        )
        return api_pb2.CreateStreamResponse()

    async def DeleteStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self._broker.streams:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such stream")
        await self._broker.delete_stream(request.name)
        return api_pb2.DeleteStreamResponse()

    async def FetchMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        response = api_pb2.FetchMetadataResponse(
            brokers=[api_pb2.Broker(id=_BROKER, host="127.0.0.1", port=self.port)]
        )
        for name in request.streams or list(self._broker.streams):
            if name in self._broker.streams:
                response.streamMetadata.append(self._describe(self._broker.streams[name]))
            else:
                response.streamMetadata.append(
                    api_pb2.StreamMetadata(name=name, error=api_pb2.StreamMetadata.UNKNOWN_STREAM)
                )
        return response

    async def FetchPartitionMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        broker_stream = await self._stream_of(request.stream, request.partition, context)
        newest = self._broker.next_offset(broker_stream.stream.name, request.partition) - 1
        return api_pb2.FetchPartitionMetadataResponse(
            metadata=api_pb2.PartitionMetadata(
                id=request.partition, leader=_BROKER, highWatermark=newest, newestOffset=newest
            )
        )

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        broker_stream = await self._stream_of(request.stream, request.partition, context)
        offset = self._start(request)
        yield api_pb2.Message()
        messages = broker_stream.partitions[request.partition]
        while True:
            # Messages may expire while one of them is sent.
            offset = max(offset, broker_stream.first_offset[request.partition])
            while offset - broker_stream.first_offset[request.partition] < len(messages):
                stored = messages[max(offset - broker_stream.first_offset[request.partition], 0)]
                yield _message(broker_stream.stream.name, request.partition, stored)
                offset = stored.offset + 1
            async with broker_stream.changed:
                await broker_stream.changed.wait_for(partial(self._is_beyond, request, offset))
            if request.stream not in self._broker.streams:
                await context.abort(grpc.StatusCode.NOT_FOUND, "the stream was deleted")

    async def Publish(self, request: Any, context: Any) -> Any:  # noqa: N802
        broker_stream = await self._stream_of(request.stream, request.partition, context)
        response = api_pb2.PublishResponse()
        message = Published(
            offset=request.expectedOffset,
            key=request.key,
            value=request.value,
            headers=dict(request.headers),
            correlationId=request.correlationId,
            ackPolicy=request.ackPolicy,
        )
        ack = await self._broker.accept(
            broker_stream,
            request.partition,
            broker_stream.stream.subject_of(request.partition),
            message,
            len(request.value),
        )
        # Like the real broker: without a deadline there is no wait for the ack.
        if (
            ack is not None
            and request.ackPolicy != AckPolicy.NONE
            and context.time_remaining() is not None
        ):
            response.ack.ParseFromString(ack.SerializeToString())
        return response

    async def SetCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._stream_of(request.stream, request.partition, context)
        self._broker.cursors[request.stream, request.partition, request.cursorId] = request.offset
        return api_pb2.SetCursorResponse()

    async def FetchCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._stream_of(request.stream, request.partition, context)
        return api_pb2.FetchCursorResponse(
            offset=self._broker.cursors.get(
                (request.stream, request.partition, request.cursorId), -1
            )
        )

    async def _stream_of(self, stream: str, partition: int, context: Any) -> BrokerStream:
        broker_stream = self._broker.streams.get(stream)
        if broker_stream is None or not 0 <= partition < broker_stream.stream.partitions:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such partition")
        assert broker_stream is not None
        return broker_stream

    def _start(self, request: Any) -> int:
        following = self._broker.next_offset(request.stream, request.partition)
        if request.startPosition == api_pb2.OFFSET:
            return int(request.startOffset)
        if request.startPosition == api_pb2.TIMESTAMP:
            later = (
                m.offset
                for m in self._broker.messages(request.stream, request.partition)
                if m.timestamp >= request.startTimestamp
            )
            return next(later, following)
        if request.startPosition == api_pb2.EARLIEST:
            return 0
        return max(following - 1, 0) if request.startPosition == api_pb2.LATEST else following

    def _is_beyond(self, request: Any, offset: int) -> bool:
        return (
            request.stream not in self._broker.streams
            or self._broker.next_offset(request.stream, request.partition) > offset
        )

    def _describe(self, broker_stream: BrokerStream) -> Any:
        response = api_pb2.StreamMetadata(
            name=broker_stream.stream.name,
            subject=broker_stream.stream.subject,
            creationTimestamp=time.time_ns(),
        )
        for partition in range(broker_stream.stream.partitions):
            response.partitions[partition].CopyFrom(
                api_pb2.PartitionMetadata(
                    id=partition, leader=_BROKER, replicas=[_BROKER], isr=[_BROKER]
                )
            )
        return response


def _message(stream: str, partition: int, stored: StoredMessage) -> Any:
    return api_pb2.Message(
        offset=stored.offset,
        key=stored.key,
        value=stored.value,
        timestamp=stored.timestamp,
        stream=stream,
        partition=partition,
        subject=stored.subject,
        headers=stored.headers,
    )
