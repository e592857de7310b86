"""A publisher whose broker or NATS goes away, or that is closed or cancelled.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import anyio.abc
import nats
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    AckTimeoutError,
    BrokerUnavailableError,
    LiftbridgeError,
    LiftbridgePublisher,
    nats_connection,
    relay,
)
from feedapi_client.liftbridge.at_least_once import AcknowledgedPublishing
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer, free_port
from tests.faults.server import Gate
from tests.liftbridge.helpers import SAFETY_NET, eventually, expire_acks, values

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("way_through_nats_py"),
]


async def test_a_broker_that_restarts_loses_only_what_was_sent_meanwhile(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
        await publisher.publish("s", b"before")
        await broker.stop()
        with pytest.raises(AckTimeoutError):
            await publisher.publish("s", b"meanwhile", timeout=0.3)
        await broker.start()
        ack = await publisher.publish("s", b"after")
    assert ack is not None
    assert ack.offset == 1
    assert values(broker) == [b"before", b"after"]


@asynccontextmanager
async def own_nats() -> AsyncIterator[tuple[NatsServer, LiftbridgeBroker, LiftbridgePublisher]]:
    """A NATS server that a test may stop, with a broker and a publisher."""
    with NatsServer() as server:
        async with (
            LiftbridgeBroker(server.url) as broker,
            LiftbridgePublisher(server.url, ack_timeout=SAFETY_NET, max_in_flight=64) as publisher,
        ):
            await broker.create_stream("s")
            yield server, broker, publisher


async def broker_hears(server: NatsServer, broker: LiftbridgeBroker) -> None:
    """Wait until the broker is connected again, too: until then NATS drops what is published."""
    client = await nats.connect(server.url)
    word = uuid4().bytes
    try:
        with anyio.fail_after(SAFETY_NET):
            while word not in values(broker):
                await client.publish("s", word)
                await anyio.sleep(0.005)
    finally:
        await client.close()


async def test_a_restart_of_nats_loses_no_ack_and_counts_none_twice() -> None:
    async with own_nats() as (server, broker, publisher):
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
                await broker_hears(server, broker)
                # The message that was in flight meanwhile may be lost.
                expire_acks(publisher)
        assert len(acked) + len(failed) == 300
        assert set(acked) <= set(values(broker))
        assert publisher.stats.acked == len(acked)
        assert publisher.stats.reconnects == 2
        assert len(failed) <= 2


async def test_publishing_while_nats_is_away_waits_and_continues(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    # It is away for the publisher only: the broker would have to come back before it.
    with Gate(urlsplit(nats_server.url).port or 0) as gate:
        gate.open()
        async with LiftbridgePublisher(
            f"nats://127.0.0.1:{gate.port}", ack_timeout=SAFETY_NET
        ) as publisher:
            await publisher.publish("s", b"before")
            gate.close()
            await eventually(lambda: not publisher._client().is_connected)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, "s", b"meanwhile")
                await anyio.wait_all_tasks_blocked()
                assert values(broker) == [b"before"]
                gate.open()
            assert values(broker) == [b"before", b"meanwhile"]


async def test_a_timeout_while_nats_is_away_says_that_the_message_was_not_sent() -> None:
    with NatsServer() as server:
        async with LiftbridgePublisher(server.url) as publisher:
            server.stop()
            await eventually(lambda: not publisher._client().is_connected)
            with pytest.raises(AckTimeoutError, match="not sent"):
                await publisher.publish("s", b"x", timeout=0.1)


async def test_a_failed_connection_is_an_error_without_credentials(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And while it is waited for, it is said what for."""
    monkeypatch.setattr(nats_connection, "_SILENT_SECONDS", 0.0)
    place = f"127.0.0.1:{free_port()}"
    publisher = LiftbridgePublisher(f"nats://user:secret@{place}", connect_timeout=0.3)
    with pytest.raises(BrokerUnavailableError) as caught:
        await publisher.__aenter__()
    assert "secret" not in f"{caught.value} {caplog.text}"
    assert "127.0.0.1:" in str(caught.value)
    assert f"waiting for NATS at {place}, at most 0.3 s" in caplog.messages


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


@pytest.mark.timeout(SAFETY_NET / 2)
async def test_a_cancellation_that_nats_py_loses_does_not_keep_a_relay_from_its_end(
    feedapi_publisher: Publisher,
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking = anyio.Event()

    async def look(_: object) -> None:
        looking.set()
        await lose_a_cancellation()

    monkeypatch.setattr(relay, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(AcknowledgedPublishing, "look_for_losses", look)
    await broker.create_stream("s")
    async with (
        FeedConsumer(feedapi_publisher.url or "") as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(relay.Relay(consumer, publisher, "s").run)
        await looking.wait()
        consumer.stop()


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
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    broker.always = BrokerFault.DROP_ACK
    async with LiftbridgePublisher(nats_server.url) as publisher:
        waiting = asyncio.create_task(publisher.publish("s", b"x"))
        await eventually(lambda: broker.messages("s"))
    with pytest.raises(AckTimeoutError, match="closed"):
        await waiting


async def test_a_cancelled_publish_leaves_nothing_behind(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    broker.script(BrokerFault.DROP_ACK)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.publish, "s", b"x")
        await eventually(lambda: broker.received == 1)
        tasks.cancel_scope.cancel()
    assert publisher.in_flight == 0
    assert await publisher.publish("s", b"y")


async def test_cancelling_a_publish_that_waits_for_room_leaves_room_for_others(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    broker.script(BrokerFault.DROP_ACK)
    async with LiftbridgePublisher(
        nats_server.url, max_in_flight=1, ack_timeout=SAFETY_NET
    ) as publisher:
        first = asyncio.create_task(publisher.publish("s", b"first"))
        await eventually(lambda: broker.received == 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.publish, "s", b"second")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        expire_acks(publisher)
        with pytest.raises(AckTimeoutError):
            await first
        await publisher.publish("s", b"third")
    assert values(broker) == [b"first", b"third"]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB other 0\r\n"])
async def test_a_subject_can_not_inject_commands_of_nats(
    publisher: LiftbridgePublisher, subject: str
) -> None:
    with pytest.raises(ValueError, match=r"subject|name"):
        await publisher.publish(subject, b"x")
    assert publisher.in_flight == 0


async def test_a_callers_own_connection_stays_open(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    client = await nats.connect(nats_server.url)
    async with LiftbridgePublisher(client) as publisher:
        await publisher.publish("s", b"x")
    assert client.is_connected
    await client.close()


async def test_using_a_publisher_that_is_not_open_is_an_error() -> None:
    with pytest.raises(LiftbridgeError, match="async with"):
        await LiftbridgePublisher().publish("s", b"x")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_on_trio_the_error_says_that_asyncio_is_needed(anyio_backend: str) -> None:
    with pytest.raises(LiftbridgeError, match="asyncio"):
        await LiftbridgePublisher().__aenter__()
