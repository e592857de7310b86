"""Relays while a broker, or a part of it, is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import anyio
import pytest

from feedapi_client import FeedConsumer, MemoryCursorStore, StoreError
from feedapi_client.liftbridge import (
    AckTimeoutError,
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    StreamCursorStore,
)
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer, free_port
from tests.liftbridge.clusters import SETTINGS, Cluster, require_liftbridge
from tests.liftbridge.contract.reading import FORMATS, look_often
from tests.liftbridge.helpers import SAFETY_NET, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MODES = ["at least once", *FORMATS]
_LIMITS = Limits(max_batch_bytes=500_000, commit_timeout=0.5, poll_interval=0.05)
_AWAY = 2.0
"""Seconds within which several attempts at a commit, a publish and a call fail."""


class Gate:
    """A TCP proxy that can be shut. It has then ended the connections that it serves."""

    def __init__(self, port: int, target: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._host, _, self._target_port = target.partition(":")
        self._scope = anyio.CancelScope()
        self._is_shut = anyio.Event()

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with self._scope:
            listener = await anyio.create_tcp_listener(
                local_host="127.0.0.1", local_port=self._port
            )
            async with listener:
                task_status.started()
                await listener.serve(self._connect)
        self._is_shut.set()

    async def shut(self) -> None:
        self._scope.cancel()
        await self._is_shut.wait()

    async def _connect(self, client: anyio.abc.SocketStream) -> None:
        async with (
            client,
            await anyio.connect_tcp(self._host, int(self._target_port)) as broker,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_copy, client, broker)
            tasks.start_soon(_copy, broker, client)


async def _copy(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for data in source:
            await target.send(data)
    await target.aclose()


@pytest.fixture(scope="module")
def gated(nats_server: NatsServer) -> Iterator[tuple[LiftbridgeServer, int]]:
    """A real broker, and the port of the gate that it tells its clients."""
    require_liftbridge()
    port = free_port()
    settings = {**SETTINGS, "host": "127.0.0.1", "port": port}
    with LiftbridgeServer(nats_server.url, settings=settings) as server:
        yield server, port


@pytest.fixture
async def gate(gated: tuple[LiftbridgeServer, int], anyio_backend: str) -> AsyncIterator[Gate]:
    """What the gRPC API of a real broker is reached through."""
    server, port = gated
    gate = Gate(port, server.address)
    async with anyio.create_task_group() as tasks:
        await tasks.start(gate.serve)
        yield gate
        await gate.shut()


def store_for(
    mode: str, publisher: LiftbridgePublisher, api: LiftbridgeApi, name: str
) -> CursorStore:
    if mode == "at least once":
        return MemoryCursorStore()
    return StreamCursorStore(publisher, api, name, format=mode)


@pytest.mark.parametrize("mode", MODES)
async def test_a_relay_goes_on_over_nats_while_the_grpc_api_is_away(
    gate: Gate,
    nats_server: NatsServer,
    feed: Publisher,
    name: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch)
    async with (
        LiftbridgeApi(gate.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(nats_server.url, ack_timeout=10) as publisher,
    ):
        await api.create_stream(name, concurrency_control=mode != "at least once")
        store = store_for(mode, publisher, api, name)
        async with FeedConsumer(feed.url or "", store=store, limits=_LIMITS) as consumer:
            relay = Relay(consumer, publisher, name, api=api)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.run)
                await eventually(lambda: relay.progress.events == 20)
                await gate.shut()
                await anyio.sleep(_AWAY)  # the relay is idle, and looks at the stream often
                for more in (21, 22, 23):
                    feed.append(0, {"n": more - 1})
                    await eventually(lambda more=more: relay.progress.events == more)  # type: ignore[misc]
                consumer.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_that_is_away_longer_than_a_commit_may_take_is_waited_for(
    cluster: Cluster, feed: Publisher, name: str, mode: str
) -> None:
    async with (
        LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(cluster.nats_url, ack_timeout=0.5) as publisher,
    ):
        await api.create_stream(name, concurrency_control=mode != "at least once")
        store = store_for(mode, publisher, api, name)
        async with FeedConsumer(feed.url or "", store=store, limits=_LIMITS) as consumer:
            relay = Relay(consumer, publisher, name, api=api)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.run)
                await eventually(lambda: relay.progress.events == 20)
                await cluster.stop()
                feed.append(0, {"n": 20})
                await anyio.sleep(_AWAY)
                assert relay.progress.events == 20
                await cluster.start()
                await eventually(lambda: relay.progress.events == 21)
                consumer.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_that_stays_away_is_an_error_after_the_patience_of_the_consumer(
    cluster: Cluster, feed: Publisher, name: str, mode: str
) -> None:
    async with (
        LiftbridgeApi(cluster.address, timeout=1.0) as api,
        LiftbridgePublisher(cluster.nats_url, ack_timeout=0.5) as publisher,
    ):
        api.timeout = SAFETY_NET
        await api.create_stream(name, concurrency_control=mode != "at least once")
        store = store_for(mode, publisher, api, name)
        async with FeedConsumer(
            feed.url or "", store=store, limits=_LIMITS, retry=RetryPolicy(give_up_after=2.0)
        ) as consumer:
            relay = Relay(consumer, publisher, name)

            async def stop() -> None:
                await eventually(lambda: relay.progress.events == 20)
                await cluster.stop()
                api.timeout = 1.0
                feed.append(0, {"n": 20})

            stopping = asyncio.create_task(stop())
            with anyio.fail_after(SAFETY_NET), pytest.raises((StoreError, AckTimeoutError)):
                await relay.run()
            await stopping
        await cluster.start()


@pytest.mark.parametrize(
    ("mode", "native"),
    [("at least once", False), ("at least once", True), ("batch", True), ("events", False)],
)
async def test_a_relay_that_waits_for_its_broker_can_be_cancelled(
    cluster: Cluster, feed: Publisher, name: str, mode: str, native: bool
) -> None:
    async with (
        LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(cluster.nats_url, ack_timeout=0.5) as publisher,
    ):
        await api.create_stream(name, concurrency_control=mode != "at least once")
        store = store_for(mode, publisher, api, name)
        async with FeedConsumer(feed.url or "", store=store, limits=_LIMITS) as consumer:
            relay = Relay(consumer, publisher, name)
            async with anyio.create_task_group() as tasks:
                running = asyncio.ensure_future(_cancellable(relay, tasks, native=native))
                await eventually(lambda: relay.progress.events == 20)
                await cluster.stop()
                feed.append(0, {"n": 20})
                await anyio.sleep(_AWAY / 2)
                with anyio.fail_after(SAFETY_NET / 2):
                    if native:
                        running.cancel()
                    else:
                        tasks.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True), suppress(asyncio.CancelledError):
                        await asyncio.wait({running}, timeout=SAFETY_NET / 2)
                assert running.done()
                assert relay.progress.events == 20
        await cluster.start()


async def _cancellable(relay: Relay, tasks: anyio.abc.TaskGroup, *, native: bool) -> None:
    if native:
        await relay.run()
        return
    over = anyio.Event()

    async def run() -> None:
        try:
            await relay.run()
        finally:
            over.set()

    tasks.start_soon(run)
    await over.wait()
