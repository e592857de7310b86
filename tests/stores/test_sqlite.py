"""SQLiteCursorStore passes the contract, and keeps cursors in the caller's own transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from feedapi_client.stores.sqlite import SQLiteCursorStore
from feedapi_client.testing.store_contract import AdministrableStoreContract

pytestmark = pytest.mark.anyio


class TestSQLiteCursorStore(AdministrableStoreContract):
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = True

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SQLiteCursorStore]:
        async with SQLiteCursorStore(tmp_path / "cursors.db") as store:
            yield store

    @asynccontextmanager
    async def second_handle(self, store: SQLiteCursorStore) -> AsyncIterator[SQLiteCursorStore]:
        async with SQLiteCursorStore(store.path) as second:
            yield second

    async def begin(self, store: SQLiteCursorStore) -> sqlite3.Connection:
        return sqlite3.connect(store.path)

    async def commit(self, transaction: sqlite3.Connection) -> None:
        transaction.commit()
        transaction.close()

    async def rollback(self, transaction: sqlite3.Connection) -> None:
        transaction.rollback()
        transaction.close()

    @asynccontextmanager
    async def failing(self, store: SQLiteCursorStore) -> AsyncIterator[None]:
        await store.feeds()
        with sqlite3.connect(store.path) as connection:
            for event in ("INSERT", "UPDATE"):
                connection.execute(
                    f"CREATE TRIGGER fail_{event} BEFORE {event} ON feedapi_cursors WHEN NEW.partition_id = 5 BEGIN SELECT RAISE(FAIL, 'disk on fire'); END"
                )
        connection.close()
        yield
        with sqlite3.connect(store.path) as connection:
            connection.executescript("DROP TRIGGER fail_INSERT; DROP TRIGGER fail_UPDATE")
        connection.close()
