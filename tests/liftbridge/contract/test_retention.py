"""Ledgers whose broker removes old messages, on the real broker."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import anyio
import grpc
import pytest
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    OutgoingBatch,
    StreamCursorStore,
    StreamGapError,
    StreamOptions,
)
from feedapi_client.model import Position
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import CLEANS_OFTEN, require_liftbridge
from tests.liftbridge.contract.reading import FORMATS, KEY, save, store_of
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.positions import stand

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_AGE = 2.0
# As the broker's defaults do in 7 days.
_SETTINGS = {
    **CLEANS_OFTEN,
    "streams.segment.max.bytes": 1024,
    "streams.retention.max.age": f"{_AGE:g}s",
    "streams.segment.max.age": "500ms",
}
_KEPT = 8.0
"""Seconds that a process may not be run without that its newest messages are removed, too."""
_AGED = StreamOptions(
    retention_seconds=_KEPT, segment_seconds=0.5, segment_bytes=1 << 20, cleaner_seconds=0.2
)


@pytest.fixture(scope="module")
async def server(nats_server: NatsServer, anyio_backend: str) -> AsyncIterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=_SETTINGS) as server:
        yield server


@pytest.fixture
async def api(server: LiftbridgeServer) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(server.address, timeout=SAFETY_NET) as api:
        yield api


@pytest.fixture
async def publisher(server: LiftbridgeServer) -> AsyncIterator[LiftbridgePublisher]:
    async with LiftbridgePublisher(server.nats_url, ack_timeout=5.0) as publisher:
        yield publisher


async def create_aged(server: LiftbridgeServer, name: str) -> None:
    """Create a ledger as somebody else may do, whose messages the broker removes by their age."""
    request = api_pb2.CreateStreamRequest(
        name=name, subject=name, partitions=1, replicationFactor=1
    )
    request.optimisticConcurrencyControl.value = True
    _AGED.write_to(request, ledger=False)
    async with grpc.aio.insecure_channel(server.address) as channel:
        await APIStub(channel).CreateStream(request)


async def until_removed(server: LiftbridgeServer, name: str, offset: int) -> None:
    """Wait until the broker has deleted the segments with the messages up to an offset."""
    folder = server.data() / "streams" / name / "0"
    await eventually(lambda: min(int(log.stem) for log in folder.glob("*.log")) > offset)


@pytest.mark.parametrize("format", FORMATS)
async def test_the_default_age_of_a_broker_removes_nothing_from_a_ledger(
    server: LiftbridgeServer,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    format: str,
) -> None:
    await api.create_stream(name, concurrency_control=True)
    await api.create_stream(f"{name}-other")
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    await save(store, 1, 1)
    await publisher.publish(f"{name}-other", b"x")
    await until_removed(server, f"{name}-other", 0)
    await anyio.sleep(_AGE)
    assert stand(await store_of(publisher, api, name, format).load(KEY)) == {0: ("c1", "open")}


async def test_an_idle_relay_keeps_its_positions_younger_than_the_retention(
    server: LiftbridgeServer, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await create_aged(server, name)
    store = StreamCursorStore(publisher, api, name, snapshot_seconds=_AGE / 4)
    await store.load(KEY)
    await save(store, 1, 1)
    saved = (await api.partition_metadata(name)).newest_offset

    async def keep_on() -> None:
        while True:
            await store.keep(idle_seconds=0)
            await anyio.sleep(0.1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_on)
        await until_removed(server, name, saved)
        tasks.cancel_scope.cancel()
    assert stand(await store_of(publisher, api, name, "batch").load(KEY)) == {0: ("c1", "open")}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_ledger_that_retention_emptied_says_so_at_once_and_can_be_seeded(
    server: LiftbridgeServer,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    format: str,
) -> None:
    await create_aged(server, name)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    await save(store, 1, 1)
    await until_removed(server, name, (await api.partition_metadata(name)).newest_offset)
    for _ in range(3):  # also after the message without content that the first one writes
        with anyio.fail_after(30), pytest.raises(StreamGapError, match=r"7 days.*cursors import"):
            await store_of(publisher, api, name, format).load(KEY)
    positions = await store.replace(KEY, {0: Position("c1"), 1: Position("d", "drained")})
    assert stand(positions) == {0: ("c1", "open"), 1: ("d", "drained")}
    assert await store.load(KEY) == positions
    batch = OutgoingBatch(0, "c2", [b'{"n":2}'])
    await store.save(KEY, {0: positions[0].advance("c2")}, transaction=batch)


async def test_a_new_stream_begins_with_the_positions_that_it_is_seeded_with(
    api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    given = {0: Position("c1"), 1: Position("d", "superseded")}
    positions = await store_of(publisher, api, name, "batch").replace(KEY, given)
    assert stand(positions) == stand(given)
    store = store_of(publisher, api, name, "batch")
    assert await store.feeds() == [KEY]
    assert await store.load(KEY) == positions


async def test_what_is_left_of_a_ledger_without_its_snapshot_is_no_fresh_start(
    server: LiftbridgeServer, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await create_aged(server, name)
    store = StreamCursorStore(publisher, api, name, format="events")
    await store.load(KEY)
    await save(store, 1, 1)
    with_snapshot = (await api.partition_metadata(name)).newest_offset

    async def save_on() -> None:
        for revision in itertools.count(2):
            await save(store, revision, revision)
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save_on)
        await until_removed(server, name, with_snapshot)
        tasks.cancel_scope.cancel()
    with pytest.raises(StreamGapError, match=r"were removed"):
        await store_of(publisher, api, name, "events").load(KEY)
