"""The libraries that an application writes to PostgreSQL with, for `bench_exactly_once`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg_pool
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import CursorStore, PostgresCursorStore, SQLAlchemyCursorStore
from tests.servers import Postgres

CONNECTIONS = 18
"""One for each partition, and some for the consumer's own saves."""
DOLLAR = (
    "INSERT INTO bench_events (partition, payload) VALUES ($1, $2)",
    "UPDATE bench_bare SET cursor = $1 WHERE partition = $2",
)
PERCENT = (
    "INSERT INTO bench_events (partition, payload) VALUES (%s, %s)",
    "UPDATE bench_bare SET cursor = %s WHERE partition = %s",
)
NAMED = (
    sa.text("INSERT INTO bench_events (partition, payload) VALUES (:partition, :payload)"),
    sa.text("UPDATE bench_bare SET cursor = :cursor WHERE partition = :partition"),
)


@dataclass(frozen=True)
class AsyncWay:
    """Transactions of a library, and the store of cursors in them.

    Attributes:
        begin: returns a context manager around a transaction.
        insert: inserts the payloads of a partition.
        update: sets the cursor of the bare loop.
    """

    store: CursorStore
    begin: Callable[[], AbstractAsyncContextManager[Any]]
    insert: Callable[[Any, int, list[str]], Awaitable[None]]
    update: Callable[[Any, int, str], Awaitable[None]]


@dataclass(frozen=True)
class SyncWay:
    """The same without async."""

    store: CursorStore
    begin: Callable[[], AbstractContextManager[Any]]
    insert: Callable[[Any, int, list[str]], None]
    update: Callable[[Any, int, str], None]


@asynccontextmanager
async def sqlalchemy_way(server: Postgres) -> AsyncIterator[AsyncWay]:
    """SQLAlchemy Core and asyncpg."""
    engine = create_async_engine(server.url("asyncpg"), pool_size=CONNECTIONS)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()

    async def insert(connection: Any, partition: int, payloads: list[str]) -> None:
        rows = [{"partition": partition, "payload": each} for each in payloads]
        await connection.execute(NAMED[0], rows)

    async def update(connection: Any, partition: int, cursor: str) -> None:
        await connection.execute(NAMED[1], {"cursor": cursor, "partition": partition})

    try:
        yield AsyncWay(store, engine.begin, insert, update)
    finally:
        await engine.dispose()


@asynccontextmanager
async def asyncpg_way(server: Postgres) -> AsyncIterator[AsyncWay]:
    """asyncpg, whose `executemany` is pipelined."""
    async with asyncpg.create_pool(server.dsn, max_size=CONNECTIONS) as pool:
        store = PostgresCursorStore(pool)
        await store.create_tables()

        @asynccontextmanager
        async def begin() -> AsyncIterator[Any]:
            async with pool.acquire() as connection, connection.transaction():
                yield connection

        async def insert(connection: Any, partition: int, payloads: list[str]) -> None:
            await connection.executemany(DOLLAR[0], [(partition, each) for each in payloads])

        async def update(connection: Any, partition: int, cursor: str) -> None:
            await connection.execute(DOLLAR[1], cursor, partition)

        yield AsyncWay(store, begin, insert, update)


@asynccontextmanager
async def psycopg_way(server: Postgres) -> AsyncIterator[AsyncWay]:
    """psycopg, the statements of a transaction in one pipeline."""
    async with psycopg_pool.AsyncConnectionPool(server.dsn, max_size=CONNECTIONS) as pool:
        store = PostgresCursorStore(pool)
        await store.create_tables()

        @asynccontextmanager
        async def begin() -> AsyncIterator[Any]:
            async with pool.connection() as connection, connection.pipeline():
                yield connection

        async def insert(connection: Any, partition: int, payloads: list[str]) -> None:
            async with connection.cursor() as cursor:
                await cursor.executemany(PERCENT[0], [(partition, each) for each in payloads])

        async def update(connection: Any, partition: int, cursor: str) -> None:
            await connection.execute(PERCENT[1], (cursor, partition))

        yield AsyncWay(store, begin, insert, update)


@contextmanager
def sync_psycopg_way(server: Postgres) -> Iterator[SyncWay]:
    """psycopg's synchronous connections, the statements of a transaction in one pipeline."""
    with psycopg_pool.ConnectionPool(server.dsn, max_size=CONNECTIONS) as pool:
        store = PostgresCursorStore(pool)
        _create_tables(server)

        @contextmanager
        def begin() -> Iterator[Any]:
            with pool.connection() as connection, connection.pipeline():
                yield connection

        def insert(connection: Any, partition: int, payloads: list[str]) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(PERCENT[0], [(partition, each) for each in payloads])

        def update(connection: Any, partition: int, cursor: str) -> None:
            connection.execute(PERCENT[1], (cursor, partition))

        yield SyncWay(store, begin, insert, update)


@contextmanager
def sync_sqlalchemy_way(server: Postgres) -> Iterator[SyncWay]:
    """SQLAlchemy Core and psycopg."""
    engine = sa.create_engine(server.url("psycopg"), pool_size=CONNECTIONS)
    store = SQLAlchemyCursorStore(engine)
    _create_tables(server)

    def insert(connection: Any, partition: int, payloads: list[str]) -> None:
        rows = [{"partition": partition, "payload": each} for each in payloads]
        connection.execute(NAMED[0], rows)

    def update(connection: Any, partition: int, cursor: str) -> None:
        connection.execute(NAMED[1], {"cursor": cursor, "partition": partition})

    try:
        yield SyncWay(store, engine.begin, insert, update)
    finally:
        engine.dispose()


@contextmanager
def django_way(server: Postgres) -> Iterator[SyncWay]:
    """Django's cursors, on psycopg. Each thread keeps its connection."""
    from tests.django.databases import registered, set_up, settings_of

    set_up()
    from django.db import connections, transaction

    from feedapi_client.django import DjangoCursorStore

    _create_tables(server)
    with registered({**settings_of(server), "CONN_MAX_AGE": None}) as using:

        @contextmanager
        def begin() -> Iterator[Any]:
            with transaction.atomic(using=using):
                yield connections[using]

        def insert(connection: Any, partition: int, payloads: list[str]) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(PERCENT[0], [(partition, each) for each in payloads])

        def update(connection: Any, partition: int, cursor: str) -> None:
            with connection.cursor() as executed:
                executed.execute(PERCENT[1], (cursor, partition))

        yield SyncWay(DjangoCursorStore(using), begin, insert, update)


def _create_tables(server: Postgres) -> None:
    """Create those of the cursors, which are the same for all stores."""
    engine = sa.create_engine(server.url("psycopg"))
    SQLAlchemyCursorStore(engine).table.create(engine)
    engine.dispose()
