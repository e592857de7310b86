"""A crash of the broker, on both brokers."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.liftbridge import BrokerUnavailableError, LiftbridgeApi, LiftbridgePublisher
from feedapi_client.model import Position
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.contract.reading import FORMATS, KEY, read, relayed, save, store_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


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


async def test_what_was_stored_before_a_crash_is_hidden_until_something_is_published(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    await cluster.crash()
    found = await api.partition_metadata(name)
    assert (found.high_watermark, found.newest_offset) == (-1, 4)
    with pytest.raises(BrokerUnavailableError, match="no message"):
        await read(api.subscribe(name, idle_timeout=0.5), 1)
    await publisher.publish(name, b"y")
    assert await read(api.subscribe(name), 6) == list(range(6))


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
