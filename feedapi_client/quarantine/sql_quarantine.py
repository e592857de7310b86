"""The quarantine in the application's own SQL database. Needs the extra ``sql``."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as error:
    raise ImportError(
        "SQLAlchemyQuarantineStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.quarantine.quarantine_store import QUARANTINE, ScriptedQuarantine
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.scripts import Script
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.stores.sql_engines import (
    Engine,
    check_engine,
    check_format,
    create_missing,
    database_message,
    quoted_names,
    run_script,
    table_in,
    transact,
    within,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT

T = TypeVar("T")


class SQLAlchemyQuarantineStore(ScriptedQuarantine):
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
        table: str = QUARANTINE,
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
    ) -> None:
        check_engine(engine)
        self.engine = engine
        metadata = sa.MetaData() if metadata is None else metadata
        schema = metadata.schema if schema is None else schema
        self.table = table_in(metadata, QUARANTINE, table, schema)
        self.format_table = table_in(metadata, FORMAT_TABLE, FORMAT_TABLE, schema)
        self._foreign_errors = (SQLAlchemyError, OSError, engine.dialect.loaded_dbapi.Error)
        dialect = engine.dialect.name
        super().__init__(dialect, quoted_names(engine, table, schema)(""), f"({dialect})")

    async def create_tables(self) -> None:
        """Create the table if it does not exist yet.

        Raises:
            StoreError
        """
        create = partial(create_missing, tables=[self.table])
        with self._translated():
            await transact(
                self.engine, partial(create, formats=self.format_table, newest=QUARANTINE_FORMAT)
            )

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        await super().prepare()
        check = partial(check_format, table=self.table, formats=self.format_table)
        with self._translated():
            await transact(self.engine, partial(check, newest=QUARANTINE_FORMAT))

    async def _transact(self, script: Script[T]) -> T:
        return await transact(self.engine, partial(run_script, script=script))

    async def _within(self, transaction: Any, script: Script[T]) -> T:
        return await within(transaction, self.table, partial(run_script, script=script))

    def _is_beside(self, cursors: CursorStore) -> bool:
        return isinstance(cursors, SQLAlchemyCursorStore) and cursors.engine.url == self.engine.url

    def _reason(self, error: Exception) -> str:
        if not isinstance(error, self._foreign_errors):
            return type(error).__name__  # its text may quote a payload
        text = database_message(self.engine, error)
        if self.table.name in text:
            return f"{text} (has SQLAlchemyQuarantineStore.create_tables() been called?)"
        return text

    def __repr__(self) -> str:
        return (
            f"<SQLAlchemyQuarantineStore {self.engine.dialect.name}, table {self.table.fullname!r}>"
        )
