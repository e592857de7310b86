"""The quarantine beside `PostgresCursorStore`, in the transaction of each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anyio import to_thread
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import Batch, MemoryCursorStore, PostgresCursorStore, StoreError
from feedapi_client.quarantine import PostgresQuarantineStore, quarantine_beside
from feedapi_client.quarantine.sql_quarantine import SQLAlchemyQuarantineStore
from feedapi_client.testing import Publisher
from tests.postgres_pools import execute, opened
from tests.quarantine.helpers import PoisonError, kept, numbers, run
from tests.quarantine.test_stores import record
from tests.servers import Postgres

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
INSERT = "INSERT INTO effects (n) SELECT * FROM unnest($1::integer[])"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["psycopg", "psycopg in threads", "asyncpg"])
async def cursors(
    request: pytest.FixtureRequest, postgres: Postgres
) -> AsyncIterator[PostgresCursorStore]:
    execute(
        postgres.dsn,
        "DROP TABLE IF EXISTS feedapi_cursors, feedapi_quarantine, effects",
        "CREATE TABLE effects (at serial PRIMARY KEY, n integer CHECK (n NOT IN (7, 12)))",
    )
    async with opened(request.param, postgres.dsn) as pool, PostgresCursorStore(pool) as cursors:
        await cursors.create_tables()
        await PostgresQuarantineStore(pool).create_tables()
        yield cursors


def rows(postgres: Postgres) -> list[int]:
    return [n for (n,) in execute(postgres.dsn, "SELECT n FROM effects ORDER BY at")]


def handler(pool: Any) -> Any:
    """Return a handler in the way of the pool's driver."""
    kind = type(pool).__name__

    async def with_asyncpg(batch: Batch) -> None:
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(INSERT, numbers(batch))
            await batch.commit(transaction=connection)

    async def with_psycopg(batch: Batch) -> None:
        async with pool.connection() as connection:
            await connection.execute(INSERT.replace("$1", "%s"), (numbers(batch),))
            await batch.commit(transaction=connection)

    async def with_psycopg_in_threads(batch: Batch) -> None:
        connection = await to_thread.run_sync(pool.getconn)
        try:
            sql = INSERT.replace("$1", "%s")
            await to_thread.run_sync(connection.execute, sql, (numbers(batch),))
            await batch.commit(transaction=connection)
            await to_thread.run_sync(connection.commit)
        finally:
            pool.putconn(connection)  # rolls back what is open

    handlers = {
        "Pool": with_asyncpg,
        "AsyncConnectionPool": with_psycopg,
        "ConnectionPool": with_psycopg_in_threads,
    }
    return handlers[kind]


@pytest.mark.filterwarnings("ignore:.*rolling back returned connection")
async def test_events_that_the_database_refuses_are_quarantined_and_the_rest_is_there_once(
    publisher: Publisher, cursors: PostgresCursorStore, postgres: Postgres
) -> None:
    await run(publisher, cursors, handler(cursors.pool), "quarantine")
    assert rows(postgres) == [n for n in range(20) if n not in (7, 12)]
    assert [(event.index) for event in await kept(quarantine_beside(cursors))] == [7, 12]


async def test_a_handler_that_leaves_the_commit_to_run_quarantines_with_the_cursor(
    publisher: Publisher, cursors: PostgresCursorStore
) -> None:
    async def handle(batch: Batch) -> None:
        if set(numbers(batch)) & {7, 12}:
            raise PoisonError

    await run(publisher, cursors, handle, "quarantine")
    assert [event.index for event in await kept(quarantine_beside(cursors))] == [7, 12]
    (feed,) = await cursors.feeds()
    assert (await cursors.load(feed))[0].cursor == publisher.end_cursor(0)


async def test_a_missing_table_is_found_before_anything_is_read(
    publisher: Publisher, cursors: PostgresCursorStore, postgres: Postgres
) -> None:
    execute(postgres.dsn, "DROP TABLE feedapi_quarantine")

    async def handle(batch: Batch) -> None:
        raise AssertionError

    with pytest.raises(StoreError, match=r"create_tables\(\)"):
        await run(publisher, cursors, handle, "quarantine")


async def test_r19_the_error_of_a_failed_insert_holds_no_payload(
    cursors: PostgresCursorStore,
) -> None:
    store, put = quarantine_beside(cursors), record()
    await store.add([put])
    with pytest.raises(StoreError) as caught:
        await store.add([put])
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "text" not in str(caught.value)


async def test_what_one_store_quarantines_sqlalchemys_shows(
    cursors: PostgresCursorStore, postgres: Postgres
) -> None:
    engine = create_async_engine(postgres.url())
    ours, theirs = quarantine_beside(cursors), SQLAlchemyQuarantineStore(engine)
    put = [record(index=0), record(index=1)]
    await ours.add(put[:1])
    await theirs.add(put[1:])
    assert await kept(ours) == await kept(theirs) == put
    assert await theirs.remove([put[0].id]) == await ours.remove([put[1].id]) == 1
    await engine.dispose()


async def test_a_transaction_is_of_this_store_only(cursors: PostgresCursorStore) -> None:
    store = quarantine_beside(cursors)
    assert store.joins(cursors)
    assert not store.joins(MemoryCursorStore())
    with pytest.raises(StoreError, match="not a object"):
        await store.add([record()], transaction=object())
