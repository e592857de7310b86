"""Trials of `simulate`: a right application, so that only the library can be wrong."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from feedapi_client import Batch, SQLiteCursorStore
from feedapi_client.testing.simulator import SimulationError, simulate

Rows = list[tuple[int, int]]
Result = tuple[str, str] | None


def pairs(batch: Batch) -> Rows:
    """Entity and number of each event of a batch."""
    return [(payload["entity"], payload["n"]) for payload in (e.json() for e in batch.events)]


def sqlite_store(folder: Path) -> SQLiteCursorStore:
    """A store in a file of the history's directory."""
    return SQLiteCursorStore(folder / "app.db")


class Rowset:
    """What an application keeps in the file of its cursors."""

    def __init__(self, store: SQLiteCursorStore) -> None:
        self.path = store.path
        with closing(self.connect()) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS done (entity INTEGER, n INTEGER)")

    def connect(self) -> sqlite3.Connection:
        """Open the file."""
        return sqlite3.connect(self.path)

    def add(self, database: sqlite3.Connection, rows: Rows) -> None:
        """Add rows in the connection's transaction."""
        database.executemany("INSERT INTO done VALUES (?, ?)", rows)

    def rows(self) -> Rows:
        """All rows, in the order in which they were added."""
        with closing(self.connect()) as database:
            return list(database.execute("SELECT entity, n FROM done ORDER BY rowid"))


def applied(store: SQLiteCursorStore) -> Rows:
    """What took effect."""
    return Rowset(store).rows()


def transactional(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    """A handler with one transaction for its cursor, which it saves first, and its effects."""
    rows = Rowset(store)

    async def handle(batch: Batch) -> None:
        with closing(rows.connect()) as database, database:
            await batch.commit(transaction=database)
            rows.add(database, pairs(batch))

    return handle


async def do_nothing(batch: Batch) -> None:
    """A handler that leaves the commit to `FeedConsumer.run`."""


def in_sqlite(seed: int) -> Result:
    """Run a seed with cursors and effects in one SQLite file."""
    return _outcome(seed, transactional, sqlite_store, applied=applied)


def in_memory(seed: int) -> Result:
    """Run a seed with cursors in memory."""
    return _outcome(seed, do_nothing)


def _outcome(seed: int, *args: Any, **options: Any) -> Result:
    try:
        simulate(*args, first=seed, seeds=1, **options)
    except SimulationError as error:
        return error.rule, str(error).partition("\n")[0]
    return None
