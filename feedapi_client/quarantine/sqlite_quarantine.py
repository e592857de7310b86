"""The quarantine in a SQLite file, with the standard library only."""

from __future__ import annotations

import os

from feedapi_client.quarantine.quarantine_store import ScriptedQuarantine
from feedapi_client.stores.sqlite import SQLiteDatabase


class SQLiteQuarantineStore(ScriptedQuarantine):
    """Keeps events in the table ``feedapi_quarantine`` of a SQLite file.

    A `transaction` is a `sqlite3.Connection` or an `aiosqlite.Connection` to that file, as
    `SQLiteCursorStore` takes it. Runs on asyncio and trio.

    Arguments:
        path: the file, created on first use.
        busy_timeout: maximum time to wait for another writer, in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 30.0) -> None:
        self.path = os.fspath(path)
        super().__init__(SQLiteDatabase(self.path, busy_timeout))
