"""`SQLAlchemyCursorStore` on real servers: what only SQLAlchemy's engines do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    create_async_engine,
)
from sqlalchemy.orm import Session

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores import Journal
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.contracts import (
    advanced,
    opening,
)
from tests.positions import counted
from tests.servers import MariaDB, Postgres

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FEED = FeedKey("https://service.test/feed")
TABLES = tuple(
    f"feedapi_cursors{suffix}" for suffix in ("", "_journal", "_done", "_instances", "_leases")
)


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_engine(url: str | sa.URL) -> AsyncEngine:
    """Create an engine; SQLite's does not wait for the disk."""
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":
        sa.event.listen(
            engine.sync_engine,
            "connect",
            lambda connection, _: connection.execute("PRAGMA synchronous=OFF").close(),
        )
    return engine


async def drop_tables(engine: AsyncEngine) -> None:
    await execute(engine, *(f"DROP TABLE IF EXISTS {table}" for table in (*TABLES, "effects")))


async def execute(engine: AsyncEngine, *statements: str, **parameters: Any) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(sa.text(statement), parameters)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres psycopg", marks=pytest.mark.slow),
        pytest.param("postgres asyncpg", marks=pytest.mark.slow),
        pytest.param("mariadb", marks=pytest.mark.slow),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    server, _, driver = str(request.param).partition(" ")
    if server == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/app.db"
    running: Postgres | MariaDB = request.getfixturevalue(server)
    return running.url(driver) if driver else running.url()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(url)
    await drop_tables(engine)
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE effects (n INTEGER)"))
    yield engine
    await drop_tables(engine)
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> SQLAlchemyCursorStore:
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    return store


# Tables


# Bad input


async def test_a_transaction_of_another_database_is_refused(
    store: SQLAlchemyCursorStore, engine: AsyncEngine, postgres: Postgres
) -> None:
    other = create_async_engine(
        "sqlite+aiosqlite://" if engine.dialect.name != "sqlite" else postgres.url()
    )
    async with other.connect() as connection:
        with pytest.raises(StoreError, match="but the cursors are on"):
            await store.save(FEED, opening(), transaction=connection)
    await other.dispose()


async def test_a_schema_that_the_engine_maps_holds_all_tables(postgres: Postgres) -> None:
    server = create_async_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    await execute(server, "DROP SCHEMA IF EXISTS tenant CASCADE", "CREATE SCHEMA tenant")
    mapped = create_async_engine(postgres.url()).execution_options(
        schema_translate_map={None: "tenant"}
    )
    store = SQLAlchemyCursorStore(mapped)
    for _ in range(2):
        await store.create_tables()
    await store.save(FEED, opening())
    assert await store.load(FEED) == opening()
    await execute(server, "DROP SCHEMA tenant CASCADE")
    for each in (mapped, server):
        await each.dispose()


