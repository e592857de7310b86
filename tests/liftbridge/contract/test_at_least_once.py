"""A relay that is at least once, on both brokers."""

from __future__ import annotations

import anyio
import orjson
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    StreamError,
    StreamReadonlyError,
)
from feedapi_client.testing import Publisher
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.contract.reading import read
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def run_relay(
    feed: Publisher, publisher: LiftbridgePublisher, name: str, api: LiftbridgeApi
) -> None:
    async with FeedConsumer(feed.url or "", follow=False) as consumer:
        await Relay(consumer, publisher, name, api=api).run()


async def test_a_missing_stream_is_named_before_the_first_message(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    with pytest.raises(StreamError, match=f"stream {name}: there is no such stream"):
        await run_relay(feed, publisher, name, api)
    assert publisher.stats.published == 0


async def test_a_relay_wakes_a_paused_partition_and_is_refused_by_a_read_only_one(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    await api.create_stream(name)
    await api.pause_stream(name)
    await run_relay(feed, publisher, name, api)
    assert await read(api.subscribe(name), 20) == list(range(20))
    await api.set_readonly(name)
    with pytest.raises(StreamReadonlyError):
        await run_relay(feed, publisher, name, api)


async def test_a_running_relay_wakes_a_partition_that_is_paused(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    await api.create_stream(name)
    async with FeedConsumer(feed.url or "") as consumer:
        running = Relay(consumer, publisher, name, api=api)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            with anyio.fail_after(SAFETY_NET):
                while running.progress.events < 20:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await api.pause_stream(name)
                feed.extend(0, [{"n": n} for n in range(20, 40)])
                while running.progress.events < 40:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            consumer.stop()
    assert running.progress.retries >= 1
    assert {orjson.loads(m.value)["n"] async for m in api.subscribe(name, until="latest")} == set(
        range(40)
    )
