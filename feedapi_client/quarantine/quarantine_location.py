"""Which quarantine belongs to a cursor store, to a file or to a database URL."""

from __future__ import annotations

import weakref
from contextlib import AbstractAsyncContextManager
from typing import Any

from feedapi_client.errors import StoreError
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore, QuarantineStore
from feedapi_client.quarantine.sqlite_quarantine import SQLiteQuarantineStore
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.sqlite import MemoryCursorStore, SQLiteCursorStore

_in_memory: weakref.WeakKeyDictionary[CursorStore, MemoryQuarantineStore] = (
    weakref.WeakKeyDictionary()
)


def quarantine_beside(cursors: CursorStore) -> QuarantineStore:
    """Return the quarantine in the file, database or memory that holds the cursors.

    One `MemoryCursorStore` always has the same quarantine. A store that has a method
    ``quarantine()`` says by itself.

    Raises:
        StoreError: this kind of cursor store has no quarantine.
    """
    if isinstance(cursors, MemoryCursorStore):
        return _in_memory.setdefault(cursors, MemoryQuarantineStore())
    if isinstance(cursors, SQLiteCursorStore):
        return SQLiteQuarantineStore(cursors.file)
    if hasattr(cursors, "pool"):
        from feedapi_client.quarantine.postgres_quarantine import PostgresQuarantineStore
        from feedapi_client.stores.postgres import PostgresCursorStore

        if isinstance(cursors, PostgresCursorStore):
            # The same pool also for a DSN: closing the cursors closes it.
            return PostgresQuarantineStore(cursors.database, schema=cursors.schema)
    if hasattr(cursors, "engine"):
        # Needs the extra `sql`, which is imported only where the application uses it already.
        from feedapi_client.quarantine.sql_quarantine import SQLAlchemyQuarantineStore
        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        if isinstance(cursors, SQLAlchemyCursorStore):
            return SQLAlchemyQuarantineStore(cursors.engine, schema=cursors.table.schema)
    beside: Any = getattr(cursors, "quarantine", None)
    if beside is not None:
        quarantine: QuarantineStore = beside()
        return quarantine
    raise StoreError(
        f"{type(cursors).__name__} has no quarantine: say where quarantined events go, "
        "on_failure=Quarantine(to=...)"
    )


def open_quarantine(where: str) -> AbstractAsyncContextManager[QuarantineStore]:
    """Open the quarantine in a SQLite file or in the database of a SQLAlchemy URL, for a block.

    A URL such as ``postgresql+psycopg://...`` needs the extra ``sql``.

    Raises:
        ValueError: this names no database.
        StoreError: there is no quarantine, or it can't be opened.
    """
    from feedapi_client.operations import opening

    return opening.open_quarantine(where)
