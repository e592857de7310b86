"""Cursors in a SQLite file, or in memory, with the standard library only."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from feedapi_client.arguments import OneProcess
from feedapi_client.causes import store_problem
from feedapi_client.errors import StoreError
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.leases import SECOND, LeaseScripts
from feedapi_client.stores.scripted import (
    Database,
    JournalledScripts,
    ScriptedLeases,
    ScriptedStore,
)
from feedapi_client.stores.scripts import Query, Script, run_on_cursors
from feedapi_client.stores.tables import CURSORS, TABLES, create_missing, create_table
from feedapi_client.stores.threads import in_callers_thread

T = TypeVar("T")

_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_OPEN_PAUSE = 0.02
_LEASES = {name: name for name in (f"{CURSORS}_instances", f"{CURSORS}_leases")}


class SQLiteCursorStore(ScriptedLeases, JournalledScripts):
    """Keeps positions in a SQLite file.

    Runs on asyncio and trio. Several processes may share the file. It keeps leases, too
    (`LeaseStore`).

    Exactly once: let the application keep its effects in the same file and pass its own connection
    as ``transaction``: a `sqlite3.Connection`. The save then happens on that connection, in the
    calling thread, and the caller commits it or rolls it back. It is part of the open transaction;
    without one it opens one, if the connection is in the mode to do so. Don't hold a write
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
        super().__init__(SQLiteDatabase(self.path, busy_timeout), journal=journal)
        self._lease_scripts = LeaseScripts("sqlite", self._named)
        # On a connection of its own, so that no save delays a renewal.
        leases = self._beating = self._leasing = SQLiteDatabase(self.path, busy_timeout)
        leases.need(_LEASES)

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        await self.database.aclose()
        await self._leasing.aclose()

    def __repr__(self) -> str:
        return f"<SQLiteCursorStore {self.path!r}>"


class MemoryCursorStore(ScriptedLeases, ScriptedStore):
    """Keeps positions for as long as the object lives.

    It takes part in no transaction. It keeps leases, too (`LeaseStore`), for several consumers in
    one process. It must not be used from several threads.
    """

    def __init__(self) -> None:
        super().__init__(database := MemoryDatabase())
        self.database: MemoryDatabase = database
        # By the clock of the event loop, which may be a virtual one.
        self._lease_scripts = LeaseScripts("sqlite", self._named, _loop_clock)
        self._beating = self._leasing = self.database

    def __repr__(self) -> str:
        return "<MemoryCursorStore>"


