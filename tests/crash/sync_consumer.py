"""The consumer process without async: `SyncFeedConsumer`, with the transactions of each library."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol

from feedapi_client import CursorStore, Limits, SQLiteCursorStore, SyncBatch, SyncFeedConsumer
from tests.crash.application import (
    DJANGO,
    INSERT,
    PSYCOPG_INSERT,
    SYNC_PSYCOPG,
    SYNC_SQLALCHEMY,
    Row,
)
from tests.crash.consumer import (
    BETWEEN,
    DONE,
    HALF_WRITTEN,
    OPENED,
    PAUSE_SECONDS,
    POISON,
    WRITTEN,
    PoisonError,
)

_one_step = threading.Lock()


def reach(step: bytes) -> None:
    """Announce a step and wait for permission to go on, as the consumer with async does."""
    with _one_step:
        os.write(1, step)
        if not os.read(0, 1):
            os._exit(1)
    time.sleep(random.uniform(0, PAUSE_SECONDS))


class Writer(Protocol):
    """Where effects are written to, and cursors saved."""

    store: CursorStore

    def transaction(self) -> AbstractContextManager[Any]:
        """Begin a transaction, which ends with the block; gives what `Batch.commit` takes."""
        ...

    def write(self, transaction: Any, rows: list[Row]) -> None:
        """Insert effects."""
        ...


class SQLiteWriter:
    """Plain sqlite3."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.store = SQLiteCursorStore(path)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
            yield connection

    def write(self, transaction: Any, rows: list[Row]) -> None:
        transaction.executemany(INSERT, rows)


class PsycopgWriter:
    """psycopg's synchronous connections."""

    def __init__(self, dsn: str) -> None:
        from psycopg_pool import ConnectionPool

        from feedapi_client import PostgresCursorStore

        # It ends with the process, which is killed.
        pool = ConnectionPool(dsn, open=True)
        self.store = PostgresCursorStore(pool)
        self.transaction = pool.connection

    def write(self, transaction: Any, rows: list[Row]) -> None:
        with transaction.cursor() as cursor:
            cursor.executemany(PSYCOPG_INSERT, rows)


class SQLAlchemyWriter:
    """Sessions of a synchronous engine of SQLAlchemy."""

    def __init__(self, dsn: str) -> None:
        import sqlalchemy as sa
        from sqlalchemy.orm import sessionmaker

        from feedapi_client import SQLAlchemyCursorStore

        engine = sa.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
        self.store = SQLAlchemyCursorStore(engine)
        self.transaction = sessionmaker(engine).begin
        table = sa.table("effects", *map(sa.column, ("partition_id", *Row._fields[1:])))
        self._insert = sa.insert(table)

    def write(self, transaction: Any, rows: list[Row]) -> None:
        columns = ("partition_id", *Row._fields[1:])
        transaction.execute(self._insert, [dict(zip(columns, row, strict=True)) for row in rows])


class SyncHandler:
    """Writes the events of a batch and commits; `cursor` says where, as in `make_handler`."""

    def __init__(self, writer: Writer, cursor: str, *, poison: bool) -> None:
        self._writer = writer
        self._cursor = cursor
        self._poison = poison

    def __call__(self, batch: SyncBatch) -> None:
        if self._cursor == "before":
            batch.commit()
            reach(BETWEEN)
        with self._writer.transaction() as transaction:
            self._write(transaction, batch)
            if self._cursor == "inside":
                batch.commit(transaction=transaction)
                reach(BETWEEN)
        if self._cursor == "after":
            reach(BETWEEN)
            batch.commit()
        reach(DONE)

    def _write(self, transaction: Any, batch: SyncBatch) -> None:
        payloads = [event.json() for event in batch]
        rows = [Row(batch.partition, p["entity"], p["n"], os.getpid()) for p in payloads]
        half = len(rows) // 2
        for part, step in ((rows[:half], HALF_WRITTEN), (rows[half:], WRITTEN)):
            if part:
                self._writer.write(transaction, part)
            reach(step)
        if self._poison and any(payload["n"] % POISON == 0 for payload in payloads):
            raise PoisonError


def consume(
    url: str,
    database: str,
    cursor: str,
    *,
    threads: int,
    poison: bool,
    follow: bool,
    limits: Limits,
) -> None:
    """Run until killed, or to the end of the feed."""
    writer = _writer(database)
    with SyncFeedConsumer(url, store=writer.store, follow=follow, limits=limits) as consumer:
        reach(OPENED)
        consumer.run(
            SyncHandler(writer, cursor, poison=poison),
            threads=threads,
            on_failure="quarantine" if poison else "raise",
        )


def _writer(database: str) -> Writer:
    if database.startswith(DJANGO):
        from tests.crash.django_application import DjangoWriter

        return DjangoWriter(database)
    if database.startswith(SYNC_PSYCOPG):
        return PsycopgWriter(database.removeprefix(SYNC_PSYCOPG))
    if database.startswith(SYNC_SQLALCHEMY):
        return SQLAlchemyWriter(database.removeprefix(SYNC_SQLALCHEMY))
    if "://" in database:
        sys.exit("this database is consumed with async")
    return SQLiteWriter(database)
