"""A process is paused within a transaction: its row locks stop nobody else for long.

What else passes by them is in `tests.stores.test_drivers`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
import sqlalchemy as sa

from feedapi_client import Batch, FeedConsumer, FeedKey, Limits, Position, Share
from feedapi_client.testing import Publisher
from tests.leases import claims
from tests.sharing.fleet import until
from tests.stores.conftest import app, store
from tests.stores.drivers import CONNECTED, App, with_drivers

__all__ = ["app", "store"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]
FEED = FeedKey("https://service.test/locked", "shared")


@with_drivers(CONNECTED)
async def test_a_renewal_does_not_wait_for_a_claim(app: App, store: Any) -> None:
    lease = 10.0  # the claim waits for a third of it, the database by itself 50 s or for ever
    await store.beat(FEED, "a", lease)
    claimed: set[int] = set()

    async def claim() -> None:
        claimed.update(await store.put(FEED, "a", claims("a", dict.fromkeys(range(64), 0))))

    row = "(feed_id, partition_id, owner, epoch, ended, changed_at)"
    insert = f"INSERT INTO feedapi_cursors_leases {row} VALUES ('{FEED.id}', 3, 'x', 1, 0, 0)"
    with app.admin.begin() as paused:
        paused.execute(sa.text(insert))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim)
            await anyio.sleep(0.1)
            assert await store.beat(FEED, "a", lease)
            assert not claimed
            with anyio.fail_after(2 * lease):
                await until(lambda: claimed)
        paused.rollback()
    assert claimed == set(range(64)) - {3}


@pytest.mark.parametrize("transaction", [False, True], ids=["alone", "in a transaction"])
@with_drivers(CONNECTED)
async def test_one_locked_position_ends_no_run_and_starves_no_other_partition(
    app: App,
    store: Any,
    feedapi_publisher_factory: Callable[..., Publisher],
    transaction: bool,
) -> None:
    publisher = feedapi_publisher_factory(3, page_size=10, checkpoint_every=5)
    for partition in range(3):
        publisher.extend(partition, [{"n": n, "in": partition} for n in range(20)])
    handled: list[tuple[int, int]] = []
    share = Share(lease_seconds=1.5, rebalance_seconds=0.1)
    limits = Limits(poll_interval=0.02, max_poll_interval=0.1)

    async def handle(batch: Batch) -> None:
        async with app.transaction() if transaction else nullcontext() as begun:
            await batch.commit(transaction=begun)
        handled.extend((event.json()["in"], event.json()["n"]) for event in batch.events)

    consumer = FeedConsumer(f"{publisher.url}", store=store, share=share, limits=limits)
    key = consumer.key
    await store.save(key, {p: Position("_first") for p in range(3)})
    row = f"feed_id = '{key.id}' AND partition_id = 1"
    async with consumer, anyio.create_task_group() as tasks:
        with app.admin.begin() as paused:
            paused.execute(sa.text(f"SELECT revision FROM feedapi_cursors WHERE {row} FOR UPDATE"))
            tasks.start_soon(consumer.run, handle)
            await until(lambda: len(handled) >= 40)
            await anyio.sleep(share.lease_seconds)
            assert {partition for partition, _ in handled} == {0, 2}
            paused.rollback()
        await until(lambda: len(handled) >= 60)
        consumer.stop()
    assert sorted(handled) == [(partition, n) for partition in range(3) for n in range(20)]
