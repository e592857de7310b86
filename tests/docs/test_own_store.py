"""Stores as the guide to a store of one's own teaches them pass the contract that it names."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from feedapi_client import CursorStore, FeedKey, FencedError, Position, StoreError
from feedapi_client.model import Status
from feedapi_client.testing import CursorStoreContract
from tests.docs.snippets import python_blocks

PROGRAM = python_blocks("docs/pages/guides/own-store.md")[0].partition("async def main")[0]


class SQLiteTransactions:
    """A transaction of the caller's own: put before the contract. The store has a `path`."""

    async def begin(self, store: Any) -> sqlite3.Connection:
        return sqlite3.connect(store.path)

    async def commit(self, transaction: sqlite3.Connection) -> None:
        transaction.commit()
        transaction.close()

    async def rollback(self, transaction: sqlite3.Connection) -> None:
        transaction.rollback()
        transaction.close()


class SqlCursorStore:
    """Cursors in a table. A transaction is a connection, of which the caller began one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with sqlite3.connect(path) as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS cursors (feed TEXT, partition INTEGER, cursor TEXT, "
                "status TEXT, revision INTEGER, PRIMARY KEY (feed, partition))"
            )
        connection.close()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        connection = sqlite3.connect(self.path)
        try:
            rows = connection.execute(
                "SELECT partition, cursor, status, revision FROM cursors WHERE feed = ?", (feed.id,)
            ).fetchall()
        finally:
            connection.close()
        return {id: Position(text, cast("Status", status), n) for id, text, status, n in rows}

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        if transaction is not None and not isinstance(transaction, sqlite3.Connection):
            raise StoreError("a transaction is a connection of sqlite3", feed=feed.url)
        connection = transaction or sqlite3.connect(self.path)
        try:
            for id, position in positions.items():
                self._save_one(connection, feed, id, position)
            if transaction is None:
                connection.commit()
        finally:
            if transaction is None:
                connection.close()

    def _save_one(
        self, connection: sqlite3.Connection, feed: FeedKey, id: int, position: Position
    ) -> None:
        text, status, revision = position.cursor, position.status, position.revision
        if position.replaces is None:
            sql = "INSERT INTO cursors VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            values: tuple[object, ...] = (feed.id, id, text, status, revision)
        else:
            sql = (
                "UPDATE cursors SET cursor = ?, status = ?, revision = ? "
                "WHERE feed = ? AND partition = ? AND revision = ?"
            )
            values = (text, status, revision, feed.id, id, position.replaces)
        try:
            changed = connection.execute(sql, values).rowcount
        except (sqlite3.Error, UnicodeError) as error:
            raise StoreError(f"{type(error).__name__}", feed=feed.url, partition=id) from error
        if changed != 1:
            raise FencedError("another consumer moved on", feed=feed.url, partition=id)


class TestTheStoreOfTheGuide(CursorStoreContract):
    supports_transactions = False
    supports_second_handle = False
    supports_failure_injection = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> CursorStore:
        names: dict[str, Any] = {}
        exec(PROGRAM, names)
        return cast("CursorStore", names["JsonCursorStore"](tmp_path / "cursors.json"))


class TestAStoreOnADatabase(SQLiteTransactions, CursorStoreContract):
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> CursorStore:
        return SqlCursorStore(tmp_path / "cursors.db")

    def second_handle(self, store: Any) -> AbstractAsyncContextManager[CursorStore]:
        return nullcontext(SqlCursorStore(store.path))
