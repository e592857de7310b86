"""The quarantine in PostgreSQL, through psycopg or asyncpg, beside `PostgresCursorStore`."""

from __future__ import annotations

from typing import Any

from feedapi_client.quarantine.quarantine_store import OperatedQuarantine
from feedapi_client.stores.postgres import PostgresDatabase


class PostgresQuarantineStore(OperatedQuarantine):
    """Keeps events in a table of the application's PostgreSQL database, without SQLAlchemy.

    The table is that of `SQLAlchemyQuarantineStore`. A `transaction` is a connection, as
    `PostgresCursorStore` takes it. What it opens for a DSN `aclose` closes.

    Arguments:
        pool: as `PostgresCursorStore` takes it, or its `database`, of the same schema.
        table, schema: name of the table.
    """

    def __init__(
        self,
        pool: Any,
        *,
        table: str = "feedapi_quarantine",
        schema: str | None = None,
    ) -> None:
        own = not isinstance(pool, PostgresDatabase)
        super().__init__(PostgresDatabase(pool, schema) if own else pool, table)
