"""`SQLAlchemyCursorStore` on real servers: what only SQLAlchemy's engines do."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
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
from tests.servers import Postgres
from tests.stores.drivers import FILES, SERVED, App, with_drivers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
FEED = FeedKey("https://service.test/feed")
ASYNCHRONOUS = [
    each
    for each in (*FILES, *SERVED)
    if each.kind.endswith(("+aiosqlite", "+psycopg", "+asyncpg", "+asyncmy"))
    if not each.transaction
]


# Bad input


@with_drivers(ASYNCHRONOUS)
async def test_a_transaction_of_another_database_is_refused(
    app: App, store: SQLAlchemyCursorStore, postgres: Postgres
) -> None:
    other = create_async_engine(
        "sqlite+aiosqlite://" if app.driver.server != "file" else postgres.url()
    )
    async with other.connect() as connection:
        with pytest.raises(StoreError, match="but the cursors are on"):
            await store.save(FEED, opening(), transaction=connection)
    await other.dispose()


@on_asyncio
async def test_a_schema_that_the_engine_maps_holds_all_tables(postgres: Postgres) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as server:
        server.execute("DROP SCHEMA IF EXISTS tenant CASCADE")
        server.execute("CREATE SCHEMA tenant")
        engine = create_async_engine(postgres.url())
        mapped = engine.execution_options(schema_translate_map={None: "tenant"})
        store = SQLAlchemyCursorStore(mapped)
        for _ in range(2):
            await store.create_tables()
        await store.save(FEED, opening())
        assert await store.load(FEED) == opening()
        server.execute("DROP SCHEMA tenant CASCADE")
        await engine.dispose()


@on_asyncio
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


@with_drivers(ASYNCHRONOUS)
async def test_nothing_is_saved_through_an_engine_created_in_autocommit_mode(
    app: App, store: SQLAlchemyCursorStore
) -> None:
    autocommit = create_async_engine(app.given.url, isolation_level="AUTOCOMMIT")
    refused = SQLAlchemyCursorStore(autocommit)
    for change in (refused.save, refused.replace):
        with pytest.raises(StoreError, match="autocommit mode"):
            await change(FEED, opening())
    await autocommit.dispose()
    assert await store.load(FEED) == {}


@on_asyncio
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
@with_drivers(ASYNCHRONOUS[1:])
async def test_r17_fencing_at_stricter_isolation(app: App, level: str) -> None:
    engine = create_async_engine(app.given.url, isolation_level=level)
    store = SQLAlchemyCursorStore(engine, journal=Journal())
    for revision in range(1, 6):
        results = await asyncio.gather(
            *(store.save(FEED, {0: counted(str(n), revision)}) for n in range(6)),
            return_exceptions=True,
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["FencedError"] * 5 + ["NoneType"]
    await engine.dispose()


# Threads and locks


@with_drivers([each for each in ASYNCHRONOUS if each.kind.endswith("asyncpg")])
async def test_r17_rows_are_locked_in_one_order_wherever_they_lie(
    app: App, store: SQLAlchemyCursorStore
) -> None:
    for partition in reversed(range(20)):
        await store.save(FEED, opening([partition]))
    # PostgreSQL reads rows as they lie where a table is large.
    app.execute("ALTER DATABASE postgres SET enable_indexscan = off")
    await app.given.dispose()
    blocked = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND query LIKE '%feedapi_cursors%'"
    )
    rows = "SELECT partition_id FROM feedapi_cursors WHERE partition_id {} FOR UPDATE {}"
    later = advanced(opening(range(20)), "later")
    with app.admin.begin() as holder:
        holder.execute(sa.text(rows.format("= 19", "")))
        async with anyio.create_task_group() as group:
            group.start_soon(store.save, FEED, later)
            while not app.execute(blocked):  # noqa: ASYNC110 - the server has no event for it
                await anyio.sleep(0.01)
            free = app.execute(rows.format("< 20", "SKIP LOCKED"))
            holder.rollback()
    app.execute("ALTER DATABASE postgres RESET enable_indexscan")
    assert free == []
    assert await store.load(FEED) == later


@with_drivers([each for each in SERVED if each.transaction == "synchronous"])
async def test_handlers_that_take_all_threads_of_the_event_loop_can_commit(
    app: App, store: SQLAlchemyCursorStore
) -> None:
    """They wait for their save: it needs a thread beside theirs."""
    threads = anyio.to_thread.current_default_thread_limiter()
    before, threads.total_tokens = threads.total_tokens, 4
    barrier = threading.Barrier(4)

    def handle(partition: int) -> None:
        with Session(app.given) as session:
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
