"""The quarantine in a SQLite file, with the standard library only."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.sqlite_connection import (
    BUSY_CODES,
    create_privately,
    run_script,
    transact,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT, note_format
from feedapi_client.stores.tables import create_missing

# The statements are put together from the names of `COLUMNS` only.
_NAMES = ", ".join(COLUMNS)
_PLACES = ", ".join("?" * len(COLUMNS))
_INSERT = f"INSERT INTO feedapi_quarantine ({_NAMES}) VALUES ({_PLACES})"  # noqa: S608
_SELECT = f"SELECT {_NAMES} FROM feedapi_quarantine"  # noqa: S608
_PAGE = (
    f"{_SELECT} WHERE id > ? AND (? IS NULL OR feed_id = ?) AND (? IS NULL OR partition_id = ?) "
    "ORDER BY id LIMIT ?"
)
_GET = f"{_SELECT} WHERE id = ?"
_REMOVE = "DELETE FROM feedapi_quarantine WHERE id = ?"


class SQLiteQuarantineStore:
    """Keeps events in the table ``feedapi_quarantine`` of a SQLite file.

    A `transaction` is a `sqlite3.Connection` or an `aiosqlite.Connection` to that file, as
    `SQLiteCursorStore` takes it. Runs on asyncio and trio.

    Arguments:
        path: the file, created on first use.
        busy_timeout: maximum time to wait for another writer, in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 30.0) -> None:
        self.path = os.fspath(path)
        self._busy_timeout = busy_timeout

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: creates the table."""
        await anyio.to_thread.run_sync(self._check)

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: True if the cursors are in the same file."""
        path = getattr(cursors, "path", None)
        return path is not None and os.path.realpath(path) == os.path.realpath(self.path)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[sqlite3.Connection]:
        """See `QuarantineStore.begin`: gives a connection that holds the write lock.

        Another writer is waited for in a thread. From taking the lock to freeing it, though, no
        other task runs, unless the block awaits something: a task that writes to the file in the
        event loop's thread would wait for a lock that only this loop can free.
        """
        connection = await anyio.to_thread.run_sync(self._open)
        try:
            deadline = time.monotonic() + self._busy_timeout
            while not self._try_begin(connection):
                seconds = max(0.0, deadline - time.monotonic())
                await anyio.to_thread.run_sync(self._wait_for_lock, connection, seconds)
            yield connection
            self._execute(connection, "COMMIT")
        finally:
            connection.close()

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        await self._change(_INSERT, [to_row(event) for event in events], transaction)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        key = None if feed is None else feed.id
        return await anyio.to_thread.run_sync(
            self._select, _PAGE, (after, key, key, partition, partition, limit)
        )

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        return next(iter(await anyio.to_thread.run_sync(self._select, _GET, (id,))), None)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """See `QuarantineStore.remove`."""
        return await self._change(_REMOVE, [(id,) for id in set(ids)], transaction)

    async def _change(self, sql: str, rows: list[tuple[Any, ...]], transaction: Any) -> int:
        if not rows:
            return 0
        if transaction is None:
            async with self.begin() as connection:
                return self._execute(connection, sql, rows)
        if isinstance(transaction, sqlite3.Connection):
            return await in_callers_thread(partial(self._execute, transaction, sql, rows))
        changed = 0
        with self._translated(), anyio.CancelScope(shield=True):
            changed = (await transaction.executemany(sql, rows)).rowcount
        return int(changed)

    def _execute(
        self, connection: sqlite3.Connection, sql: str, rows: list[tuple[Any, ...]] | None = None
    ) -> int:
        with self._translated():
            cursor = connection.execute(sql) if rows is None else connection.executemany(sql, rows)
            return cursor.rowcount

    def _select(self, sql: str, parameters: Sequence[Any]) -> list[QuarantinedEvent]:
        with self._translated(), closing(self._open()) as connection:
            return [from_row(row) for row in connection.execute(sql, parameters)]

    def _try_begin(self, connection: sqlite3.Connection) -> bool:
        """Take the write lock, without waiting. Returns whether it was free."""
        with self._translated():
            self._wait_up_to(connection, 0)
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode not in BUSY_CODES:
                    raise
                return False
            finally:
                self._wait_up_to(connection, self._busy_timeout)
            return True

    def _wait_for_lock(self, connection: sqlite3.Connection, seconds: float) -> None:
        """Return when the write lock was free. Raises `StoreError` when it is not in time."""
        with self._translated():
            self._wait_up_to(connection, seconds)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

    @staticmethod
    def _wait_up_to(connection: sqlite3.Connection, seconds: float) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def _check(self) -> None:
        """Create the table, and find out whether the file can be written to."""
        with closing(self._open()) as connection:
            self._wait_for_lock(connection, self._busy_timeout)
            with self._translated():
                note = note_format(FORMAT_TABLE, "feedapi_quarantine", QUARANTINE_FORMAT)
                transact(connection, note)

    def _open(self) -> sqlite3.Connection:
        with self._translated():
            create_privately(self.path)
            connection = sqlite3.connect(
                self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
            )
            try:
                run_script(connection, create_missing(FORMAT_TABLE, "feedapi_quarantine"))
            except BaseException:
                connection.close()
                raise
            return connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            raise StoreError(f"the quarantine in {self.path} failed: {error}") from error

    def __repr__(self) -> str:
        return f"<SQLiteQuarantineStore {self.path!r}>"
