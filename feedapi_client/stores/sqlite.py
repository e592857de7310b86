"""Cursors in a SQLite file, or in memory, with the standard library only.

Here are threads and transactions; the statements are in `feedapi_client.stores.positions`.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import orjson

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.lease_stores import ScriptedLeases
from feedapi_client.stores.leases import SECOND, LeaseScripts
from feedapi_client.stores.positions import PositionScripts
from feedapi_client.stores.scripted import JournalledScripts, Run, ScriptedStore
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.sqlite_connection import (
    SQLiteFile,
    run_script,
    run_script_on_aiosqlite,
    transact,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, STORE_FORMAT, note_format
from feedapi_client.stores.tables import create_missing

T = TypeVar("T")

_TABLES = ("feedapi_cursors", "feedapi_cursors_done")
_LEASE_TABLES = ("feedapi_cursors_instances", "feedapi_cursors_leases")


class SQLiteCursorStore(ScriptedLeases, JournalledScripts):
    """Keeps positions in a SQLite file.

    Runs on asyncio and trio. Several processes may share the file. It keeps leases, too
    (`LeaseStore`).

    Exactly once: let the application keep its effects in the same file and pass its own connection
    as ``transaction``: a `sqlite3.Connection` or an `aiosqlite.Connection`. The save then happens
    on that connection, and the caller commits it or rolls it back. It is part of the open
    transaction; without one it opens one, if the connection is in the mode to do so. On a
    `sqlite3.Connection` it happens synchronously in the calling thread, also with
    `SyncFeedConsumer`: see `feedapi_client.stores.caller_thread`. Don't hold a write
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
        self._scripts = PositionScripts("sqlite", "feedapi_cursors{}".format, journal)
        self._journalled = journal is not None
        self.file = SQLiteFile(self.path, busy_timeout, self._create)
        self._lease_scripts = LeaseScripts("sqlite", "feedapi_cursors{}".format)
        # On a connection of its own, so that no save delays a renewal.
        self._lease_file = SQLiteFile(
            self.path, busy_timeout, partial(create_missing, *_LEASE_TABLES)
        )

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        await self.file.aclose()
        await self._lease_file.aclose()

    async def _read(self, script: Script[T]) -> T:
        return await self.file.run(partial(run_script, script=script))

    async def _run_alone(self, script: Script[T]) -> T:
        return await self.file.run(partial(transact, script=script))

    async def _lease(
        self,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        beats: bool = False,  # noqa: ARG002
        reads: bool = False,
    ) -> T:
        run = run_script if reads else transact
        async with self._operation(feed):
            return await self._lease_file.run(lambda connection: run(connection, script()))

    @asynccontextmanager
    async def _operation(
        self,
        feed: FeedKey | None,
        *,
        shield: bool = True,  # noqa: ARG002 - what runs in a thread is finished
    ) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            yield
        except FeedError:
            raise
        except Exception as error:
            raise self.file.failure(feed, error) from error

    # The caller's connection

    async def _runner(self, feed: FeedKey, transaction: Any) -> Run | None:
        if transaction is None:
            return None
        aiosqlite = sys.modules.get("aiosqlite")
        if isinstance(transaction, sqlite3.Connection):
            return lambda script: in_callers_thread(
                partial(run_script, transaction, self._in_transaction(feed, script, transaction))
            )
        if aiosqlite is not None and isinstance(transaction, aiosqlite.Connection):
            return lambda script: self._run_on_aiosqlite(
                transaction, self._in_transaction(feed, script, transaction)
            )
        kind = type(transaction).__name__
        raise StoreError(
            f"transaction must be a sqlite3.Connection or an aiosqlite.Connection, not a {kind}",
            feed=feed.url,
        )

    @staticmethod
    async def _run_on_aiosqlite(connection: Any, script: Script[T]) -> T:
        with anyio.CancelScope(shield=True):
            return await run_script_on_aiosqlite(connection, script)
        raise AssertionError("the scope is never cancelled")

    def _in_transaction(self, feed: FeedKey, script: Script[T], connection: Any) -> Script[T]:
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
        if not self.file.is_open:
            yield from self._create()
        return (yield from script)

    def _create(self) -> Script[None]:
        """Create the tables that do not exist yet."""
        journal = ("feedapi_cursors_journal",) * self._journalled
        yield from create_missing(FORMAT_TABLE, *_TABLES, *journal)
        yield from note_format(FORMAT_TABLE, "feedapi_cursors", STORE_FORMAT)

    def _check_file(self, feed: FeedKey, file: str) -> None:
        if not file or os.path.realpath(file) != os.path.realpath(self.path):
            raise StoreError(
                f"the transaction is on the database {file or 'in memory'}, "
                f"but the cursors are kept in {self.path}: use one file for both",
                feed=feed.url,
            )

    def __repr__(self) -> str:
        state = "open" if self.file.is_open else "closed"
        return f"<SQLiteCursorStore {self.path!r}, {state}>"


class MemoryCursorStore(ScriptedLeases, ScriptedStore):
    """Keeps positions for as long as the object lives.

    It takes part in no transaction. It keeps leases, too (`LeaseStore`), for several consumers in
    one process. It must not be used from several threads.
    """

    def __init__(self) -> None:
        self._scripts = PositionScripts("sqlite", "feedapi_cursors{}".format)
        # By the clock of the event loop, which may be a virtual one.
        self._lease_scripts = LeaseScripts("sqlite", "feedapi_cursors{}".format, _loop_clock)
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        # A store that is never closed must not end with a ResourceWarning.
        weakref.finalize(self, self._connection.close)
        run_script(self._connection, create_missing(*_TABLES, *_LEASE_TABLES))

    async def _read(self, script: Script[T]) -> T:
        return run_script(self._connection, script)

    async def _run_alone(self, script: Script[T]) -> T:
        return transact(self._connection, script)

    async def _runner(self, feed: FeedKey, transaction: Any) -> Run | None:
        if transaction is not None:
            raise StoreError(
                "MemoryCursorStore can't take part in a transaction: "
                "use a store in the database that the effects go to",
                feed=feed.url,
            )
        return None

    async def _lease(
        self,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        beats: bool = False,  # noqa: ARG002
        reads: bool = False,
    ) -> T:
        run = run_script if reads else transact
        async with self._operation(feed):
            return run(self._connection, script())

    def _operation(
        self,
        feed: FeedKey | None,
        *,
        shield: bool = True,  # noqa: ARG002 - it never waits
    ) -> _InMemory:
        return _InMemory(feed)

    def __repr__(self) -> str:
        rows = run_script(self._connection, self._scripts.feeds())
        return f"<MemoryCursorStore: {len(rows)} feeds>"


def _loop_clock() -> int:
    return int(anyio.current_time() * SECOND)


class _InMemory:
    """What `contextlib` would make of a function, at a fifth of its cost."""

    def __init__(self, feed: FeedKey | None) -> None:
        self._feed = feed

    async def __aenter__(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (sqlite3.Error, OverflowError, UnicodeError, orjson.JSONEncodeError)):
            url = None if self._feed is None else self._feed.url
            raise StoreError(f"keeping cursors in memory failed: {error}", feed=url) from error
