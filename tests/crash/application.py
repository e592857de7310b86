"""The application of a crash test: it writes each event into a table of its database."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple, Protocol

import anyio
import orjson

from feedapi_client.quarantine.quarantine_store import SQLiteQuarantineStore
from feedapi_client.stores.base import CursorStore


class Row(NamedTuple):
    """An effect: the event, and who wrote it."""

    partition: int
    entity: str
    n: int
    writer: int


class Application(Protocol):
    """A database for effects and cursors.

    The table of effects has no unique key that would hide duplicates. `at` is the order of
    insertion.
    """

    store: CursorStore

    async def open(self) -> None:
        """Open what needs an event loop, in the process that consumes."""

    def transaction(self) -> Any:
        """Return an async context manager around one transaction."""
        ...

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        """Insert effects."""
        ...

    def rows(self) -> list[Row]:
        """Return all effects in the order of insertion."""

    def misplaced(self) -> int:
        """Return the number of effects that are not the next one of their entity.

        It is 0 at any time when each event comes exactly once, in order.
        """

    def quarantined(self) -> list[tuple[str, int]]:
        """Return entity and number of the events in quarantine."""

    async def aclose(self) -> None:
        """Close connections."""


_COLUMNS = "partition_id, entity, n, writer"
INSERT = f"INSERT INTO effects ({_COLUMNS}) VALUES (?, ?, ?, ?)"
"""An effect into a SQLite file."""
PSYCOPG_INSERT = f"INSERT INTO effects ({_COLUMNS}) VALUES (%s, %s, %s, %s)"
_ROWS = f"SELECT {_COLUMNS} FROM effects ORDER BY at"
_MISPLACED = """SELECT count(*) FROM (
    SELECT n, row_number() OVER (PARTITION BY entity ORDER BY at) - 1 AS expected FROM effects
) AS numbered WHERE n <> expected"""
_QUARANTINED = "SELECT payload FROM feedapi_quarantine"
_TABLE = """CREATE TABLE IF NOT EXISTS effects (
    at {at},
    partition_id INTEGER NOT NULL,
    entity TEXT NOT NULL,
    n INTEGER NOT NULL,
    writer INTEGER NOT NULL
)"""


class PostgresApplication:
    """Effects through SQLAlchemy Core and psycopg. The database is a DSN, after its driver."""

    store: CursorStore

    def __init__(self, database: str) -> None:
        self._dsn = database[database.index("postgresql:") :]
        self._connect()

    def _connect(self) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        url = self._dsn.replace("postgresql://", "postgresql+psycopg://")
        self._engine = create_async_engine(url)
        self.store = SQLAlchemyCursorStore(self._engine)

    @classmethod
    async def create(cls, database: str) -> None:
        """Create the tables, empty. They are the same for all drivers."""
        import psycopg

        from feedapi_client.quarantine.quarantine_store import SQLAlchemyQuarantineStore
        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        application = PostgresApplication(database)
        with psycopg.connect(application._dsn) as connection:
            connection.execute(
                "DROP TABLE IF EXISTS effects, feedapi_cursors, feedapi_cursors_done, "
                "feedapi_quarantine"
            )
            connection.execute(_TABLE.format(at="BIGSERIAL PRIMARY KEY"))  # type: ignore[arg-type]
        assert isinstance(application.store, SQLAlchemyCursorStore)
        await application.store.create_tables()
        await SQLAlchemyQuarantineStore(application._engine).create_tables()
        await application.aclose()

    async def open(self) -> None:
        """Open the pool, in the process that consumes."""

    def transaction(self) -> Any:
        return self._engine.begin()

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        import sqlalchemy as sa

        insert = sa.text(
            f"INSERT INTO effects ({_COLUMNS}) VALUES (:partition, :entity, :n, :writer)"
        )
        await transaction.execute(insert, [row._asdict() for row in rows])

    def rows(self) -> list[Row]:
        return [Row(*row) for row in self._query(_ROWS)]

    def misplaced(self) -> int:
        return int(self._query(_MISPLACED)[0][0])

    def quarantined(self) -> list[tuple[str, int]]:
        return [_event(payload) for (payload,) in self._query(_QUARANTINED)]

    async def aclose(self) -> None:
        await self._engine.dispose()

    def _query(self, sql: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self._dsn) as connection:
            return connection.execute(sql).fetchall()  # type: ignore[arg-type]


class PsycopgApplication(PostgresApplication):
    """Effects through psycopg's asynchronous connections."""

    def _connect(self) -> None:
        from psycopg_pool import AsyncConnectionPool

        from feedapi_client.stores.postgres import PostgresCursorStore

        self._pool = AsyncConnectionPool(self._dsn, open=False, max_size=30)
        self.store = PostgresCursorStore(self._pool)

    async def open(self) -> None:
        await self._pool.open()

    def transaction(self) -> Any:
        return self._pool.connection()

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        async with transaction.cursor() as cursor:
            await cursor.executemany(PSYCOPG_INSERT, rows)

    async def aclose(self) -> None:
        await self._pool.close()


