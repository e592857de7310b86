"""Men in the middle of clients and a real broker, for what no broker does on demand."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import grpc
import grpc.aio
from anyio.streams.buffered import BufferedByteReceiveStream
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge import (
    Ack,
    EnvelopeError,
    LiftbridgePublisher,
    Message,
    encode,
)
from feedapi_client.liftbridge.envelope import decode_ack, decode_message

_LONGEST_LINE = 1 << 16
_LOST = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError)
"""What ends one of the two connections, and with it the other one."""


class Fault(StrEnum):
    """What goes wrong with a publish."""

    LOSE = "lose"
    """It does not reach the broker."""
    DROP_ACK = "drop-ack"
    """It is stored, and its ack is lost."""
    DOUBLE_ACK = "double-ack"
    FOREIGN_ACK = "foreign-ack"
    """Before the ack comes one of another stream with the same correlation id."""
    UNKNOWN_ACK = "unknown-ack"
    """Before the ack comes one with an unknown correlation id."""
    GARBAGE = "garbage"
    """Before the ack come bytes that aren't an envelope."""
    REFUSE = "refuse"
    """It does not reach the broker, and is acked with the error UNKNOWN."""
    ENCRYPTION = "encryption"
    """It does not reach the broker, and is acked with the error ENCRYPTION."""


_REFUSED = {Fault.REFUSE: Ack.Error.UNKNOWN, Fault.ENCRYPTION: Ack.Error.ENCRYPTION}


class Middle:
    """A TCP proxy before a NATS server, which does to messages and acks what a test says.

    For each message `decide` is asked first, then comes the next entry of the script, then
    `always`. `received` counts the messages, and `unheard` NATS's answers that nobody listens.
    While `acks` is not set, acks wait.
    """

    def __init__(self, nats_url: str) -> None:
        self._nats = urlsplit(nats_url)
        self.port = 0
        self.decide: Callable[[Message], Fault | None] | None = None
        self.always: Fault | None = None
        self.received = self.unheard = 0
        self.acks = anyio.Event()
        self.acks.set()
        self.withheld: set[tuple[str, str]] = set()
        """Inboxes and correlation ids of messages whose ack never comes."""
        self._script: deque[Fault | None] = deque()
        self._faults: dict[tuple[str, str], Fault | None] = {}

    @property
    def url(self) -> str:
        """Where publishers go."""
        user, at, _ = self._nats.netloc.rpartition("@")
        return f"nats://{user}{at}127.0.0.1:{self.port}"

    def script(self, *faults: Fault | None) -> None:
        """Set the faults of the next publishes; None: no fault."""
        self._script.extend(faults)

    def clear(self) -> None:
        """Do nothing more to what is published from now on."""
        self.decide = self.always = None
        self._script.clear()

    async def connect(self, client: anyio.abc.SocketStream) -> None:
        """Serve a connection, until one of its two sides ends it."""
        try:
            nats = await anyio.connect_tcp(self._nats.hostname or "", self._nats.port or 4222)
        except OSError:  # it is down: the client will come again
            await client.aclose()
            return
        async with client, nats, anyio.create_task_group() as tasks:
            connection = _Connection(self, client, nats, tasks)
            for copy in (connection.to_nats, connection.to_client):
                tasks.start_soon(_until_lost, copy, tasks.cancel_scope)

    def take(self, message: Message) -> Fault | None:
        """Return what goes wrong with a message."""
        self.received += 1
        fault = None if self.decide is None else self.decide(message)
        if fault is None:
            fault = self._script.popleft() if self._script else self.always
        place = (message.ackInbox, message.correlationId)
        self._faults[place] = fault
        if fault in (Fault.LOSE, Fault.DROP_ACK):
            self.withheld.add(place)
        return fault

    def acks_of(self, payload: bytes) -> list[bytes]:
        """Return what the client gets in place of an ack."""
        ack = decode_ack(payload)
        fault = self._faults.pop((ack.ackInbox, ack.correlationId), None)
        if fault is Fault.DROP_ACK:
            return []
        if fault is Fault.DOUBLE_ACK:
            return [payload, payload]
        if fault is Fault.GARBAGE:
            return [b"garbage", payload[:9], encode(b"\xff\xff\xff", 1), payload]
        other = Ack()
        other.CopyFrom(ack)
        if fault is Fault.FOREIGN_ACK:
            other.stream += "-of-another"
            return [encode(other), payload]
        if fault is Fault.UNKNOWN_ACK:
            other.correlationId += "-of-another"
            return [encode(other), payload]
        return [payload]


