"""Subscriptions by time, cursors, and what the cluster says of itself, on both brokers."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgePublisher,
    Stream,
    StreamError,
)
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import Cluster, require_liftbridge
from tests.liftbridge.contract.reading import read

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_subscription_starts_and_ends_at_a_time(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    times = [m.timestamp async for m in api.subscribe(name, until="latest")]
    await anyio.sleep(0.002)  # the resolution of a datetime is a microsecond
    middle = datetime.now(UTC)
    await publisher.publish_many(name, [b"y"] * 3)
    assert middle.timestamp() * 1e9 > times[-1]
    assert await read(api.subscribe(name, middle), 3) == [3, 4, 5]
    assert [m.offset async for m in api.subscribe(name, until=middle)] == [0, 1, 2]
    assert await read(api.subscribe(name, timedelta(hours=1)), 6) == list(range(6))
    assert [m.offset async for m in api.subscribe(name, until="latest")] == list(range(6))
    assert [m.offset async for m in api.subscribe(name, from_replica=True, until=2)] == [0, 1, 2]


async def test_an_empty_stream_has_no_latest_message(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    await api.create_stream(name)
    assert [m async for m in api.subscribe(name, until="latest")] == []


async def test_a_broker_without_cursors_says_which_setting_it_needs(
    nats_server: NatsServer, anyio_backend: str
) -> None:
    async with LiftbridgeBroker(nats_server.url, grpc=True, keeps_cursors=False) as broker:
        await assert_no_cursors(broker.address)
    require_liftbridge()
    with LiftbridgeServer(nats_server.url) as server:
        await assert_no_cursors(server.address)


async def assert_no_cursors(address: str) -> None:
    async with LiftbridgeApi(address) as api:
        for call in (api.set_cursor("s", "c", 1), api.fetch_cursor("s", "c")):
            with pytest.raises(LiftbridgeError, match=r"cursors\.stream\.partitions") as caught:
                await call
            assert not isinstance(caught.value, BrokerUnavailableError)


async def test_a_cursor_outlives_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    assert await api.fetch_cursor(name, "c", partition=1) is None
    for partition in range(4):
        await api.set_cursor(name, "c", 10 + partition, partition=partition)
    await cluster.crash()
    for partition in range(4):
        assert await api.fetch_cursor(name, "c", partition=partition) == 10 + partition


async def test_the_cluster_lists_brokers_and_streams(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    await api.create_stream(Stream(name, partitions=2))
    found = await api.cluster(groups=["unknown"])
    assert [broker.address for broker in found.brokers.values()] == [cluster.address]
    assert found.streams[name].stream == Stream(name, partitions=2)
    assert found.groups == {}


async def test_a_deleted_stream_ends_its_subscription(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish(name, b"x")
    async with LiftbridgeApi(cluster.address) as other, aclosing(other.subscribe(name)) as messages:
        assert (await anext(messages)).offset == 0
        await api.delete_stream(name)
        with pytest.raises(StreamError, match=name):
            await anext(messages)
