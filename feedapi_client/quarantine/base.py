"""Where events are kept that the application can't handle: in memory, or in the SQLite file that holds the cursors.

`SQLAlchemyQuarantineStore` is in `feedapi_client.quarantine.sql`. What fills a quarantine is `feedapi_client.quarantine.policy`, what works on one is
`feedapi_client.quarantine`.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from typing import Any, Protocol, runtime_checkable

import anyio
import anyio.lowlevel
import anyio.to_thread

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, from_row, to_row
from feedapi_client.quarantine.record import ERROR_CHARACTERS as ERROR_CHARACTERS
from feedapi_client.quarantine.record import QuarantinedEvent as QuarantinedEvent
from feedapi_client.quarantine.record import quarantined as quarantined
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.stores.sqlite import SQLiteCursorStore


@runtime_checkable
class QuarantineStore(Protocol):
    """Keeps quarantined events until an operator drops or replays them; nothing else ever deletes one.

    All methods may be called concurrently, by several tasks and processes. They raise `StoreError`.
    """

    async def prepare(self) -> None:
        """Be ready to take events, or raise: a consumer asks before it begins, so that no event finds the place missing."""

    def joins(self, cursors: CursorStore) -> bool:
        """Whether a transaction on this store may also hold the save of a cursor there."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A transaction, committed at the end of the block and rolled back by an exception; None where there are none."""

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """Keep the events, all or none; with `transaction` as part of it."""

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """Up to `limit` events in the order of their ids, those with an id above `after`; of one feed, or of all."""

    async def get(self, id: str) -> QuarantinedEvent | None:
        """One event."""

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """Delete events, and say how many there were; with `transaction` as part of it."""


class MemoryQuarantineStore:
    """Keeps events for as long as the object lives. It has no transactions: a consumer that is killed may quarantine an event again."""

    def __init__(self) -> None:
        self._events: dict[str, QuarantinedEvent] = {}

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`."""
        await anyio.lowlevel.checkpoint()

    def joins(self, cursors: CursorStore) -> bool:  # noqa: ARG002
        """Never."""
        return False

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[None]:
        """No transaction."""
        yield None

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:  # noqa: ARG002
        """See `QuarantineStore.add`; not part of any transaction."""
        await anyio.lowlevel.checkpoint()
        self._events.update((event.id, event) for event in events)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        await anyio.lowlevel.checkpoint()
        chosen = (self._events[id] for id in sorted(self._events) if id > after)
        return [
            event
            for event in chosen
            if feed in (None, event.feed) and partition in (None, event.partition)
        ][:limit]

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        await anyio.lowlevel.checkpoint()
        return self._events.get(id)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:  # noqa: ARG002
        """See `QuarantineStore.remove`; not part of any transaction."""
        await anyio.lowlevel.checkpoint()
        return sum(self._events.pop(id, None) is not None for id in set(ids))

    def __repr__(self) -> str:
        return f"<MemoryQuarantineStore: {len(self._events)} events>"


_TABLE = """CREATE TABLE IF NOT EXISTS feedapi_quarantine (
    id VARCHAR(32) NOT NULL PRIMARY KEY,
    feed_id CHAR(64) NOT NULL,
    feed_url TEXT NOT NULL,
    consumer TEXT NOT NULL,
    filters TEXT NOT NULL,
    partition_id INTEGER NOT NULL,
    feed_cursor TEXT NOT NULL,
    event_index INTEGER NOT NULL,
    payload BLOB NOT NULL,
    headers TEXT NOT NULL,
    error_type TEXT NOT NULL,
    error TEXT NOT NULL,
    quarantined_at BIGINT NOT NULL
)"""
_NAMES = ", ".join(COLUMNS)
# Only names that stand above go into these statements.
_INSERT = f"INSERT INTO feedapi_quarantine ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
_SELECT = f"SELECT {_NAMES} FROM feedapi_quarantine"  # noqa: S608
_PAGE = f"{_SELECT} WHERE id > ? AND (? IS NULL OR feed_id = ?) AND (? IS NULL OR partition_id = ?) ORDER BY id LIMIT ?"
_GET = f"{_SELECT} WHERE id = ?"
_REMOVE = "DELETE FROM feedapi_quarantine WHERE id = ?"


class SQLiteQuarantineStore:
    """Keeps events in the table ``feedapi_quarantine`` of the SQLite file `path`, which is made on first use.

    A `transaction` is an `sqlite3.Connection` or an `aiosqlite.Connection` to that file, as `SQLiteCursorStore` takes it. Runs on asyncio and trio.
    `busy_timeout` (seconds) is how long another writer is waited for.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 30.0) -> None:
        self.path = os.fspath(path)
        self._busy_timeout = busy_timeout

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: makes the table."""
        await anyio.to_thread.run_sync(lambda: self._begin().close())

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: when the cursors are in the same file."""
        path = getattr(cursors, "path", None)
        return path is not None and os.path.realpath(path) == os.path.realpath(self.path)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[sqlite3.Connection]:
        """See `QuarantineStore.begin`: gives a connection that holds the write lock, which is waited for in a thread."""
        connection = await anyio.to_thread.run_sync(self._begin)
        try:
            yield connection
            # Not in the caller's hands any more: finished also when the task is cancelled now.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._execute, connection, "COMMIT")
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
            return self._execute(transaction, sql, rows)
        with self._translated(), anyio.CancelScope(shield=True):
            cursor = await transaction.executemany(sql, rows)
        return int(cursor.rowcount)

    def _execute(
        self, connection: sqlite3.Connection, sql: str, rows: list[tuple[Any, ...]] | None = None
    ) -> int:
        with self._translated():
            cursor = connection.execute(sql) if rows is None else connection.executemany(sql, rows)
            return cursor.rowcount

    def _select(self, sql: str, parameters: Sequence[Any]) -> list[QuarantinedEvent]:
        with self._translated(), closing(self._open()) as connection:
            return [from_row(row) for row in connection.execute(sql, parameters)]

    def _begin(self) -> sqlite3.Connection:
        with self._translated():
            connection = self._open()
            try:
                connection.execute("BEGIN IMMEDIATE")
            except BaseException:
                connection.close()
                raise
            return connection

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute(_TABLE)
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


_in_memory: weakref.WeakKeyDictionary[CursorStore, MemoryQuarantineStore] = (
    weakref.WeakKeyDictionary()
)


def quarantine_beside(cursors: CursorStore) -> QuarantineStore:
    """The quarantine in the file, database or memory where the cursors are; for one `MemoryCursorStore` always the same.

    Raises `StoreError` for another kind of store.
    """
    if isinstance(cursors, MemoryCursorStore):
        return _in_memory.setdefault(cursors, MemoryQuarantineStore())
    if isinstance(cursors, SQLiteCursorStore):
        return SQLiteQuarantineStore(cursors.path)
    if hasattr(cursors, "engine"):
        from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore
        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        if isinstance(cursors, SQLAlchemyCursorStore):
            return SQLAlchemyQuarantineStore(cursors.engine, schema=cursors.table.schema)
    raise StoreError(
        f"{type(cursors).__name__} has no quarantine: say where quarantined events go, on_failure=Quarantine(to=...)"
    )