class AsyncpgApplication(PostgresApplication):
    """Effects through asyncpg."""

    _is_open = False

    def _connect(self) -> None:
        import asyncpg  # type: ignore[import-untyped]

        from feedapi_client.stores.postgres import PostgresCursorStore

        self._pool = asyncpg.create_pool(self._dsn, min_size=1, max_size=30)
        self.store = PostgresCursorStore(self._pool)

    async def open(self) -> None:
        await self._pool
        self._is_open = True

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._pool.acquire() as connection, connection.transaction():
            yield connection

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        await transaction.executemany(
            f"INSERT INTO effects ({_COLUMNS}) VALUES ($1, $2, $3, $4)", rows
        )

    async def aclose(self) -> None:
        if self._is_open:
            await self._pool.close()


class SQLiteApplication:
    """Effects through the standard library's sqlite3, in the file that holds the cursors."""

    def __init__(self, path: str) -> None:
        from feedapi_client.stores.sqlite import SQLiteCursorStore

        self._path = path
        self._lock = anyio.Lock()
        self.store = SQLiteCursorStore(path)

    @classmethod
    async def create(cls, path: str) -> None:
        """Create the tables, empty."""
        with closing(sqlite3.connect(path)) as connection:
            for table in (
                "effects",
                "feedapi_cursors",
                "feedapi_cursors_done",
                "feedapi_quarantine",
            ):
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(_TABLE.format(at="INTEGER PRIMARY KEY AUTOINCREMENT"))
        await SQLiteQuarantineStore(path).prepare()

    async def open(self) -> None:
        """Nothing needs it."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        # SQLite has one writer at a time. Handlers of several partitions take turns here and not in
        # the database, where they would block the event loop.
        async with self._lock:
            with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
                yield connection

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        transaction.executemany(INSERT, rows)

    def rows(self) -> list[Row]:
        return [Row(*row) for row in self._query(_ROWS)]

    def misplaced(self) -> int:
        return int(self._query(_MISPLACED)[0][0])

    def quarantined(self) -> list[tuple[str, int]]:
        return [_event(payload) for (payload,) in self._query(_QUARANTINED)]

    async def aclose(self) -> None:
        await self.store.aclose()

    def _query(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self._path, timeout=30)) as connection:
            return connection.execute(sql).fetchall()


def _event(payload: bytes) -> tuple[str, int]:
    event = orjson.loads(bytes(payload))
    return event["entity"], event["n"]


DJANGO = "django+"
"""Begins the name of a database that Django writes to: the rest is the server's."""
SYNC_PSYCOPG = "sync-psycopg+"
SYNC_SQLALCHEMY = "sync-sqlalchemy+"
WITHOUT_ASYNC = (DJANGO, SYNC_PSYCOPG, SYNC_SQLALCHEMY)
_KINDS: dict[str, type[PostgresApplication]] = {
    "psycopg+": PsycopgApplication,
    "asyncpg+": AsyncpgApplication,
}


def application_class(database: str) -> Any:
    """Return the class for a SQLite file, or for a database of a server, after its driver."""
    if database.startswith(DJANGO):
        from tests.crash.django_application import DjangoApplication

        return DjangoApplication
    if "postgresql:" not in database:
        return SQLiteApplication
    return _KINDS.get(database.partition("postgresql:")[0], PostgresApplication)
