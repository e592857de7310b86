"""Ledgers whose broker removes old messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import anyio
import grpc
import pytest
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge import (
    OutgoingBatch,
    StreamGapError,
    StreamOptions,
)
from feedapi_client.model import Position
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.broker import CLEANS_OFTEN, Broker, require_liftbridge
from tests.liftbridge.helpers import eventually
from tests.liftbridge.ledgers import FORMATS, KEY, loaded, open_ledger, save, store_of
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
def real_server(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=_SETTINGS) as server:
        yield server


async def create_aged(broker: Broker) -> None:
    """Create a ledger as somebody else may do, whose messages the broker removes by their age."""
    name = broker.name
    request = api_pb2.CreateStreamRequest(name=name, subject=name, partitions=1)
    request.replicationFactor = 1
    request.optimisticConcurrencyControl.value = True
    _AGED.write_to(request)
    async with grpc.aio.insecure_channel(broker.address) as channel:
        await APIStub(channel).CreateStream(request)


async def until_removed(broker: Broker, offset: int, name: str = "") -> None:
    """Wait until the broker has deleted the segments with the messages up to an offset."""
    folder = broker.server.data() / "streams" / (name or broker.name) / "0"
    await eventually(lambda: min(int(log.stem) for log in folder.glob("*.log")) > offset)


@pytest.mark.parametrize("format", FORMATS)
async def test_the_default_age_of_a_broker_removes_nothing_from_a_ledger(
    broker: Broker, format: str
) -> None:
    store, other = await open_ledger(broker, format), f"{broker.name}-other"
    await broker.create(other)
    await save(store, 1, 1)
    await broker.publisher.publish(other, b"x")
    await until_removed(broker, 0, other)
    await anyio.sleep(_AGE)
    assert stand(await store_of(broker, format).load(KEY)) == {0: ("c1", "open")}


async def test_an_idle_relay_keeps_its_positions_younger_than_the_retention(broker: Broker) -> None:
    await create_aged(broker)
    store = await loaded(broker, snapshot_seconds=_AGE / 4)
    await save(store, 1, 1)
    saved = await broker.newest()

    async def keep_on() -> None:
        while True:
            await store.keep(idle_seconds=0)
            await anyio.sleep(0.1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_on)
        await until_removed(broker, saved)
        tasks.cancel_scope.cancel()
    assert stand(await store_of(broker).load(KEY)) == {0: ("c1", "open")}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_ledger_that_retention_emptied_says_so_at_once_and_can_be_seeded(
    broker: Broker, format: str
) -> None:
    await create_aged(broker)
    store = await loaded(broker, format)
    await save(store, 1, 1)
    await until_removed(broker, await broker.newest())
    for _ in range(3):  # also after the message without content that the first one writes
        with anyio.fail_after(30), pytest.raises(StreamGapError, match=r"7 days.*cursors import"):
            await store_of(broker, format).load(KEY)
    positions = await store.replace(KEY, {0: Position("c1"), 1: Position("d", "drained")})
    assert stand(positions) == {0: ("c1", "open"), 1: ("d", "drained")}
    assert await store.load(KEY) == positions
    batch = OutgoingBatch(0, "c2", [b'{"n":2}'])
    await store.save(KEY, {0: positions[0].advance("c2")}, transaction=batch)


async def test_a_new_stream_begins_with_the_positions_that_it_is_seeded_with(
    broker: Broker,
) -> None:
    await broker.create(once=True)
    given = {0: Position("c1"), 1: Position("d", "superseded")}
    positions = await store_of(broker).replace(KEY, given)
    assert stand(positions) == stand(given)
    store = store_of(broker)
    assert await store.feeds() == [KEY]
    assert await store.load(KEY) == positions


async def test_what_is_left_of_a_ledger_without_its_snapshot_is_no_fresh_start(
    broker: Broker,
) -> None:
    await create_aged(broker)
    store = await loaded(broker, "events")
    await save(store, 1, 1)
    with_snapshot = await broker.newest()

    async def save_on() -> None:
        for revision in itertools.count(2):
            await save(store, revision, revision)
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save_on)
        await until_removed(broker, with_snapshot)
        tasks.cancel_scope.cancel()
    with pytest.raises(StreamGapError, match=r"were removed"):
        await store_of(broker, "events").load(KEY)
