"""The quarantine in the application's own SQL database. Needs the extra ``sql``."""

from __future__ import annotations

import sqlalchemy as sa

from feedapi_client.quarantine.quarantine_store import OperatedQuarantine
from feedapi_client.stores.sql import Engine, SQLDatabase
from feedapi_client.stores.tables import QUARANTINE


class SQLAlchemyQuarantineStore(OperatedQuarantine):
    """Keeps events in a table of the application's database.

    The table is created by `create_tables`, or by the application's own migrations: with
    `metadata` it is part of it, as `table`. A `transaction` is a connection or a session, as
    `SQLAlchemyCursorStore` takes it. Runs on asyncio only.

    Arguments:
        engine: the caller's engine, which the store does not dispose of.
        table, schema: name of the table. Without a `schema` that of the `metadata` counts.
        metadata: the metadata to put the table into, and `format_table`; by default one of the
            store's own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        table: str = "feedapi_quarantine",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
    ) -> None:
        metadata = sa.MetaData() if metadata is None else metadata
        database = SQLDatabase(engine, metadata, schema, QUARANTINE, table)
        super().__init__(database, table)
        self.engine = engine
        self.table = database.table
        self.format_table = database.format_table
