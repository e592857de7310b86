"""SQLite connections: opening the file, and running scripts in transactions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from feedapi_client.stores.sqlite_statements import Change, Query, Script

BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Error codes of a file that another connection holds."""
_OPEN_PAUSE = 0.02

T = TypeVar("T")


def open_connection(
    path: str, busy_timeout: float, create_tables: Callable[[], Script[None]]
) -> sqlite3.Connection:
    """Open the file in WAL mode, for use by one thread at a time, and create the tables.

    Another process that does the same at the same time is waited for, up to `busy_timeout`
    seconds.
    """
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
    try:
        step = next(script)
        while True:
            try:
                rows = _execute(connection, step)
            except Exception as error:  # noqa: BLE001 - the script cleans up and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def _execute(connection: sqlite3.Connection, step: Query | Change) -> list[Any]:
    execute = connection.execute if isinstance(step, Query) else connection.executemany
    cursor: sqlite3.Cursor = execute(*step)
    try:
        return cursor.fetchall()
    finally:
        cursor.close()


async def run_script_on_aiosqlite(connection: Any, script: Script[T]) -> T:
    """Run a script on an `aiosqlite.Connection`, and return its result."""
    try:
        step = next(script)
        while True:
            try:
                rows = await _execute_on_aiosqlite(connection, step)
            except Exception as error:  # noqa: BLE001 - the script cleans up and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


async def _execute_on_aiosqlite(connection: Any, step: Query | Change) -> list[Any]:
    if isinstance(step, Query):
        cursor = await connection.execute(*step)
    else:
        cursor = await connection.executemany(*step)
    rows = list(await cursor.fetchall())
    await cursor.close()
    return rows
