"""The quarantine in a SQLite file, with the standard library only."""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from typing import Any, TypeVar

import anyio

from feedapi_client.quarantine.quarantine_store import QUARANTINE, ScriptedQuarantine
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.scripts import Script
from feedapi_client.stores.sqlite import SQLiteCursorStore
from feedapi_client.stores.sqlite_connection import (
    SQLiteFile,
    run_script,
    run_script_on_aiosqlite,
    transact,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT, note_format
from feedapi_client.stores.tables import create_missing

T = TypeVar("T")


class SQLiteQuarantineStore(ScriptedQuarantine):
    """Keeps events in the table ``feedapi_quarantine`` of a SQLite file.

    A `transaction` is a `sqlite3.Connection` or an `aiosqlite.Connection` to that file, as
    `SQLiteCursorStore` takes it. Runs on asyncio and trio.

    Arguments:
        path: the file, created on first use.
        busy_timeout: maximum time to wait for another writer, in seconds.
    """

    def __init__(
        self, path: str | os.PathLike[str] | SQLiteFile, *, busy_timeout: float = 30.0
    ) -> None:
        if not isinstance(path, SQLiteFile):
            path = SQLiteFile(os.fspath(path), busy_timeout, _create)
        self.path = path.path
        self._file = path
        self._is_prepared = False
        super().__init__("sqlite", QUARANTINE, f"in {self.path}")

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: creates the table."""
        with self._translated():
            await self._file.run(partial(transact, script=_create()))
        self._is_prepared = True

    async def aclose(self) -> None:
        """Close the file. A later use opens it again."""
        await self._file.aclose()

    async def _transact(self, script: Script[T]) -> T:
        if not self._is_prepared:
            await self.prepare()
        return await self._file.run(partial(transact, script=script))

    async def _read(self, script: Script[T]) -> T:
        if not self._is_prepared:
            await self.prepare()
        return await self._file.run(partial(run_script, script=script))

    async def _within(self, transaction: Any, script: Script[T]) -> T:
        if isinstance(transaction, sqlite3.Connection):
            return await in_callers_thread(partial(run_script, transaction, script))
        with anyio.CancelScope(shield=True):
            return await run_script_on_aiosqlite(transaction, script)
        raise AssertionError("the scope is never cancelled")

    def _is_beside(self, cursors: CursorStore) -> bool:
        return isinstance(cursors, SQLiteCursorStore) and (
            os.path.realpath(cursors.path) == os.path.realpath(self.path)
        )

    def _reason(self, error: Exception) -> str:
        return self._file.reason(error)


def _create() -> Script[None]:
    yield from create_missing(FORMAT_TABLE, QUARANTINE)
    yield from note_format(FORMAT_TABLE, QUARANTINE, QUARANTINE_FORMAT)
