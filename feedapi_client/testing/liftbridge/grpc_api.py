"""The gRPC API of the stand-in broker.

It has the parts of Liftbridge's API that manage streams and read them back. The API definition is
that of gufo-liftbridge.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIServicer, add_APIServicer_to_server

from feedapi_client.liftbridge.envelope import AckError, AckPolicy
from feedapi_client.liftbridge.messages_pb2 import Message as Published
from feedapi_client.testing.liftbridge.broker_cursors import CURSORS, BrokerCursors
from feedapi_client.testing.liftbridge.groups import BrokerGroups, GroupError, GroupMissingError
from feedapi_client.testing.liftbridge.partition_subscription import (
    PartitionSubscription,
    SubscriptionEnded,
)
from feedapi_client.testing.liftbridge.streams import BrokerStream, BrokerStreams, StoredMessage

_BROKER = "stand-in"
"""The id of the only broker, which coordinates all groups."""
_NANOSECONDS = 10**9
_REFUSED = {
    AckError.INCORRECT_OFFSET: (
        api_pb2.PublishAsyncError.INCORRECT_OFFSET,
        "incorrect expected offset",
    ),
    AckError.TOO_LARGE: (
        api_pb2.PublishAsyncError.BAD_REQUEST,
        "message exceeds max replication size",
    ),
}
_STATUS = {
    api_pb2.PublishAsyncError.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    api_pb2.PublishAsyncError.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    api_pb2.PublishAsyncError.READONLY: grpc.StatusCode.FAILED_PRECONDITION,
}


async def serve(
    streams: BrokerStreams,
    cursors: BrokerCursors,
    groups: BrokerGroups,
    port: int,
    *,
    token: str | None,
    credentials: grpc.ServerCredentials | None,
) -> tuple[Any, int]:
    """Serve the API on loopback. Return the server and its port; a `port` of 0 picks a free one."""
    guards = [_TokenGuard(token)] if token else []
    server = grpc.aio.server(interceptors=guards, options=[("grpc.so_reuseport", 0)])
    servicer = _Servicer(streams, cursors, groups)
    add_APIServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{port}"
    if credentials is None:
        servicer.port = server.add_insecure_port(address)
    else:
        servicer.port = server.add_secure_port(address, credentials)
    await server.start()
    return server, servicer.port


class _TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without a bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = ("authorization", f"Bearer {token}")

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if self._expected in handler_call_details.invocation_metadata:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse_stream)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Any) -> None:  # noqa: ARG001
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")


async def _refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
    await _refuse(request, context)
    yield None


class _Servicer(APIServicer):
    def __init__(self, broker: BrokerStreams, cursors: BrokerCursors, groups: BrokerGroups) -> None:
        self._broker = broker
        self._cursors = cursors
        self._groups = groups
        self.port = 0

    async def CreateStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        for value, text in (
            (request.name, "Name cannot be empty"),
            (request.subject, "Subject is invalid"),
        ):
            if not value:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if request.name in self._broker.streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "stream already exists")
        self._broker.create_requests[request.name] = request
        await self._broker.create_stream(
            request.name,
            request.subject,
            request.partitions or 1,
            concurrency_control=request.optimisticConcurrencyControl.value,
            compact=request.compactEnabled.value,
        )
        return api_pb2.CreateStreamResponse()

    async def DeleteStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self._broker.streams:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such stream")
        await self._broker.delete_stream(request.name)
        return api_pb2.DeleteStreamResponse()

    async def PauseStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        stream = await self._stream_of(request.name, 0, context)
        stream.paused.update(request.partitions or range(stream.stream.partitions))
        stream.ever_paused.update(stream.paused)
        await stream.notify()
        return api_pb2.PauseStreamResponse()

    async def SetStreamReadonly(self, request: Any, context: Any) -> Any:  # noqa: N802
        stream = await self._stream_of(request.name, 0, context)
        partitions = request.partitions or range(stream.stream.partitions)
        if request.readonly:
            stream.readonly.update(partitions)
        else:
            stream.readonly.difference_update(partitions)
        await stream.notify()
        return api_pb2.SetStreamReadonlyResponse()

    async def FetchMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        response = api_pb2.FetchMetadataResponse(
            brokers=[api_pb2.Broker(id=_BROKER, host="127.0.0.1", port=self.port)]
        )
        known = {} if self._broker.answers_without_streams else self._broker.streams
        if self._broker.answers_without_streams:
            self._broker.answers_without_streams -= 1
        for name in request.streams or list(known):
            if name in known:
                response.streamMetadata.append(_describe(known[name]))
            else:
                response.streamMetadata.append(
                    api_pb2.StreamMetadata(name=name, error=api_pb2.StreamMetadata.UNKNOWN_STREAM)
                )
        self._add_groups(request, response)
        return response

    async def FetchPartitionMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        stream = await self._stream_of(request.stream, request.partition, context)
        if request.partition in stream.paused:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "The request should be sent to partition leader",
            )
        return api_pb2.FetchPartitionMetadataResponse(
            metadata=_describe(stream).partitions[request.partition]
        )

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        stream = await self._stream_of(request.stream, request.partition, context)
        if request.resume:
            stream.paused.discard(request.partition)
        try:
            reader = PartitionSubscription(stream, request)
            await reader.begin()
            yield api_pb2.Message()
            while not reader.is_replaced:
                for stored in reader.read():
                    yield _message(request.stream, request.partition, stored)
                reader.check_end()
                async with stream.changed:
                    await stream.changed.wait_for(
                        lambda: reader.has_news or self._is_deleted(stream)
                    )
                if self._is_deleted(stream):
                    await context.abort(grpc.StatusCode.NOT_FOUND, "commit log was deleted")
        except SubscriptionEnded as end:
            await context.abort(end.code, end.text)

    def _is_deleted(self, stream: BrokerStream) -> bool:
        return self._broker.streams.get(stream.stream.name) is not stream

    async def Publish(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = await self._publish(request)
        if response.HasField("asyncError"):
            code = _STATUS.get(response.asyncError.code, grpc.StatusCode.UNKNOWN)
            await context.abort(code, response.asyncError.message)
        # Like the real broker: without a deadline there is no wait for the ack.
        if request.ackPolicy == AckPolicy.NONE or context.time_remaining() is None:
            return api_pb2.PublishResponse()
        return response

    async def PublishAsync(  # noqa: N802
        self,
        request_iterator: AsyncIterator[Any],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        async for request in request_iterator:
            response = await self._publish(request)
            if response.HasField("asyncError") or request.ackPolicy != AckPolicy.NONE:
                yield response

    async def _publish(self, request: Any) -> Any:
        """Store a message as a real broker does, and return what PublishAsync answers."""
        response = api_pb2.PublishResponse(correlationId=request.correlationId)
        error = response.asyncError
        stream = self._broker.streams.get(request.stream)
        if stream is None or self._broker.answers_without_streams:
            error.code = api_pb2.PublishAsyncError.NOT_FOUND
            error.message = f"no such stream: {request.stream}"
            return response
        if request.partition in stream.readonly:
            error.code = api_pb2.PublishAsyncError.READONLY
            error.message = f"readonly partition: {request.partition}"
            return response
        stream.paused.discard(request.partition)
        message = Published(
            offset=request.expectedOffset,
            key=request.key,
            value=request.value,
            headers=dict(request.headers),
            correlationId=request.correlationId,
            ackPolicy=request.ackPolicy,
        )
        subject = stream.stream.subject_of(request.partition)
        ack = await self._broker.accept(
            stream, request.partition, subject, message, request.ByteSize()
        )
        if ack.ackError:
            error.code, error.message = _REFUSED[AckError(ack.ackError)]
        else:
            response.ClearField("asyncError")
            response.ack.ParseFromString(ack.SerializeToString())
        return response

    async def _stream_of(self, stream: str, partition: int, context: Any) -> BrokerStream:
        broker_stream = self._broker.streams.get(stream)
        if (
            broker_stream is None
            or self._broker.answers_without_streams
            or not 0 <= partition < broker_stream.stream.partitions
        ):
            await context.abort(grpc.StatusCode.NOT_FOUND, "No such partition")
        assert broker_stream is not None
        return broker_stream

    # Groups and cursors

    def _add_groups(self, request: Any, response: Any) -> None:
        """Add the groups that were asked for to an answer with metadata."""
        for group in request.groups:
            epoch = self._groups.epoch(group)
            found = api_pb2.ConsumerGroupMetadata(groupId=group)
            if epoch is None:
                found.error = api_pb2.ConsumerGroupMetadata.UNKNOWN_GROUP
            else:
                found.coordinator, found.epoch = _BROKER, epoch
            response.groupMetadata.append(found)

    async def JoinConsumerGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            epoch = self._groups.join(request.groupId, request.consumerId, request.streams)
        except GroupError as error:
            await _abort(context, error)
        timeout = int(self._groups.timeout * _NANOSECONDS)
        return api_pb2.JoinConsumerGroupResponse(
            coordinator=_BROKER, epoch=epoch, consumerTimeout=timeout, coordinatorTimeout=timeout
        )

    async def LeaveConsumerGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            self._groups.leave(request.groupId, request.consumerId)
        except GroupError as error:
            await _abort(context, error)
        return api_pb2.LeaveConsumerGroupResponse()

    async def FetchConsumerGroupAssignments(  # noqa: N802
        self, request: Any, context: Any
    ) -> Any:
        try:
            assigned = self._groups.assignments(request.groupId, request.consumerId, request.epoch)
        except GroupError as error:
            await _abort(context, error)
        return api_pb2.FetchConsumerGroupAssignmentsResponse(
            epoch=request.epoch,
            assignments=[
                api_pb2.PartitionAssignment(stream=stream, partitions=partitions)
                for stream, partitions in assigned.items()
            ],
        )

    async def ReportConsumerGroupCoordinator(  # noqa: N802
        self,
        request: Any,  # noqa: ARG002
        context: Any,
    ) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "No group coordinator candidates")

    async def SetCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._require_cursors(context)
        if not request.stream:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "No stream provided")
        await self._cursors.set(request.stream, request.cursorId, request.partition, request.offset)
        return api_pb2.SetCursorResponse()

    async def FetchCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._require_cursors(context)
        offset = self._cursors.fetch(request.stream, request.cursorId, request.partition)
        return api_pb2.FetchCursorResponse(offset=offset)

    async def _require_cursors(self, context: Any) -> None:
        if CURSORS not in self._broker.streams:
            await context.abort(grpc.StatusCode.INTERNAL, "Cursors stream does not exist")


def _describe(stream: BrokerStream) -> Any:
    response = api_pb2.StreamMetadata(
        name=stream.stream.name, subject=stream.stream.subject, creationTimestamp=time.time_ns()
    )
    for partition in range(stream.stream.partitions):
        response.partitions[partition].CopyFrom(
            api_pb2.PartitionMetadata(
                id=partition,
                leader=_BROKER,
                replicas=[_BROKER],
                isr=[_BROKER],
                highWatermark=stream.high_watermark[partition],
                newestOffset=stream.next_offset[partition] - 1,
                paused=partition in stream.ever_paused,
                readonly=partition in stream.readonly,
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


async def _abort(context: Any, error: GroupError) -> NoReturn:
    missing = isinstance(error, GroupMissingError)
    code = grpc.StatusCode.NOT_FOUND if missing else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
