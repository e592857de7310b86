"""The quarantine in PostgreSQL, through psycopg or asyncpg, beside `PostgresCursorStore`."""

from __future__ import annotations

from typing import Any, TypeVar

from feedapi_client.quarantine.quarantine_store import QUARANTINE, ScriptedQuarantine
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.postgres import (
    PostgresCursorStore,
    check_format,
    create_missing,
    quoted,
    server_message,
)
from feedapi_client.stores.postgres_drivers import database_of, run_on
from feedapi_client.stores.scripts import Script
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT

T = TypeVar("T")


class PostgresQuarantineStore(ScriptedQuarantine):
    """Keeps events in a table of the application's PostgreSQL database, without SQLAlchemy.

    The table is that of `SQLAlchemyQuarantineStore`. A `transaction` is a connection, as
    `PostgresCursorStore` takes it.

    Arguments:
        pool: as `PostgresCursorStore` takes it.
        table, schema: name of the table.
    """

    def __init__(self, pool: Any, *, table: str = QUARANTINE, schema: str | None = None) -> None:
        self._database = database_of(pool)
        self._name = table
        self._table = quoted(table, schema)
        self._formats = quoted(FORMAT_TABLE, schema)
        super().__init__("postgresql", self._table, "(postgresql)")

    async def create_tables(self) -> None:
        """Create the table if it does not exist yet.

        Raises:
            StoreError
        """
        tables = {QUARANTINE: self._table}
        with self._translated():
            await self._transact(
                create_missing(tables, self._formats, self._name, QUARANTINE_FORMAT)
            )

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        await super().prepare()
        with self._translated():
            await self._transact(check_format(self._formats, self._name, QUARANTINE_FORMAT))

    async def aclose(self) -> None:
        """Close the pool that was opened for a DSN. A later use opens another one."""
        await self._database.aclose()

    async def _transact(self, script: Script[T]) -> T:
        return await self._database.transact(script)

    async def _within(self, transaction: Any, script: Script[T]) -> T:
        return await run_on(transaction, script)

    def _is_beside(self, cursors: CursorStore) -> bool:
        return isinstance(cursors, PostgresCursorStore) and cursors.pool == self._database.pool

    def _reason(self, error: Exception) -> str:
        text = server_message(error)
        hint = " (has PostgresQuarantineStore.create_tables() been called?)"
        return f"{text}{hint if self._name in text else ''}"

    def __repr__(self) -> str:
        return f"<PostgresQuarantineStore {self._database.name}, table {self._table}>"