async def test_r5_first_positions_whose_commit_fails_are_not_stored(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/cursors.db")
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()

    def refuse(_: object) -> None:
        raise RuntimeError("the commit is refused")

    sa.event.listen(engine.sync_engine, "commit", refuse)
    with pytest.raises(StoreError):
        await store.save(FEED, opening())
    sa.event.remove(engine.sync_engine, "commit", refuse)
    assert await store.load(FEED) == {}
    await engine.dispose()


async def test_nothing_is_saved_through_an_engine_created_in_autocommit_mode(
    store: SQLAlchemyCursorStore, url: str
) -> None:
    autocommit = create_async_engine(url, isolation_level="AUTOCOMMIT")
    refused = SQLAlchemyCursorStore(autocommit)
    for change in (refused.save, refused.replace):
        with pytest.raises(StoreError, match="autocommit mode"):
            await change(FEED, opening())
    await autocommit.dispose()
    assert await store.load(FEED) == {}


async def test_an_sqlite_engine_that_emits_begin_itself_has_transactions(tmp_path: Path) -> None:
    """SQLAlchemy's recipe for savepoints: the driver is in autocommit mode, the engine is not."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")

    @sa.event.listens_for(engine.sync_engine, "connect")
    def stop_the_driver_from_beginning(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    async with engine.connect() as connection:
        await store.save(FEED, opening(range(3)), transaction=connection)
        await connection.rollback()
    assert await store.load(FEED) == {}
    await store.save(FEED, opening(range(3)))
    assert await store.load(FEED) == opening(range(3))
    await engine.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_r17_fencing_at_stricter_isolation(
    postgres: Postgres, mariadb: MariaDB, level: str
) -> None:
    for url in (postgres.url("psycopg"), postgres.url("asyncpg"), mariadb.url()):
        engine = create_async_engine(url, isolation_level=level)
        await drop_tables(engine)
        store = SQLAlchemyCursorStore(engine, journal=Journal())
        await store.create_tables()
        for revision in range(1, 6):
            results = await asyncio.gather(
                *(store.save(FEED, {0: counted(str(n), revision)}) for n in range(6)),
                return_exceptions=True,
            )
            assert sorted(type(result).__name__ for result in results) == ["FencedError"] * 5 + [
                "NoneType"
            ]
        await engine.dispose()


async def test_an_error_of_another_kind_is_a_store_error_that_names_it(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()

    @sa.event.listens_for(engine.sync_engine, "before_cursor_execute")
    def fail(*_: object) -> None:
        raise RuntimeError("with a payload")

    with pytest.raises(StoreError, match="RuntimeError") as failed:
        await store.load(FEED)
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert (failed.value.feed, "payload" in str(failed.value)) == (FEED.url, False)
    await engine.dispose()


# Threads and locks


async def test_r17_rows_are_locked_in_one_order_wherever_they_lie(
    postgres: Postgres,
) -> None:
    engine = create_async_engine(postgres.url("asyncpg"))
    await drop_tables(engine)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    for partition in reversed(range(20)):
        await store.save(FEED, opening([partition]))
    # PostgreSQL reads rows as they lie where a table is large.
    database = "ALTER DATABASE postgres {} enable_indexscan{}"
    await execute(store.engine, database.format("SET", " = off"))
    await store.engine.dispose()
    blocked = sa.text(
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND query LIKE '%feedapi_cursors%'"
    )
    rows = "SELECT partition_id FROM feedapi_cursors WHERE partition_id {} FOR UPDATE {}"
    later = advanced(opening(range(20)), "later")
    async with store.engine.connect() as holder, store.engine.connect() as watcher:
        await holder.execute(sa.text(rows.format("= 19", "")))
        async with anyio.create_task_group() as group:
            group.start_soon(store.save, FEED, later)
            while not (await watcher.execute(blocked)).all():
                await watcher.rollback()
            free = await watcher.execute(sa.text(rows.format("< 20", "SKIP LOCKED")))
            await watcher.rollback()
            await holder.rollback()
    await execute(store.engine, database.format("RESET", ""))
    assert free.all() == []
    assert await store.load(FEED) == later
    await engine.dispose()


async def test_handlers_that_take_all_threads_of_the_event_loop_can_commit(
    postgres: Postgres,
) -> None:
    """They wait for their save: it needs a thread beside theirs."""
    engine = sa.create_engine(postgres.url(), pool_size=20)
    for_tables = create_async_engine(postgres.url())
    await drop_tables(for_tables)
    await for_tables.dispose()
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    threads = anyio.to_thread.current_default_thread_limiter()
    before, threads.total_tokens = threads.total_tokens, 4
    barrier = threading.Barrier(4)

    def handle(partition: int) -> None:
        with Session(engine) as session:
            barrier.wait(60)
            save = partial(store.save, FEED, opening([partition]), transaction=session)
            anyio.from_thread.run(save)
            session.commit()

    with anyio.fail_after(100):
        async with anyio.create_task_group() as group:
            for partition in range(4):
                group.start_soon(anyio.to_thread.run_sync, handle, partition)
    threads.total_tokens = before
    assert await store.load(FEED) == opening(range(4))
    engine.dispose()
