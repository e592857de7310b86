"""`PostgresCursorStore` on a real server: what only its drivers do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import psycopg
import psycopg_pool
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores import (
    Journal,
    PostgresCursorStore,
)
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.testing.contracts import (
    advanced,
    opening,
)
from tests.leases import claims
from tests.positions import counted
from tests.postgres_pools import execute, opened
from tests.servers import Postgres
from tests.stores.drivers import TABLES

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FEED = FeedKey("https://service.test/feed")
DROP = f"DROP TABLE IF EXISTS {', '.join(TABLES)}, effects"


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def dsn(postgres: Postgres) -> AsyncIterator[str]:
    """A database with tables, which are empty, and one of effects."""
    execute(postgres.dsn, DROP, "CREATE TABLE effects (n integer)")
    async with PostgresCursorStore(postgres.dsn) as store:
        await store.create_tables()
    yield postgres.dsn
    execute(postgres.dsn, DROP)


# The application's transaction


async def effects(dsn: str) -> int:
    return int(execute(dsn, "SELECT COUNT(*) FROM effects")[0][0])


async def test_r17_a_transaction_of_another_database_is_refused(dsn: str) -> None:
    """It has the same tables, such as those of another environment."""
    other = dsn.replace("@/postgres?", "@/elsewhere?")
    execute(dsn, "DROP DATABASE IF EXISTS elsewhere", "CREATE DATABASE elsewhere")
    async with PostgresCursorStore(dsn) as store, PostgresCursorStore(other) as elsewhere:
        await elsewhere.create_tables()
        await store.save(FEED, opening())  # as a consumer does it at its start
        async with await psycopg.AsyncConnection.connect(other) as begun:
            with pytest.raises(FencedError, match="nothing is stored"):
                await store.save(FEED, advanced(opening()), transaction=begun)
        assert await elsewhere.load(FEED) == {}
        assert await store.load(FEED) == opening()
    execute(dsn, "DROP DATABASE elsewhere")


@pytest.mark.parametrize("autocommit", [False, True])
async def test_r05_a_pipeline_of_psycopg_is_a_transaction(dsn: str, autocommit: bool) -> None:
    async with PostgresCursorStore(dsn) as store:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit) as connection:
            for positions in (opening(), advanced(opening())):
                async with connection.pipeline(), connection.transaction():
                    await connection.execute("INSERT INTO effects VALUES (1)")
                    await store.save(FEED, positions, transaction=connection)
        later = advanced(advanced(opening()))
        connected = psycopg.connect(dsn, autocommit=autocommit)
        with connected as blocking, blocking.pipeline(), blocking.transaction():
            blocking.execute("INSERT INTO effects VALUES (1)")
            await store.save(FEED, later, transaction=blocking)
        assert (await effects(dsn), await store.load(FEED)) == (3, later)


@pytest.mark.parametrize(
    "refused",
    [{0: counted("x", 9)}, {1: Position("new"), 0: counted("x", 9)}],
    ids=["one", "several"],
)
async def test_r17_a_save_that_is_refused_in_a_pipeline_leaves_a_transaction_that_can_commit(
    dsn: str, refused: dict[int, Position]
) -> None:
    async with PostgresCursorStore(dsn) as store:
        await store.save(FEED, opening())
        connected = await psycopg.AsyncConnection.connect(dsn)
        async with connected as connection, connection.pipeline():
            await connection.execute("INSERT INTO effects VALUES (1)")
            with pytest.raises(FencedError):
                await store.save(FEED, refused, transaction=connection)
        assert (await effects(dsn), await store.load(FEED)) == (1, opening())


async def test_a_pipeline_without_a_transaction_is_refused(dsn: str) -> None:
    async with PostgresCursorStore(dsn) as store:
        connected = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        async with connected as connection, connection.pipeline():
            await connection.execute("SELECT 1")  # its result is not there yet
            with pytest.raises(StoreError, match="autocommit mode"):
                await store.save(FEED, opening(), transaction=connection)
        with psycopg.connect(dsn, autocommit=True) as blocking, blocking.pipeline():
            blocking.execute("SELECT 1")
            with pytest.raises(StoreError, match="autocommit mode"):
                await store.save(FEED, opening(), transaction=blocking)
        assert await store.load(FEED) == {}


# ---------------------------------------------------------------- the same tables as SQLAlchemy's


async def test_tables_have_names_and_a_schema_of_the_callers(dsn: str) -> None:
    execute(dsn, 'DROP SCHEMA IF EXISTS "My Schema" CASCADE', 'CREATE SCHEMA "My Schema"')
    async with PostgresCursorStore(
        dsn, table='my "cursors"', schema="My Schema", journal=Journal()
    ) as store:
        await store.create_tables()
        await store.save(FEED, opening())
        await store.save(FEED, advanced(opening()))
        await store.beat(FEED, "a", 1000)
        await store.leave(FEED, "a")
        assert await store.load(FEED) == advanced(opening())
    execute(dsn, 'DROP SCHEMA "My Schema" CASCADE')


# ---------------------------------------------------------------- statements and bad input


@pytest.mark.parametrize("pool", ["psycopg", "psycopg in threads", "asyncpg"])
async def test_leases_set_nothing_for_the_session(dsn: str, pool: str) -> None:
    """Behind PgBouncer in transaction mode other clients would get the setting."""
    async with opened(pool, dsn) as opens:
        store = PostgresCursorStore(opens)
        for _ in range(2):
            await store.beat(FEED, "a", 4.0)  # a statement waits 0.2 s for a row
            await store.put(FEED, "a", claims("a", {0: 0}))
        shown = "SELECT current_setting('lock_timeout')"
        for kept in (store._beating, store._leasing):
            rows = await store.database.run(kept._connection, rows_of(shown))
            assert [tuple(row) for row in rows] == [("0",)]
        await store.leave(FEED, "a")
        given_back = await store.database.transact(rows_of(shown))
        assert [tuple(row) for row in given_back] == [("0",)]
        if pool == "psycopg":
            async with opens.connection() as connection:
                assert not connection.autocommit


def rows_of(sql: str) -> Script[list[Any]]:
    return (yield Query(sql))


@pytest.mark.parametrize("state", ["not open", "closed"])
async def test_a_pool_that_is_not_open_is_a_store_error_that_says_so(dsn: str, state: str) -> None:
    pools = [
        psycopg_pool.AsyncConnectionPool(dsn, open=False),
        psycopg_pool.ConnectionPool(dsn, open=False),
        asyncpg.create_pool(dsn),
    ]
    if state == "closed":
        await pools[0].open()
        pools[1].open()
        await pools[2]
        await pools[0].close()
        pools[1].close()
        await pools[2].close()
    for pool in pools:
        with pytest.raises(StoreError, match="the pool of connections is not open"):
            await PostgresCursorStore(pool).load(FEED)


async def test_a_lost_prepared_statement_says_what_to_switch_off(dsn: str) -> None:
    """As a pooler in transaction mode loses it, by giving the next transaction another session."""
    async with PostgresCursorStore(dsn) as store:
        await store.save(FEED, opening())
        connection = await asyncpg.connect(dsn)
        later = advanced(opening())
        async with connection.transaction():
            await store.save(FEED, later, transaction=connection)
        await connection.execute("DEALLOCATE ALL")
        with pytest.raises(StoreError, match="statement_cache_size=0"):
            async with connection.transaction():
                await store.save(FEED, advanced(later), transaction=connection)
        await connection.close()


async def test_a_pool_of_the_stores_own_prepares_no_statement(dsn: str) -> None:
    async with PostgresCursorStore(dsn) as store:
        positions = opening()
        for _ in range(8):  # psycopg would prepare a statement at its sixth use
            await store.save(FEED, positions)
            positions = advanced(positions)
        prepared = rows_of("SELECT name FROM pg_prepared_statements")
        assert await store.database.transact(prepared) == []


async def test_a_session_that_ends_is_replaced(dsn: str) -> None:
    async with psycopg_pool.AsyncConnectionPool(dsn, min_size=3, max_size=5) as pool:
        store = PostgresCursorStore(pool)
        await store.beat(FEED, "a", 1000)
        execute(
            dsn,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'",
        )
        with pytest.raises(StoreError):
            await store.put(FEED, "a", claims("a", {0: 0}))
        with anyio.fail_after(60):
            claimed: set[int] = set()
            while not claimed:
                try:
                    claimed = await store.put(FEED, "a", claims("a", {0: 0}))
                except StoreError:
                    await anyio.sleep(0.05)
        await store.leave(FEED, "a")


async def test_a_record_class_of_the_caller_is_not_ours(dsn: str) -> None:
    class Named(asyncpg.Record):  # type: ignore[misc]
        def __getitem__(self, name: Any) -> Any:
            assert isinstance(name, str), "columns of this application have names"
            return super().__getitem__(name)

    async with asyncpg.create_pool(dsn, min_size=1, record_class=Named) as pool:
        store = PostgresCursorStore(pool)
        await store.save(FEED, {0: Position("a")})
        async with pool.acquire() as connection, connection.transaction():
            await store.save(FEED, {0: counted("b", 2)}, transaction=connection)
        assert await store.load(FEED) == {0: counted("b", 2)}
