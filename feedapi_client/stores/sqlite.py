"""Cursors in a SQLite file, with the standard library only.

Here are threads and transactions; the statements are in
`feedapi_client.stores.sqlite_statements`.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.lowlevel import RunVar

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    check_storable,
    stored_key,
    stored_position,
)
from feedapi_client.stores.journal import Journal, microseconds
from feedapi_client.stores.moving import check_moves
from feedapi_client.stores.sqlite_connection import (
    BUSY_CODES,
    open_connection,
    run_script,
    run_script_on_aiosqlite,
    transact,
)
from feedapi_client.stores.sqlite_statements import CursorScripts, Query, Script

T = TypeVar("T")


class SQLiteCursorStore(Closable):
    """Keeps positions in a SQLite file.

    Runs on asyncio and trio. Several processes may share the file.

    Exactly once: let the application keep its effects in the same file and pass its own connection
    as ``transaction``: a `sqlite3.Connection` or an `aiosqlite.Connection`. The save then happens
    on that connection, and the caller commits it or rolls it back. It is part of the open
    transaction; without one it opens one, if the connection is in the mode to do so. On a
    `sqlite3.Connection` it happens synchronously in the calling thread. Don't hold a write
    transaction open across awaits that lead to other saves: SQLite has one writer at a time.

    A file that is damaged, not SQLite or not accessible raises `StoreError` at the first use.

    Arguments:
        path: the file, created on first use; its directory must exist.
        busy_timeout: maximum time that a save waits for another writer, in seconds.
        journal: keep a history of positions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 30.0,
        journal: Journal | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._busy_timeout = busy_timeout
        self._scripts = CursorScripts(journal)
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[[], SQLiteCursorStore] | None = None
        self._lock = threading.Lock()
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar("feedapi_sqlite_limiter")

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        rows = await self._read(feed, self._scripts.load(feed))
        return {row[0]: stored_position(feed, *row) for row in rows}

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`.

        `transaction` is a `sqlite3.Connection` or an `aiosqlite.Connection` to the same file.
        """
        check_storable(feed, positions)
        if transaction is not None:
            await self._save_within(feed, positions, transaction)
        elif positions:
            await self._write(feed, self._scripts.save(feed, positions))

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        rows = await self._read(None, self._scripts.feeds())
        return sorted((stored_key(*row) for row in rows), key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)
        await self._write(feed, self._scripts.delete(feed, wanted))

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        check_storable(feed, positions)
        return await self._write(feed, self._scripts.replace(feed, positions))

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)
        return await self._write(None, self._scripts.move(keys, overwrite=overwrite))

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        return await self._write(feed, self._scripts.positions_at(feed, when))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)
        return await self._write(feed, self._scripts.rewind(feed, to))

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    # The store's own connection, used by one worker thread at a time

    async def _read(self, feed: FeedKey | None, script: Script[T]) -> T:
        return await self._in_thread(feed, lambda connection: run_script(connection, script))

    async def _write(self, feed: FeedKey | None, script: Script[T]) -> T:
        return await self._in_thread(feed, lambda connection: transact(connection, script))

    async def _in_thread(
        self, feed: FeedKey | None, function: Callable[[sqlite3.Connection], T]
    ) -> T:
        # A cancelled task leaves the queue, but a call that has begun is finished.
        return await anyio.to_thread.run_sync(self._locked, feed, function, limiter=self._queue())

    def _queue(self) -> anyio.CapacityLimiter:
        try:
            return self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(1)
            self._limiter.set(limiter)
            return limiter

    def _locked(self, feed: FeedKey | None, function: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = open_connection(
                        self.path, self._busy_timeout, self._scripts.create_tables
                    )
                    # A store that is never closed must not end with a ResourceWarning.
                    self._finalizer = weakref.finalize(self, self._connection.close)
                return function(self._connection)
            except FeedError:
                raise
            except Exception as error:
                raise self._failure(feed, error) from error

    def _close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = self._finalizer = None

    # The caller's connection

    async def _save_within(
        self, feed: FeedKey, positions: Mapping[int, Position], transaction: Any
    ) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        script = self._save_in_transaction(feed, positions, transaction)
        aiosqlite = sys.modules.get("aiosqlite")
        try:
            if isinstance(transaction, sqlite3.Connection):
                run_script(transaction, script)
            elif aiosqlite is not None and isinstance(transaction, aiosqlite.Connection):
                with anyio.CancelScope(shield=True):
                    await run_script_on_aiosqlite(transaction, script)
            else:
                kind = type(transaction).__name__
                raise StoreError(
                    "transaction must be a sqlite3.Connection or an aiosqlite.Connection, "
                    f"not a {kind}",
                    feed=feed.url,
                )
        except FeedError:
            raise
        except Exception as error:
            raise self._failure(feed, error) from error

    def _save_in_transaction(
        self, feed: FeedKey, positions: Mapping[int, Position], connection: Any
    ) -> Script[None]:
        databases = yield Query("PRAGMA database_list")
        self._check_file(feed, next(row[2] for row in databases if row[1] == "main"))
        if not connection.in_transaction:
            if (
                connection.isolation_level is None
                or getattr(connection, "autocommit", False) is True
            ):
                raise StoreError(
                    "no transaction is open on the connection, which is in autocommit mode: "
                    "BEGIN one first",
                    feed=feed.url,
                )
            # A transaction that has read fails at once when it writes beside another
            # writer; this one waits for it.
            yield Query("BEGIN IMMEDIATE")
        if self._connection is None:
            yield from self._scripts.create_tables()
        if not positions:
            return
        yield Query("SAVEPOINT feedapi_save")
        try:
            yield from self._scripts.save(feed, positions)
        except Exception:
            # A failure such as a full disk has already rolled back everything, also the savepoint.
            if connection.in_transaction:
                yield Query("ROLLBACK TO feedapi_save")
                yield Query("RELEASE feedapi_save")
            raise
        yield Query("RELEASE feedapi_save")

    def _check_file(self, feed: FeedKey, file: str) -> None:
        if not file or os.path.realpath(file) != os.path.realpath(self.path):
            raise StoreError(
                f"the transaction is on the database {file or 'in memory'}, "
                f"but the cursors are kept in {self.path}: use one file for both",
                feed=feed.url,
            )

    def _failure(self, feed: FeedKey | None, error: Exception) -> StoreError:
        hint = ""
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            hint = (
                ". Commit in the thread that made the connection, "
                "or make it with check_same_thread=False"
            )
        elif getattr(error, "sqlite_errorcode", None) in BUSY_CODES:
            hint = ". Another writer holds the file: keep write transactions short"
        # Of any other error only the name: its text may quote a cursor.
        text = str(error) if isinstance(error, sqlite3.Error) else type(error).__name__
        return StoreError(
            f"the cursor database {self.path} failed: {text}{hint}",
            feed=feed.url if feed else None,
        )

    def __repr__(self) -> str:
        state = "closed" if self._connection is None else "open"
        return f"<SQLiteCursorStore {self.path!r}, {state}>"
