"""The application of a crash test: it writes each event into a table of its database."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple, Protocol

import anyio
import orjson

from feedapi_client.quarantine.sqlite import SQLiteQuarantineStore
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
    """Effects through SQLAlchemy Core and psycopg. `dsn` is psycopg's."""

    def __init__(self, dsn: str) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        self._dsn = dsn
        self._engine = create_async_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
        self.store = SQLAlchemyCursorStore(self._engine)
        self.transaction = self._engine.begin

    @classmethod
    async def create(cls, dsn: str) -> None:
        """Create the tables, empty."""
        import psycopg

        from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore

        with psycopg.connect(dsn) as connection:
            connection.execute("DROP TABLE IF EXISTS effects, feedapi_cursors, feedapi_quarantine")
            connection.execute(_TABLE.format(at="BIGSERIAL PRIMARY KEY"))  # type: ignore[arg-type]
        application = cls(dsn)
        await application.store.create_tables()
        await SQLAlchemyQuarantineStore(application._engine).create_tables()
        await application.aclose()

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
            for table in ("effects", "feedapi_cursors", "feedapi_quarantine"):
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(_TABLE.format(at="INTEGER PRIMARY KEY AUTOINCREMENT"))
        await SQLiteQuarantineStore(path).prepare()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        # SQLite has one writer at a time. Handlers of several partitions take turns here and not in
        # the database, where they would block the event loop.
        async with self._lock:
            with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
                yield connection

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        transaction.executemany(f"INSERT INTO effects ({_COLUMNS}) VALUES (?, ?, ?, ?)", rows)

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


def application_class(database: str) -> type[PostgresApplication] | type[SQLiteApplication]:
    """Return the class for a PostgreSQL DSN or for a SQLite file."""
    return PostgresApplication if database.startswith("postgresql:") else SQLiteApplication
