"""What holds against the stand-in and against the real broker, in the same words."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Message,
    OutgoingBatch,
    RelayReader,
    StreamCursorStore,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import SETTINGS, Cluster, Real, StandIn, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FORMATS = ["batch", "events"]
KEY = FeedKey("http://localhost/feed")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def real_server(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=SETTINGS) as server:
        yield server


@pytest.fixture(params=["stand-in", "real"])
async def cluster(
    request: pytest.FixtureRequest, nats_server: NatsServer, anyio_backend: str
) -> AsyncIterator[Cluster]:
    if request.param == "real":
        yield Real(request.getfixturevalue("real_server"), nats_server.url)
        return
    async with LiftbridgeBroker(nats_server.url, grpc=True) as broker:
        yield StandIn(broker, nats_server.url)


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api:
        yield api


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[LiftbridgePublisher]:
    # A short ack timeout, because messages are lost while the broker is down.
    async with LiftbridgePublisher(cluster.nats_url, ack_timeout=1.0) as publisher:
        yield publisher


@pytest.fixture
def name() -> str:
    """A name for a stream that no other test has."""
    return f"contract-{next(_numbers)}"


def store_of(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, name: str, format: str
) -> StreamCursorStore:
    return StreamCursorStore(publisher, api, name, format=format, attempts=1000)


async def save(store: StreamCursorStore, revision: int, *numbers: int) -> None:
    """Save position `revision` with events of these numbers."""
    batch = OutgoingBatch(0, f"c{revision}", [b'{"n":%d}' % n for n in numbers])
    await store.save(KEY, {0: Position(f"c{revision}", revision=revision)}, transaction=batch)


async def read(messages: AsyncGenerator[Message, None], count: int) -> list[int]:
    """Return the offsets of the first messages."""
    offsets: list[int] = []
    async with aclosing(messages) as open_messages:
        async for message in open_messages:
            offsets.append(message.offset)
            if len(offsets) == count:
                break
    return offsets


async def relayed(api: LiftbridgeApi, name: str, count: int, **options: Any) -> list[int]:
    """Return the numbers of the first relayed events."""
    found: list[int] = []
    async with aclosing(RelayReader(api, name, **options).batches()) as batches:
        async for batch in batches:
            found += [orjson.loads(event)["n"] for event in batch.events]
            if len(found) >= count:
                break
    return found


# After a crash the high watermark is below the newest offset


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_starts_after_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    await cluster.crash()
    restarted = store_of(publisher, api, name, format)
    assert await restarted.load(KEY) == {0: Position("c1", revision=1)}
    await save(restarted, 2, 3)
    assert await relayed(api, name, 3) == [1, 2, 3]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_running_relay_survives_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    for revision in range(1, 4):
        await cluster.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, store, revision, revision)
            await anyio.lowlevel.checkpoint()
            await cluster.start()
    await save(store, 4, 4)
    assert await relayed(api, name, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [5, "new"])
async def test_a_subscription_above_the_high_watermark_gets_nothing_older(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    start: Any,
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    await cluster.crash()
    await api.partition_metadata(name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await read(api.subscribe(name, start), 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        while not found:
            await publisher.publish(name, b"later")
    assert found[0] >= 5


async def test_a_reader_that_resumes_after_a_crash_gets_each_batch_once(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, "batch")
    await store.load(KEY)
    for n in range(1, 6):
        await save(store, n, n)
    start = (await api.partition_metadata(name)).newest_offset + 1
    await cluster.crash()
    await api.partition_metadata(name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await relayed(api, name, 1, start=start))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await save(store, 6, 6)
    assert found == [6]


async def test_a_live_subscription_survives_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    found: list[int] = []
    async with aclosing(api.subscribe(name)) as messages:
        async for message in messages:
            found.append(message.offset)
            if len(found) == 5:
                await cluster.crash()
                await api.partition_metadata(name)
                await publisher.publish_many(name, [b"y"] * 5)
            if len(found) == 10:
                break
    assert found == list(range(10))
