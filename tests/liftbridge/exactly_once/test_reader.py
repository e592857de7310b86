"""Reading what a relay wrote exactly once."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    RelayedBatch,
    RelayReader,
)
from feedapi_client.testing.liftbridge import LiftbridgeBroker
from tests.liftbridge.exactly_once.streams import (
    KEY,
    Make,
    batches,
    outgoing,
    own_headers,
)
from tests.positions import counted

pytestmark = pytest.mark.anyio


async def test_a_reader_resumes_after_any_batch(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make(format="events")
    await store.load(KEY)
    for revision in range(1, 6):
        await store.save(
            KEY,
            {0: counted(f"c{revision}", revision)},
            transaction=outgoing(revision, 10 * revision, cursor=f"c{revision}"),
        )
    every = await batches(api, broker)
    assert [batch.cursor for batch in every] == ["c1", "c2", "c3", "c4", "c5"]
    for i, batch in enumerate(every[:-1]):
        rest = await batches(api, broker, batch.next_offset)
        assert [batch.cursor for batch in rest] == [batch.cursor for batch in every[i + 1 :]]


@pytest.mark.parametrize("format", ["batch", "events"])
@pytest.mark.parametrize("partition", [None, b"", b"x", b"-1", b"9" * 19, b"9" * 5000])
async def test_a_batch_of_no_partition_is_of_no_relay(
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    format: str,
    partition: bytes | None,
) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: counted("b", 1)}, transaction=outgoing(1))
    headers = {**own_headers(broker), "feedapi-attempt": b"x"}
    del headers["feedapi-partition"], headers["feedapi-positions"]
    if partition is not None:
        headers["feedapi-partition"] = partition
    await publisher.publish("s", b"{}", headers={**headers, "feedapi-format": format.encode()})
    assert [event.raw for each in await batches(api, broker) for event in each.events] == [
        b'{"n":1}'
    ]
    assert await make().load(KEY) == {0: counted("b", 1)}


async def test_a_reader_follows_and_returns_a_batch_when_its_last_message_is_there(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make(format="events")
    await store.load(KEY)
    seen: list[RelayedBatch] = []

    async def follow() -> None:
        async for batch in RelayReader(api, "s"):
            seen.append(batch)
            if len(seen) == 2:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        for revision in (1, 2):
            await store.save(
                KEY, {0: counted("c", revision)}, transaction=outgoing(revision, revision)
            )
    assert [len(batch.events) for batch in seen] == [2, 2]
