"""Reading what a relay wrote exactly once."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.liftbridge import RelayedBatch, RelayReader
from tests.liftbridge.broker import Broker
from tests.liftbridge.ledgers import batches, open_ledger, save

pytestmark = pytest.mark.anyio


async def test_a_reader_resumes_after_any_batch(broker: Broker) -> None:
    store = await open_ledger(broker, "events")
    for revision in range(1, 6):
        await save(store, revision, revision, 10 * revision)
    every = await batches(broker)
    assert [batch.cursor for batch in every] == ["c1", "c2", "c3", "c4", "c5"]
    for i, batch in enumerate(every[:-1]):
        rest = await batches(broker, batch.next_offset)
        assert [batch.cursor for batch in rest] == [batch.cursor for batch in every[i + 1 :]]


async def test_a_reader_follows_and_returns_a_batch_when_its_last_message_is_there(
    broker: Broker,
) -> None:
    store, seen = await open_ledger(broker, "events"), list[RelayedBatch]()

    async def follow() -> None:
        async for batch in RelayReader(broker.api, broker.name):
            seen.append(batch)
            if len(seen) == 2:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        for revision in (1, 2):
            await save(store, revision, revision, revision)
    assert [len(batch.events) for batch in seen] == [2, 2]
