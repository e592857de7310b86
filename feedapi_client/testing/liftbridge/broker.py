"""A stand-in for a Liftbridge broker, on a real NATS server.

Publishers and relays are tested against it without a cluster. It decodes what is published, stores
it in memory, acks it as a broker does, checks expected offsets on streams that ask for it, and
fails on request. With ``grpc=True`` it also answers the parts of Liftbridge's gRPC API that
`feedapi_client.liftbridge.LiftbridgeApi` uses, from the same storage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import nats
from grpc import ServerCredentials
from nats.aio.client import Client
from nats.aio.msg import Msg

from feedapi_client.liftbridge.envelope import AckPolicy, decode_message, encode
from feedapi_client.liftbridge.liftbridge_errors import EnvelopeError
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.nats_connection import flush
from feedapi_client.liftbridge.stream_name import REPLICATION_LIMIT
from feedapi_client.testing.liftbridge.broker_cursors import BrokerCursors, cursors_stream
from feedapi_client.testing.liftbridge.groups import BrokerGroups
from feedapi_client.testing.liftbridge.streams import (
    BrokerFault,
    BrokerStream,
    BrokerStreams,
    StoredMessage,
)

# After a restart, so that every test of a restart meets them.
_ANSWERS_WITHOUT_STREAMS = 2
# Seconds in which clients may end their calls. A client whose calls are cancelled, or whose closed
# channel still has its connection, writes a line about that to the application's stderr.
_GRACE = 1.0


class LiftbridgeBroker(BrokerStreams):
    """The stand-in for a broker. Use it in `async with`, on asyncio.

    Create streams, publish to them, and look at `messages`. Three attributes and `script` say what
    goes wrong with a publish, in this order: `decide` is called with the message and returns a
    `BrokerFault` or None; then comes the next entry of the script; then `always`. Acks are sent
    after `ack_delay` seconds. `received` counts all messages. The next `answers_without_streams`
    answers of the gRPC API list no streams, as while a real broker starts.

    Arguments:
        nats_url: Where NATS listens, as `NatsServer.url`.
        grpc: Also serve the gRPC API, at `address`.
        keeps_cursors: Whether there is a stream of cursors, which a real broker has on demand.
        credentials: Serve the gRPC API over TLS.
        token: Refuse calls of the gRPC API without this bearer token, as a proxy before it does.
        member_timeout: Seconds after which a silent member of a consumer group is thrown out.
    """

    def __init__(
        self,
        nats_url: str,
        *,
        grpc: bool = False,
        keeps_cursors: bool = True,
        credentials: ServerCredentials | None = None,
        token: str | None = None,
        member_timeout: float = 15.0,
    ) -> None:
        super().__init__()
        if grpc and keeps_cursors:
            self.add_stream(cursors_stream())
        self.cursors = BrokerCursors(self)
        self.groups = BrokerGroups(
            lambda name: self.streams[name].stream.partitions if name in self.streams else 0,
            member_timeout,
        )
        self.ack_delay = 0.0
        self.always: BrokerFault | None = None
        self.decide: Callable[[Message], BrokerFault | None] | None = None
        self.received = 0
        self._nats_url = nats_url
        self._with_grpc = grpc
        self._credentials = credentials
        self._token = token
        self._script: deque[BrokerFault | None] = deque()
        self._client: Client | None = None
        self._server: Any = None
        self._port = 0
        self._delayed: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LiftbridgeBroker:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stop(_GRACE)

    @property
    def address(self) -> str:
        """The gRPC API as ``host:port``."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Connect to NATS, subscribe to the subjects of all streams, and serve the gRPC API."""
        self._client = await nats.connect(
            self._nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore
        )
        for stream in self.streams.values():
            await self._subscribe(stream)
        self.groups.forgive()
        if self._with_grpc:
            from feedapi_client.testing.liftbridge.grpc_api import serve

            self._server, self._port = await serve(
                self,
                self.cursors,
                self.groups,
                self._port,
                token=self._token,
                credentials=self._credentials,
            )

    async def stop(self) -> None:
        """Stop as in a crash.

        Stored messages stay, messages that arrive meanwhile are lost, and acks that were not sent
        yet are never sent. The high watermarks of the last `checkpoint` remain, so readers see no
        newer message until something is published again.
        """
        await self._stop(None)

    async def _stop(self, grace: float | None) -> None:
        for task in list(self._delayed):
            task.cancel()
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        if self._client is not None:
            await self._client.close()
            self._client = None
            self.recover()
            self.cursors.forget()
            self.answers_without_streams = _ANSWERS_WITHOUT_STREAMS

    async def restart(self) -> None:
        """Stop and start."""
        await self.stop()
        await self.start()

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
        """Create a stream and subscribe to its subjects.

        Raises ValueError when there is one of that name.
        """
        stream = await super().create_stream(
            name,
            subject,
            partitions,
            concurrency_control=concurrency_control,
            max_message_bytes=max_message_bytes,
            compact=compact,
        )
        await self._subscribe(stream)
        return stream

    async def delete_stream(self, name: str) -> None:
        """Delete a stream and its messages. Raises KeyError when there is none."""
        stream = self.streams[name]
        await super().delete_stream(name)
        for subscription in stream.subscriptions:
            await subscription.unsubscribe()

    def script(self, *faults: BrokerFault | None) -> None:
        """Set what goes wrong with the next publishes.

        There is one entry for each. None stands for a publish that succeeds.
        """
        self._script.extend(faults)

    async def _subscribe(self, stream: BrokerStream) -> None:
        assert self._client is not None, "the broker is not started"
        stream.subscriptions = [
            await self._client.subscribe(
                stream.stream.subject_of(partition), cb=self._receiver(stream, partition)
            )
            for partition in range(stream.stream.partitions)
        ]
        await flush(self._client)

    def _receiver(self, stream: BrokerStream, partition: int) -> Callable[[Msg], Awaitable[None]]:
        async def receive(message: Msg) -> None:
            self.received += 1
            if not stream.takes_messages(partition):
                return
            try:
                published = decode_message(message.data)
            except EnvelopeError:
                await self.store(
                    stream,
                    partition,
                    StoredMessage(0, message.data, subject=message.subject, opaque=True),
                )
                return
            await self._publish(stream, partition, message.subject, published, len(message.data))

        return receive

    async def _publish(
        self, stream: BrokerStream, partition: int, subject: str, message: Message, size: int
    ) -> None:
        fault = self._fault(message)
        if fault is BrokerFault.LOSE:
            return
        ack = await self.accept(stream, partition, subject, message, size, fault)
        if (
            message.ackInbox
            and int(message.ackPolicy) != AckPolicy.NONE
            and fault is not BrokerFault.DROP_ACK
        ):
            await self._send_acks(message.ackInbox, _acks(ack, fault))

    def _fault(self, message: Message) -> BrokerFault | None:
        if self.decide is not None and (fault := self.decide(message)) is not None:
            return fault
        return self._script.popleft() if self._script else self.always

    async def _send_acks(self, inbox: str, acks: list[bytes]) -> None:
        if not self.ack_delay:
            await self._send(inbox, acks)
            return
        task = asyncio.create_task(self._send_later(inbox, acks))
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)

    async def _send_later(self, inbox: str, acks: list[bytes]) -> None:
        await asyncio.sleep(self.ack_delay)
        await self._send(inbox, acks)

    async def _send(self, inbox: str, acks: list[bytes]) -> None:
        if self._client is not None and not self._client.is_closed:
            for ack in acks:
                await self._client.publish(inbox, ack)


def _acks(ack: Ack, fault: BrokerFault | None) -> list[bytes]:
    """Return what is sent to the inbox of a publisher."""
    encoded = encode(ack)
    if fault is BrokerFault.DOUBLE_ACK:
        return [encoded, encoded]
    if fault is BrokerFault.GARBAGE:
        return [b"garbage", encoded[:9], encode(b"\xff\xff\xff", 1), encoded]
    if fault in (BrokerFault.FOREIGN_ACK, BrokerFault.UNKNOWN_ACK):
        other = Ack()
        other.CopyFrom(ack)
        if fault is BrokerFault.FOREIGN_ACK:
            other.stream += "-of-another"
        else:
            other.correlationId += "-of-another"
        return [encode(other), encoded]
    return [encoded]


async def _ignore(error: Exception) -> None:
    """Do nothing: lost connections to NATS are part of the tests."""
