"""A process is paused within a transaction: its row locks stop nobody else for long."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedKey,
    FencedError,
    Limits,
    Position,
    Share,
    StoreError,
)
from feedapi_client.stores import Lease
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing import Publisher
from tests.leases import claims
from tests.positions import counted
from tests.sharing.helpers import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]
FEED = FeedKey("https://service.test/locked", "shared")
LEASE = 20.0
"""Nothing below waits longer than a part of it. The database's own limits are 50 s or none."""
PARTITIONS = 1_100
"""More than two statements' worth."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["psycopg", "asyncpg", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "mariadb":
        return str(request.getfixturevalue("mariadb").url())
    return str(request.getfixturevalue("postgres").url(request.param))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[SQLAlchemyCursorStore]:
    engine = create_async_engine(url)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    async with engine.begin() as connection:
        for table in (store.table, store.instance_table, store.lease_table):
            await connection.execute(sa.delete(table))
    yield store
    for feed, instance in list(store._joined):
        await store.leave(feed, instance)
    await engine.dispose()


@asynccontextmanager
async def paused(engine: AsyncEngine, *statements: sa.Executable) -> AsyncIterator[AsyncConnection]:
    """Another process that has begun a transaction and does not go on with it."""
    other = create_async_engine(engine.url)
    async with other.connect() as connection:
        for statement in statements:
            await connection.execute(statement)
        yield connection
        await connection.rollback()
    await other.dispose()


def row_of(table: sa.Table, partition: int) -> Any:
    return sa.and_(table.c.feed_id == FEED.id, table.c.partition_id == partition)


async def test_a_claim_does_not_wait_for_a_row_that_another_transaction_holds(url: str) -> None:
    async with opened(url) as store:
        await store.beat(FEED, "dead", LEASE)
        await store.put(FEED, "dead", claims("dead", dict.fromkeys(range(PARTITIONS), 0)))
        await store.leave(FEED, "dead")
        await store.beat(FEED, "a", LEASE)
        held = sa.update(store.lease_table).where(row_of(store.lease_table, 7)).values(epoch=9)
        async with paused(store.engine, held):
            began = time.monotonic()
            claimed = await store.put(FEED, "a", claims("a", dict.fromkeys(range(PARTITIONS), 1)))
            assert time.monotonic() - began < LEASE / 2
            assert claimed == set(range(PARTITIONS)) - {7}
        assert await store.put(FEED, "a", claims("a", {7: 1})) == {7}


async def test_a_renewal_does_not_wait_for_a_claim(url: str) -> None:
    lease = LEASE / 2  # the claim waits for a third of it
    async with opened(url) as store:
        await store.beat(FEED, "a", lease)
        row = {"feed_id": FEED.id, "owner": "x", "epoch": 1, "ended": 0, "changed_at": 0}
        insert = sa.insert(store.lease_table).values(partition_id=3, **row)
        async with paused(store.engine, insert), anyio.create_task_group() as tasks:
            claimed: set[int] = set()

            async def claim() -> None:
                wanted = claims("a", dict.fromkeys(range(64), 0))
                claimed.update(await store.put(FEED, "a", wanted))

            tasks.start_soon(claim)
            await anyio.sleep(0.1)
            assert await store.beat(FEED, "a", lease)
            assert not claimed
            with anyio.fail_after(LEASE):
                await until(lambda: claimed)
        assert claimed == set(range(64)) - {3}


async def test_nobody_waits_for_the_heartbeat_of_another_one(url: str) -> None:
    async with opened(url) as store:
        await store.beat(FEED, "old", LEASE)
        await store.beat(FEED, "a", LEASE)
        await store.put(FEED, "a", claims("a", {1: 0}))
        table = store.instance_table
        mine = sa.and_(table.c.feed_id == FEED.id, table.c.instance == "old")
        hold = sa.update(table).where(mine).values(expires_at=1)
        async with paused(store.engine, hold):
            with anyio.fail_after(LEASE / 2):
                await store.beat(FEED, "b", LEASE)
                assert await store.beat(FEED, "a", LEASE)
                await store.put(FEED, "b", claims("b", {2: 0}))
                await store.put(FEED, "a", [Lease(1, None, 1)])
                assert await store.put(FEED, "b", claims("b", {1: 1})) == {1}
                with pytest.raises(StoreError):
                    await store.beat(FEED, "old", LEASE)
                await store.leave(FEED, "b")


async def test_releasing_and_ending_pass_by_the_rows_of_others(url: str) -> None:
    async with opened(url) as store:
        for name in ("a", "b"):
            await store.beat(FEED, name, LEASE)
        await store.put(FEED, "a", claims("a", {1: 0, 2: 0}))
        await store.put(FEED, "b", claims("b", {3: 0}))
        table = store.lease_table
        held = sa.update(table).where(row_of(table, 3)).values(epoch=9)
        async with paused(store.engine, held):
            with anyio.fail_after(LEASE / 2):
                assert await store.put(FEED, "a", [Lease(1, "a", 1, ended=True)]) == {1}
                assert await store.put(FEED, "a", [Lease(2, None, 1)]) == {2}
                await store.leave(FEED, "a")
        leases = (await store.look(FEED)).leases
        assert {p: lease.owner for p, lease in leases.items()} == {1: None, 2: None, 3: "b"}


@pytest.mark.parametrize("transaction", [False, True], ids=["alone", "in a transaction"])
@pytest.mark.parametrize("revision", [1, 2])
async def test_a_save_waits_for_a_locked_position_a_part_of_a_lease(
    url: str, transaction: bool, revision: int
) -> None:
    async with opened(url) as store:
        store.limit_lock_waits(FEED, 0.5)
        others = SQLAlchemyCursorStore(create_async_engine(url))
        if revision > 1:
            await store.save(FEED, {0: Position("c1")})
        async with others.engine.connect() as connection:
            held = {0: counted("theirs", revision)}
            await others.save(FEED, held, transaction=connection)
            began = time.monotonic()
            with pytest.raises(FencedError, match="another transaction") as refused:
                await save(store, {0: counted("mine", revision)}, transaction)
            assert refused.value.partition == 0
            assert time.monotonic() - began < LEASE / 2
            await connection.rollback()
        # That transaction decides. It is over, and has changed nothing.
        await save(store, {0: counted("mine", revision)}, transaction)
        assert await store.load(FEED) == {0: counted("mine", revision)}
        await others.engine.dispose()


async def test_a_save_waits_for_a_transaction_that_ends_soon(url: str) -> None:
    async with opened(url) as store:
        store.limit_lock_waits(FEED, LEASE)
        await store.save(FEED, {0: Position("c1")})
        hold = sa.update(store.table).where(row_of(store.table, 0)).values(saved_at=1)
        async with paused(store.engine, hold) as other, anyio.create_task_group() as tasks:
            tasks.start_soon(save, store, {0: counted("c2", 2)}, True)
            await anyio.sleep(0.2)
            await other.rollback()
        assert await store.load(FEED) == {0: counted("c2", 2)}


async def save(store: SQLAlchemyCursorStore, positions: Any, transaction: bool) -> None:
    if not transaction:
        return await store.save(FEED, positions)
    async with store.engine.begin() as connection:
        await store.save(FEED, positions, transaction=connection)
    return None


@pytest.mark.parametrize("transaction", [False, True], ids=["alone", "in a transaction"])
async def test_one_locked_position_ends_no_run_and_starves_no_other_partition(
    url: str, feedapi_publisher_factory: Callable[..., Publisher], transaction: bool
) -> None:
    publisher = feedapi_publisher_factory(3, page_size=10, checkpoint_every=5)
    for partition in range(3):
        publisher.extend(partition, [{"n": n, "in": partition} for n in range(20)])
    handled: list[tuple[int, int]] = []
    share = Share(lease_seconds=1.5, rebalance_seconds=0.1)
    limits = Limits(poll_interval=0.02, max_poll_interval=0.1)
    async with opened(url) as store:

        async def handle(batch: Batch) -> None:
            async with store.engine.begin() as connection:
                if transaction:
                    await batch.commit(transaction=connection)
                else:
                    await batch.commit()
            handled.extend((event.json()["in"], event.json()["n"]) for event in batch.events)

        assert publisher.url is not None
        consumer = FeedConsumer(publisher.url, store=store, share=share, limits=limits)
        await store.save(consumer.key, {p: Position("_first") for p in range(3)})
        mine = sa.and_(store.table.c.feed_id == consumer.key.id, store.table.c.partition_id == 1)
        hold = sa.select(store.table.c.revision).where(mine).with_for_update()
        async with consumer, anyio.create_task_group() as tasks:
            async with paused(store.engine, hold):
                tasks.start_soon(consumer.run, handle)
                await until(lambda: len(handled) >= 40)
                await anyio.sleep(share.lease_seconds)
                assert {partition for partition, _ in handled} == {0, 2}
            await until(lambda: len(handled) >= 60)
            consumer.stop()
    assert sorted(handled) == [(partition, n) for partition in range(3) for n in range(20)]
