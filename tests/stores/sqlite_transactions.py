"""A transaction of the caller's own, for the contracts of stores in an SQLite file."""

from __future__ import annotations

import sqlite3
from typing import Any


class SQLiteTransactions:
    """Put before the contract. The store has a `path`."""

    async def begin(self, store: Any) -> sqlite3.Connection:
        return sqlite3.connect(store.path)

    async def commit(self, transaction: sqlite3.Connection) -> None:
        transaction.commit()
        transaction.close()

    async def rollback(self, transaction: sqlite3.Connection) -> None:
        transaction.rollback()
        transaction.close()
