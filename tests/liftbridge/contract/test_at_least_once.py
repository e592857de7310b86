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
    Stream,
    StreamError,
    StreamReadonlyError,
    reveal_newest,
)
from feedapi_client.testing import Publisher
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.contract.reading import look_often, read
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


async def test_a_stream_that_is_created_again_with_other_partitions_ends_the_relay(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch)
    await api.create_stream(Stream(name, partitions=2))
    async with FeedConsumer(feed.url or "") as consumer:
        running = Relay(consumer, publisher, Stream(name, partitions=2), api=api)

        async def replace() -> None:
            while running.progress.events < 20:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await api.delete_stream(name)
            await api.create_stream(Stream(name, partitions=4))
            while "it has 4 partitions" not in caplog.text:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            feed.extend(0, [{"n": 20}])

        with anyio.fail_after(SAFETY_NET):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replace)
                with pytest.raises(StreamError, match="it has 4 partitions"):
                    await running.run()
    assert running.progress.recovered == 0


async def stored(api: LiftbridgeApi, name: str) -> list[int]:
    """The numbers of the events in a stream, each where it was stored last."""
    newest = (await api.partition_metadata(name)).newest_offset
    found = [
        orjson.loads(message.value)["n"]
        async for message in api.subscribe(name, until=newest)
        if message.value
    ]
    return list(dict.fromkeys(reversed(found)))[::-1]


@pytest.mark.parametrize("more", [5, 0])
async def test_messages_that_the_broker_loses_after_its_ack_are_published_again(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
    more: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch)
    await api.create_stream(name)
    async with FeedConsumer(feed.url or "") as consumer:
        # Without the API the next messages show it, which get the same offsets.
        running = Relay(consumer, publisher, name, api=None if more else api)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            with anyio.fail_after(SAFETY_NET):
                while running.progress.events < 20:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await cluster.lose(name, 8)
                feed.extend(0, [{"n": n} for n in range(20, 20 + more)])
                while running.progress.recovered < 8:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                while running.progress.events < 20 + more:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            consumer.stop()
    await reveal_newest(publisher, api, name)
    assert await stored(api, name) == list(range(20 + more))
    assert "lost messages that it had acked, from offset 12 on" in caplog.text
