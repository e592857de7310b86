"""SQLite connections: opening the file, and running scripts in transactions."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
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
from feedapi_client.model import FeedKey
from feedapi_client.stores.scripts import (
    CountedChange,
    Script,
    Step,
    run_steps,
    run_steps_async,
)

BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Error codes of a file that another connection holds."""
_OPEN_PAUSE = 0.02

T = TypeVar("T")


class SQLiteFile:
    """A file with one connection, used by one worker thread at a time.

    Arguments:
        path: the file.
        busy_timeout: maximum time to wait for another writer, in seconds.
        create_tables: makes the script that the first use of a connection runs.
    """

    def __init__(
        self, path: str, busy_timeout: float, create_tables: Callable[[], Script[None]]
    ) -> None:
        self.path = path
        self._busy_timeout = busy_timeout
        self._create_tables = create_tables
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[[], SQLiteFile] | None = None
        self._opened: tuple[OneProcess, str, object] | None = None
        self._lock = threading.Lock()
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar("feedapi_sqlite_limiter")

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, and so the tables."""
        return self._connection is not None

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call the function in a worker thread. What it raises is translated by `failure`.

        A cancelled task leaves the queue, but a call that has begun is finished.
        """
        return await anyio.to_thread.run_sync(self._locked, function, limiter=self._queue())

    async def aclose(self) -> None:
        """Close the connection. The next use opens another one."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def failure(self, feed: FeedKey | None, error: Exception) -> StoreError:
        """Return the error of a statement that failed."""
        return StoreError(
            f"the cursor database {self.path} failed: {self.reason(error)}",
            feed=feed.url if feed else None,
        )

    def reason(self, error: Exception) -> str:
        """Return why a statement failed, and what helps."""
        hint = ""
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            hint = (
                ". Commit in the thread that made the connection, "
                "or make it with check_same_thread=False"
            )
        elif getattr(error, "sqlite_errorcode", None) in BUSY_CODES:
            hint = ". Another writer holds the file: keep write transactions short"
        elif not (folder := Path(self.path).absolute().parent).is_dir():
            hint = f": there is no folder {folder}"
        # Of any other error only the name: its text may quote a cursor.
        text = str(error) if isinstance(error, sqlite3.Error) else type(error).__name__
        if isinstance(error, OSError) and (problem := store_problem(error)) is not None:
            text += f": {problem}"
        return f"{text}{hint}"

    def _queue(self) -> anyio.CapacityLimiter:
        try:
            return self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(1)
            self._limiter.set(limiter)
            return limiter

    def _locked(self, function: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            if self._opened is not None and self._connection is not None:
                process, path, file = self._opened
                process.check(f"the cursor database {self.path}", error=self._refused)
                if file != _identity(path):
                    raise self._refused(
                        f"the cursor database {self.path} was replaced or deleted while it "
                        "was in use: nothing is saved to the file that is gone. Start again"
                    )
            if self._connection is None:
                self._connection = open_connection(
                    self.path, self._busy_timeout, self._create_tables
                )
                path = os.path.abspath(self.path)
                self._opened = OneProcess(), path, _identity(path)
                # A store that is never closed must not end with a ResourceWarning.
                self._finalizer = weakref.finalize(self, self._connection.close)
            return function(self._connection)

    @staticmethod
    def _refused(text: str) -> StoreError:
        return StoreError(text)

    def _close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = self._finalizer = None


def _identity(path: str) -> object:
    """What tells a file from another one of its name; None without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def create_privately(path: str) -> None:
    """Create the file for its owner alone, unless it is there: quarantined payloads may be in it.

    SQLite gives the files beside it (-wal, -shm) the same rights. What can't be created is left to
    SQLite, which says why.
    """
    if path in ("", ":memory:"):
        return
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def open_connection(
    path: str, busy_timeout: float, create_tables: Callable[[], Script[None]]
) -> sqlite3.Connection:
    """Open the file in WAL mode, for use by one thread at a time, and create the tables.

    Another process that does the same at the same time is waited for, up to `busy_timeout`
    seconds.
    """
    create_privately(path)
    connection = sqlite3.connect(
        path, timeout=busy_timeout, isolation_level=None, check_same_thread=False
    )
    try:
        deadline = time.monotonic() + busy_timeout
        while not _prepare(connection, create_tables(), last_try=time.monotonic() >= deadline):
            time.sleep(_OPEN_PAUSE)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, script: Script[None], *, last_try: bool) -> bool:
    """Return False if another process is preparing the file, so that it is busy."""
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        transact(connection, script)
    except sqlite3.OperationalError as error:
        if last_try or error.sqlite_errorcode not in BUSY_CODES:
            raise
        return False
    return True


def transact(connection: sqlite3.Connection, script: Script[T]) -> T:
    """Run a script in a transaction of its own, and return its result."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = run_script(connection, script)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return result


def run_script(connection: sqlite3.Connection, script: Script[T]) -> T:
    """Run a script on a connection, and return its result."""
    # Rows are tuples of `str`, whatever factories the caller's connection has.
    cursor, text_factory = connection.cursor(), connection.text_factory
    cursor.row_factory, connection.text_factory = None, str

    def execute(step: Step) -> Any:
        cursor.execute(*step)
        return cursor.rowcount if isinstance(step, CountedChange) else cursor.fetchall()

    try:
        return run_steps(script, execute)
    finally:
        connection.text_factory = text_factory
        cursor.close()


async def run_script_on_aiosqlite(connection: Any, script: Script[T]) -> T:
    """Run a script on an `aiosqlite.Connection`, and return its result."""
    return await run_steps_async(script, partial(_execute_on_aiosqlite, connection))


async def _execute_on_aiosqlite(connection: Any, step: Step) -> Any:
    cursor, text_factory = await connection.cursor(), connection.text_factory
    cursor.row_factory, connection.text_factory = None, str
    try:
        await cursor.execute(*step)
        return cursor.rowcount if isinstance(step, CountedChange) else list(await cursor.fetchall())
    finally:
        connection.text_factory = text_factory
        await cursor.close()
