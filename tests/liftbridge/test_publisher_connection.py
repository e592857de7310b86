"""A publisher whose broker or NATS goes away, or that is closed or cancelled.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio
import anyio.abc
import pytest

from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    BrokerUnavailableError,
    LiftbridgeError,
    LiftbridgePublisher,
    nats_connection,
)
from feedapi_client.testing.liftbridge import NatsServer, free_port
from tests.faults.server import Gate
from tests.liftbridge.acker import Acker
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.liftbridge.middle import Fault, Middle, expire_acks

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("way_through_nats_py"),
]


@asynccontextmanager
async def own_nats() -> AsyncIterator[tuple[NatsServer, Acker, LiftbridgePublisher]]:
    """A NATS server that a test may stop, with what acks on it, and a publisher."""
    with NatsServer() as server:
        async with (
            Acker(server.url, "s") as acker,
            LiftbridgePublisher(server.url, ack_timeout=SAFETY_NET, max_in_flight=64) as publisher,
        ):
            yield server, acker, publisher


async def acker_hears(server: NatsServer, acker: Acker) -> None:
    """Wait until the acker is connected again, too: until then NATS drops what is published."""
    async with LiftbridgePublisher(server.url) as publisher:
        before = len(acker.messages["s"])
        with anyio.fail_after(SAFETY_NET):
            while len(acker.messages["s"]) == before:
                await publisher.publish("s", b"", ack_policy=AckPolicy.NONE)
                await anyio.sleep(0.005)


async def test_a_restart_of_nats_loses_no_ack_and_counts_none_twice() -> None:
    async with own_nats() as (server, acker, publisher):
        acked: list[bytes] = []
        failed: list[bytes] = []

        async def publish_all() -> None:
            for i in range(300):
                try:
                    await publisher.publish("s", b"%d" % i)
                    acked.append(b"%d" % i)
                except AckTimeoutError:
                    failed.append(b"%d" % i)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish_all)
            for restarts, wait_for in ((1, 50), (2, 150)):
                await eventually(lambda wait_for=wait_for: len(acked) >= wait_for)  # type: ignore[misc]
                await anyio.to_thread.run_sync(server.restart)
                await eventually(
                    lambda restarts=restarts: publisher.stats.reconnects >= restarts  # type: ignore[misc]
                )
                await acker_hears(server, acker)
                # The message that was in flight meanwhile may be lost.
                expire_acks(publisher)
        assert len(acked) + len(failed) == 300
        assert set(acked) <= set(acker.values("s"))
        assert publisher.stats.acked == len(acked)
        assert publisher.stats.reconnects == 2
        assert len(failed) <= 2


async def test_publishing_while_nats_is_away_waits_and_continues(broker: Broker) -> None:
    stream = await broker.create()
    # It is away for the publisher only: the broker would have to come back before it.
    with Gate(urlsplit(broker.nats_url).port or 0) as gate:
        gate.open()
        url = f"nats://127.0.0.1:{gate.port}"
        async with LiftbridgePublisher(url, ack_timeout=SAFETY_NET) as publisher:
            await publisher.publish(stream, b"before")
            gate.close()
            await eventually(lambda: not publisher._client().is_connected)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, stream, b"meanwhile")
                await anyio.wait_all_tasks_blocked()
                assert await broker.values() == [b"before"]
                gate.open()
            assert await broker.values() == [b"before", b"meanwhile"]


async def test_a_timeout_while_nats_is_away_says_that_the_message_was_not_sent() -> None:
    with NatsServer() as server:
        async with LiftbridgePublisher(server.url, ack_timeout=0.1) as publisher:
            server.stop()
            await eventually(lambda: not publisher._client().is_connected)
            with pytest.raises(AckTimeoutError, match="not sent"):
                await publisher.publish("s", b"x")


async def test_a_failed_connection_is_an_error_without_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = f"127.0.0.1:{free_port()}"
    publisher = LiftbridgePublisher(f"nats://user:secret@{place}", connect_timeout=0.3)
    with pytest.raises(BrokerUnavailableError) as caught:
        await publisher.__aenter__()
    assert "secret" not in f"{caught.value} {caplog.text}"
    assert "127.0.0.1:" in str(caught.value)
    assert "NATS at " in caplog.text


async def lose_a_cancellation() -> None:
    """Go on although it is cancelled, as `asyncio.wait_for` of Python 3.11 may."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(SAFETY_NET)
    await asyncio.sleep(SAFETY_NET)


@pytest.mark.timeout(SAFETY_NET / 2)
async def test_a_cancellation_that_nats_py_loses_does_not_keep_a_publisher_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_connection.Client, "connect", lambda *_, **__: lose_a_cancellation())
    with pytest.raises(BrokerUnavailableError, match=r"within 0\.01 s"):
        await LiftbridgePublisher("nats://127.0.0.1:1", connect_timeout=0.01).__aenter__()


@pytest.mark.parametrize("kind", ["silent", "no NATS server", "the user is refused"])
async def test_a_failed_connection_leaves_no_socket_open(kind: str) -> None:
    ended = anyio.Event()

    async def answer(client: anyio.abc.SocketStream) -> None:
        async with client:
            if kind == "no NATS server":
                await client.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            elif kind == "the user is refused":
                await client.send(b'INFO {"auth_required": true}\r\n')
                await client.receive()
                await client.send(b"-ERR 'Authorization Violation'\r\n")
            with suppress(anyio.EndOfStream):
                while True:
                    await client.receive()
        ended.set()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(BrokerUnavailableError):
            async with LiftbridgePublisher(f"nats://u:p@127.0.0.1:{port}", connect_timeout=0.3):
                pass
        with anyio.fail_after(SAFETY_NET):
            await ended.wait()
        tasks.cancel_scope.cancel()


async def test_closing_the_publisher_fails_messages_in_flight(
    broker: Broker, middle: Middle
) -> None:
    stream = await broker.create()
    middle.always = Fault.DROP_ACK
    async with LiftbridgePublisher(middle.url) as publisher:
        waiting = asyncio.create_task(publisher.publish(stream, b"x"))
        await eventually(lambda: middle.received)
    with pytest.raises(AckTimeoutError, match="closed"):
        await waiting


async def test_a_cancelled_publish_leaves_nothing_behind(broker: Broker, middle: Middle) -> None:
    stream = await broker.create()
    middle.acks = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(broker.publisher.publish, stream, b"x")
        await eventually(lambda: middle.received == 1)
        tasks.cancel_scope.cancel()
    assert broker.publisher.in_flight == 0
    middle.acks.set()
    assert await broker.publisher.publish(stream, b"y")


async def test_cancelling_a_publish_that_waits_for_room_leaves_room_for_others(
    broker: Broker, middle: Middle
) -> None:
    stream = await broker.create()
    middle.script(Fault.DROP_ACK)
    async with LiftbridgePublisher(
        middle.url, max_in_flight=1, ack_timeout=SAFETY_NET
    ) as publisher:
        first = asyncio.create_task(publisher.publish(stream, b"first"))
        await eventually(lambda: middle.received == 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.publish, stream, b"second")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        expire_acks(publisher)
        with pytest.raises(AckTimeoutError):
            await first
        await publisher.publish(stream, b"third")
    assert await broker.values() == [b"first", b"third"]


async def test_using_a_publisher_that_is_not_open_is_an_error() -> None:
    with pytest.raises(LiftbridgeError, match="async with"):
        await LiftbridgePublisher().publish("s", b"x")
