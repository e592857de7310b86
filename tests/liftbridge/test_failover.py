"""Three real brokers: the leader of the stream dies while a relay runs."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.to_thread
import orjson
import pytest

from feedapi_client import FeedConsumer, Limits
from feedapi_client.liftbridge import (
    AckPolicy,
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    RelayReader,
    StreamCursorStore,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import FAILOVER_SETTINGS, in_sync_leader, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS = 200


@pytest.fixture(scope="module")
def three(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, nodes=3, settings=FAILOVER_SETTINGS) as server:
        yield server


@pytest.mark.parametrize("format", ["batch", "events"])
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
        store = StreamCursorStore(publisher, api, stream, format=format, attempts=100)

        async def follow() -> None:
            async for batch in RelayReader(api, stream):
                found.extend(orjson.loads(event)["n"] for event in batch.events)

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
