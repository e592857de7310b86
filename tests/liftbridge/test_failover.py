"""Three real brokers: a leader dies while a relay runs, a coordinator while a group reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

from feedapi_client import FeedConsumer, Limits
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    RelayReader,
    Stream,
    StreamCursorStore,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.broker import (
    FAILOVER_SECONDS,
    GROUP_SETTINGS,
    in_sync_leader,
    require_liftbridge,
)
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

EVENTS = 200


@pytest.fixture(scope="module")
def three(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, nodes=3, settings=GROUP_SETTINGS) as server:
        yield server


@pytest.mark.parametrize("format", ["events"])
async def test_a_relay_and_its_reader_outlast_the_death_of_the_leader(
    three: LiftbridgeServer, feedapi_publisher: Publisher, format: str
) -> None:
    stream, found = f"failover-{format}", list[int]()
    feedapi_publisher.extend(0, [{"n": n} for n in range(EVENTS)])
    async with (
        LiftbridgePublisher(three.nats_url, ack_timeout=2, ack_policy=AckPolicy.ALL) as publisher,
        LiftbridgeApi(three.addresses) as api,
    ):
        await api.create_stream(stream, concurrency_control=True, replication_factor=3)
        store = StreamCursorStore(publisher, api, stream, format=format)

        async def follow() -> None:
            async for batch in RelayReader(api, stream):
                found.extend(event.json()["n"] for event in batch.events)

        async with (
            FeedConsumer(
                feedapi_publisher.url or "", store=store, limits=Limits(max_batch_bytes=2000)
            ) as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(Relay(consumer, publisher).run)
            tasks.start_soon(follow)
            with anyio.fail_after(SAFETY_NET * 2):
                while len(found) < EVENTS:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                leader = await in_sync_leader(three, api, stream)
                await anyio.to_thread.run_sync(three.kill, leader)
                feedapi_publisher.extend(0, [{"n": n} for n in range(EVENTS, 2 * EVENTS)])
                while len(found) < 2 * EVENTS:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(three.start)
    assert found == list(range(2 * EVENTS))


async def coordinator(api: LiftbridgeApi) -> str:
    return (await api.cluster(groups=["group"])).groups["group"].coordinator


async def test_a_group_outlasts_the_death_of_its_coordinator(three: LiftbridgeServer) -> None:
    stream, found = Stream("failover-group", partitions=2), set[tuple[int, int]]()
    async with (
        LiftbridgePublisher(three.nats_url, ack_timeout=2, ack_policy=AckPolicy.ALL) as publisher,
        LiftbridgeApi(three.addresses) as api,
    ):

        async def read() -> None:
            async with api.group_consumer("group", [stream.name]) as consumer:
                async for message in consumer:
                    found.add((message.partition, message.offset))

        async def write(up_to: int) -> None:
            for partition in range(2):
                while (await api.partition_metadata(stream.name, partition)).newest_offset < up_to:
                    with suppress(AckTimeoutError):
                        await publisher.publish(stream, b"x", partition=partition)
            with anyio.fail_after(FAILOVER_SECONDS):
                while not {(0, up_to), (1, up_to)} <= found:  # noqa: ASYNC110
                    await anyio.sleep(0.05)

        await api.create_stream(stream, replication_factor=3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)
            await write(4)
            for name in (stream.name, "__cursors"):
                await in_sync_leader(three, api, name)
            before = await coordinator(api)
            await anyio.to_thread.run_sync(three.kill, three.node_of(before))
            with anyio.fail_after(FAILOVER_SECONDS):
                while await coordinator(api) == before:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            await write(9)
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(three.start)
    assert found >= {(partition, offset) for partition in range(2) for offset in range(10)}
