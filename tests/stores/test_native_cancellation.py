"""A task of asyncio that is cancelled anywhere in a commit: cursor and effects stand together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg_pool
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import CursorStore, FeedConsumer, Limits, PostgresCursorStore
from feedapi_client.stores import SQLAlchemyCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import fill
from tests.postgres_pools import execute
from tests.servers import Postgres

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
EVENTS = 400
CANCELLATIONS = 30
TABLES = ("feedapi_cursors", "effects")

Begin = Callable[[], AbstractAsyncContextManager[Any]]
Insert = Callable[[Any, int], Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def application(
    driver: str, postgres: Postgres
) -> AsyncIterator[tuple[CursorStore, Begin, Insert]]:
    """Give a store, what begins a transaction, and what writes an effect in it."""
    store: SQLAlchemyCursorStore | PostgresCursorStore
    if driver == "psycopg":
        async with psycopg_pool.AsyncConnectionPool(postgres.dsn, max_size=8) as pool:
            store = PostgresCursorStore(pool)
            statement = "INSERT INTO effects VALUES (%s)"
            yield store, pool.connection, lambda each, n: each.execute(statement, [n])
    elif driver == "asyncpg":
        async with asyncpg.create_pool(postgres.dsn, min_size=1, max_size=8) as pool:
            store = PostgresCursorStore(pool)

            @asynccontextmanager
            async def begin() -> AsyncIterator[Any]:
                async with pool.acquire() as connection, connection.transaction():
                    yield connection

            yield store, begin, lambda each, n: each.execute("INSERT INTO effects VALUES ($1)", n)
    else:
        engine = create_async_engine(postgres.url(driver.removeprefix("sqlalchemy+")))
        store = SQLAlchemyCursorStore(engine)
        insert = sa.text("INSERT INTO effects VALUES (:n)")
        try:
            yield store, engine.begin, lambda each, n: each.execute(insert, {"n": n})
        finally:
            await engine.dispose()


@pytest.mark.parametrize(
    "driver", ["psycopg", "asyncpg", "sqlalchemy+psycopg", "sqlalchemy+asyncpg"]
)
async def test_r5_a_natively_cancelled_commit_happens_with_its_effects_or_not_at_all(
    postgres: Postgres, driver: str
) -> None:
    execute(postgres.dsn, *(f"DROP TABLE IF EXISTS {table}" for table in TABLES))
    execute(postgres.dsn, "CREATE TABLE effects (n integer)")
    async with PostgresCursorStore(postgres.dsn) as creates:
        await creates.create_tables()
    publisher = Publisher(4, checkpoint_every=5, page_size=20, seed=1)
    fill(publisher, EVENTS, entities=12)
    random, cancelled = Random(driver), 0

    async def consume(url: str, steps: int | None) -> None:
        """Consume to the end; or be cancelled so many steps of the event loop into a commit."""
        me = asyncio.current_task()
        assert me is not None
        later: list[asyncio.Task[None]] = []

        async def cancel() -> None:
            for _ in range(steps or 0):
                await asyncio.sleep(0)
            me.cancel()

        async with (
            application(driver, postgres) as (store, begin, insert),
            FeedConsumer(
                url, store=store, follow=False, limits=Limits(max_batch_events=5)
            ) as consumer,
        ):
            # In this task itself: handlers of `run` are cancelled by a scope of anyio.
            async for batch in consumer.batches():
                async with begin() as transaction:
                    for event in batch:
                        await insert(transaction, event.json()["n"])
                    if steps is not None and not later:
                        later.append(asyncio.create_task(cancel()))
                    await batch.commit(transaction=transaction)

    with publisher.serve() as url:
        for _ in range(CANCELLATIONS):
            # An await of the server's answer is many steps: most cancellations strike there.
            task = asyncio.create_task(consume(url, int(random.lognormvariate(2, 1.5))))
            await asyncio.wait([task])
            cancelled += task.cancelled()
            if not task.cancelled():
                assert task.exception() is None
        await consume(url, None)
    found = [n for (n,) in execute(postgres.dsn, "SELECT n FROM effects")]
    assert sorted(found) == list(range(EVENTS))
    assert cancelled > CANCELLATIONS // 4
    execute(postgres.dsn, *(f"DROP TABLE IF EXISTS {table}" for table in TABLES))