class _Connection:
    """The frames of one connection, in both directions."""

    def __init__(
        self,
        middle: Middle,
        client: anyio.abc.SocketStream,
        nats: anyio.abc.SocketStream,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._middle, self._client, self._nats, self._tasks = middle, client, nats, tasks
        self._sending = anyio.Lock()
        self._ids: dict[str, bytes] = {}
        """The ids of subscriptions by their subject."""

    async def to_nats(self) -> None:
        received = BufferedByteReceiveStream(self._client)
        while True:
            line = await received.receive_until(b"\r\n", _LONGEST_LINE)
            words, body = line.split(), b""
            if words[:1] == [b"SUB"]:
                self._ids[words[1].decode()] = words[-1]
            if words[:1] == [b"PUB"]:
                body = await received.receive_exactly(int(words[-1]) + 2)
                if not await self._passes(words[1], body[:-2]):
                    continue
            await self._nats.send(line + b"\r\n" + body)

    async def _passes(self, subject: bytes, payload: bytes) -> bool:
        """Return whether a message goes on to the broker. Refuse it in its place, if asked to."""
        try:
            message = decode_message(payload)
        except EnvelopeError:
            return True
        fault = self._middle.take(message)
        if fault in _REFUSED:
            ack = Ack(ackInbox=message.ackInbox, correlationId=message.correlationId)
            ack.stream, ack.ackError = subject.partition(b".")[0].decode(), _REFUSED[fault]
            inbox = message.ackInbox
            await self._send(inbox.encode(), self._ids[inbox], encode(ack))
        return fault is not Fault.LOSE and fault not in _REFUSED

    async def to_client(self) -> None:
        received = BufferedByteReceiveStream(self._nats)
        while True:
            line = await received.receive_until(b"\r\n", _LONGEST_LINE)
            words, body = line.split(), b""
            if words[:1] in ([b"MSG"], [b"HMSG"]):
                body = await received.receive_exactly(int(words[-1]) + 2)
            if words[:1] == [b"MSG"]:
                if self._middle.acks.is_set():
                    await self._answer(words, body[:-2])
                else:  # what comes behind it does not wait
                    self._tasks.start_soon(self._answer, words, body[:-2])
                continue
            self._middle.unheard += b" 503" in body
            async with self._sending:
                await self._client.send(line + b"\r\n" + body)

    async def _answer(self, words: list[bytes], payload: bytes) -> None:
        await self._middle.acks.wait()
        for each in self._middle.acks_of(payload):
            await self._send(words[1], words[2], each)

    async def _send(self, subject: bytes, id: bytes, payload: bytes) -> None:
        async with self._sending:
            await self._client.send(
                b"MSG %s %s %d\r\n%s\r\n" % (subject, id, len(payload), payload)
            )


async def _until_lost(copy: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    try:
        await copy()
    except _LOST:
        scope.cancel()


@asynccontextmanager
async def man_in_the_middle(nats_url: str) -> AsyncIterator[Middle]:
    """Serve a `Middle` before a NATS server."""
    middle = Middle(nats_url)
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        middle.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.start_soon(listener.serve, middle.connect)
        yield middle
        tasks.cancel_scope.cancel()


def expire_acks(publisher: LiftbridgePublisher) -> None:
    """Let the deadlines of all messages in flight pass."""
    publisher._acks.expire(math.inf)


async def expire_withheld(middle: Middle, publisher: LiftbridgePublisher) -> None:
    """Let acks that never come time out as soon as the publisher waits for nothing else.

    So no test has to guess how long the other acks take.
    """
    while True:
        mine = [id for inbox, id in middle.withheld if inbox == publisher._inbox]
        if 0 < publisher.in_flight == sum(id in publisher._acks for id in mine):
            expire_acks(publisher)
        await asyncio.sleep(0.002)


class GrpcMiddle:
    """A proxy before the gRPC API of a broker: over TLS, and with a token, if it is given these.

    `created` has the requests for new streams.
    """

    def __init__(self, address: str, token: str | None) -> None:
        self._address, self._token = address, token
        self.port = 0
        self.created: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """The API as ``host:port``."""
        return f"127.0.0.1:{self.port}"

    def service(self, call: Any) -> Any:
        """Return what handles a call: each as a stream of bytes in both directions."""
        metadata = dict(call.invocation_metadata)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if self._token and metadata.get("authorization") != f"Bearer {self._token}":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
            method = call.method.rpartition("/")[2]
            # Without a deadline the broker does not wait for the ack of a message.
            answers = self._channel.stream_stream(call.method)(
                self._noted(method, requests), timeout=context.time_remaining()
            )
            try:
                async for answer in answers:
                    yield self._moved(answer) if method == "FetchMetadata" else answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _noted(self, method: str, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            if method == "CreateStream":
                created = api_pb2.CreateStreamRequest.FromString(request)
                self.created[created.name] = created
            yield request

    def _moved(self, answer: bytes) -> bytes:
        """Say that the broker is here: clients go where its metadata says."""
        metadata = api_pb2.FetchMetadataResponse.FromString(answer)
        for broker in metadata.brokers:
            broker.port = self.port
        return metadata.SerializeToString()

    @asynccontextmanager
    async def serve(self, credentials: grpc.ServerCredentials | None) -> AsyncIterator[GrpcMiddle]:
        handler = grpc.GenericRpcHandler
        generic = type("Generic", (handler,), {"service": lambda _, call: self.service(call)})()
        server = grpc.aio.server(handlers=[generic])
        if credentials is None:
            self.port = server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = server.add_secure_port("127.0.0.1:0", credentials)
        async with grpc.aio.insecure_channel(self._address) as self._channel:
            await server.start()
            try:
                yield self
            finally:
                await server.stop(None)


def grpc_middle(
    address: str,
    *,
    token: str | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> Any:
    """Serve a `GrpcMiddle` before a broker."""
    return GrpcMiddle(address, token).serve(credentials)