class SQLiteDatabase(Database):
    """One connection, used by one worker thread at a time. A call that has begun is finished."""

    dialect = "sqlite"

    def __init__(self, path: str, busy_timeout: float) -> None:
        self.name = f"in {path}"
        self._path = path
        self._busy_timeout = busy_timeout
        self._needed: dict[str, str] = {}
        self._made: set[str] = set()
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[[], SQLiteDatabase] | None = None
        self._opened: tuple[OneProcess, str, object] | None = None
        self._lock = threading.Lock()
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar("feedapi_sqlite_limiter")

    @property
    def place(self) -> object:
        return os.path.realpath(self._path)

    def need(self, tables: Mapping[str, str]) -> None:
        self._needed.update(tables)

    async def transact(self, script: Script[T]) -> T:
        return await self._run(partial(_transact, script=script))

    async def read(self, script: Script[T]) -> T:
        return await self._run(lambda connection: run_on_cursors(script, connection.cursor))

    async def within(self, transaction: Any, script: Script[T]) -> T:
        if not isinstance(transaction, sqlite3.Connection):
            raise StoreError(
                f"transaction must be a sqlite3.Connection, not a {type(transaction).__name__}"
            )

        def cursor() -> sqlite3.Cursor:
            opened = transaction.cursor()
            opened.row_factory = None  # whatever the caller's connection has
            return opened

        joined = self._joined(script, transaction)
        return await in_callers_thread(partial(run_on_cursors, joined, cursor))

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def reason(self, error: Exception) -> str:
        hint = ""
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            hint = (
                ". Commit in the thread that made the connection, "
                "or make it with check_same_thread=False"
            )
        elif getattr(error, "sqlite_errorcode", None) in _BUSY_CODES:
            hint = ". Another writer holds the file: keep write transactions short"
        elif not (folder := Path(self._path).absolute().parent).is_dir():
            hint = f": there is no folder {folder}"
        # Of any other error only the name: its text may quote a cursor.
        text = str(error) if isinstance(error, sqlite3.Error) else type(error).__name__
        if isinstance(error, OSError) and (problem := store_problem(error)) is not None:
            text += f": {problem}"
        return f"{text}{hint}"

    def _joined(self, script: Script[T], connection: Any) -> Script[T]:
        databases = yield Query("PRAGMA database_list")
        file = os.fsdecode(next(row[2] for row in databases if row[0] == 0))  # whatever text is
        if not file or os.path.realpath(file) != self.place:
            raise StoreError(
                f"the transaction is on the database {file or 'in memory'}, "
                f"but the store is in {self._path}: use one file for both"
            )
        if not connection.in_transaction:
            if (
                connection.isolation_level is None
                or getattr(connection, "autocommit", False) is True
            ):
                raise StoreError(
                    "no transaction is open on the connection, which is in autocommit mode: "
                    "BEGIN one first"
                )
            # A transaction that has read fails at once when it writes beside another
            # writer; this one waits for it.
            yield Query("BEGIN IMMEDIATE")
        yield from self._create_missing()
        return (yield from script)

    def _create_missing(self) -> Script[None]:
        missing = {table: name for table, name in self._needed.items() if table not in self._made}
        if missing:
            yield from create_missing(missing, "sqlite", self.quoted)

    async def _run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            limiter = self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(1)
            self._limiter.set(limiter)
        return await anyio.to_thread.run_sync(self._locked, function, limiter=limiter)

    def _locked(self, function: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            if self._connection is None:
                self._connection = self._open()
            elif self._opened is not None:
                process, path, file = self._opened
                process.check(f"the cursor database {self._path}", error=StoreError)
                if file != _identity(path):
                    raise StoreError(
                        f"the cursor database {self._path} was replaced or deleted while it "
                        "was in use: nothing is saved to the file that is gone. Start again"
                    )
            if self._needed.keys() != self._made:
                _transact(self._connection, self._create_missing())
                self._made = set(self._needed)
            return function(self._connection)

    def _open(self) -> sqlite3.Connection:
        """Open the file in WAL mode. Another process that does the same is waited for."""
        create_privately(self._path)
        connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        deadline = time.monotonic() + self._busy_timeout
        try:
            while not _switch_to_wal(connection, last_try=time.monotonic() >= deadline):
                time.sleep(_OPEN_PAUSE)
        except BaseException:
            connection.close()
            raise
        # A store that is never closed must not end with a ResourceWarning.
        self._finalizer = weakref.finalize(self, connection.close)
        path = os.path.abspath(self._path)
        self._opened = OneProcess(), path, _identity(path)
        return connection

    def _close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = self._finalizer = None
            self._made = set()


class MemoryDatabase(Database):
    dialect = "sqlite"
    name = "in memory"

    def __init__(self) -> None:
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        # A store that is never closed must not end with a ResourceWarning.
        weakref.finalize(self, self._connection.close)
        for table in TABLES:
            self._connection.execute(create_table(table, "sqlite"))

    async def transact(self, script: Script[T]) -> T:
        return _transact(self._connection, script)

    async def read(self, script: Script[T]) -> T:
        return run_on_cursors(script, self._connection.cursor)

    async def within(self, transaction: Any, script: Script[T]) -> T:  # noqa: ARG002
        raise StoreError(
            "MemoryCursorStore can't take part in a transaction: "
            "use a store in the database that the effects go to"
        )

    def reason(self, error: Exception) -> str:
        return str(error) if isinstance(error, sqlite3.Error) else type(error).__name__


def _transact(connection: sqlite3.Connection, script: Script[T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = run_on_cursors(script, connection.cursor)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return result


def _switch_to_wal(connection: sqlite3.Connection, *, last_try: bool) -> bool:
    """Return False if another process is preparing the file, so that it is busy."""
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        if last_try or error.sqlite_errorcode not in _BUSY_CODES:
            raise
        return False
    return True


def _identity(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def create_privately(path: str) -> None:
    """Quarantined payloads may be in it. SQLite gives -wal and -shm the same rights."""
    if path in ("", ":memory:"):
        return
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _loop_clock() -> int:
    return int(anyio.current_time() * SECOND)
