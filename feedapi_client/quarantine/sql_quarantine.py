"""The quarantine in the application's own SQL database. Needs the extra ``sql``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncEngine
except ImportError as error:
    raise ImportError(
        "SQLAlchemyQuarantineStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.sql_connection import (
    AnyConnection,
    awaited,
    connection_of,
    database_message,
)
from feedapi_client.stores.sql_tables import (
    TABLE_OPTIONS,
    check_noted_format,
    format_table,
    long_text,
    note_format,
    table_in,
)
from feedapi_client.stores.stored_format import QUARANTINE_FORMAT


def quarantine_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of quarantined events.

    `payload` is the event as sent; `quarantined_at` is in microseconds since 1970 UTC.
    """
    types: dict[str, Any] = {
        "id": sa.String(32),
        "feed_id": sa.CHAR(64),
        "partition_id": sa.Integer(),
        "event_index": sa.Integer(),
        "payload": sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"),
        "quarantined_at": sa.BigInteger(),
    }
    columns = [
        sa.Column(
            column, types.get(column, long_text()), primary_key=column == "id", nullable=False
        )
        for column in COLUMNS
    ]
    return sa.Table(name, metadata, *columns, schema=schema, **TABLE_OPTIONS)


class SQLAlchemyQuarantineStore:
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
        engine: AsyncEngine | sa.Engine,
        *,
        table: str = "feedapi_quarantine",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
    ) -> None:
        self.engine = engine
        self._engine = awaited(engine)
        metadata = sa.MetaData() if metadata is None else metadata
        schema = metadata.schema if schema is None else schema
        self.table = table_in(metadata, quarantine_table, table, schema)
        self.format_table = format_table(metadata, schema)
        self._foreign_errors = (SQLAlchemyError, OSError, engine.dialect.loaded_dbapi.Error)

    async def create_tables(self) -> None:
        """Create the table if it does not exist yet.

        Raises:
            StoreError
        """
        with self._translated():
            async with self._engine.begin() as connection:
                await connection.run_sync(self._create)

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        with self._translated():
            async with self._engine.connect() as connection:
                await connection.execute(sa.select(self.table.c.id).where(sa.false()))
                await connection.run_sync(self._check_format)

    def _create(self, connection: sa.Connection) -> None:
        tables = [self.table, self.format_table]
        self.table.metadata.create_all(connection, tables=tables)
        note_format(connection, self.format_table, self.table.name, QUARANTINE_FORMAT)

    def _check_format(self, connection: sa.Connection) -> None:
        check_noted_format(connection, self.format_table, self.table.name, QUARANTINE_FORMAT)

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: True if the cursors are in the same database."""
        engine = getattr(cursors, "engine", None)
        return isinstance(engine, (AsyncEngine, sa.Engine)) and (
            engine is self.engine or engine.url == self.engine.url
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AnyConnection]:
        """See `QuarantineStore.begin`."""
        with self._translated():
            async with self._engine.begin() as connection:
                yield connection

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        if events:
            async with self._within(transaction) as connection:
                await connection.execute(
                    sa.insert(self.table),
                    [dict(zip(COLUMNS, to_row(event), strict=True)) for event in events],
                )

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        columns = self.table.c
        query = self._all().where(columns.id > after).order_by(columns.id).limit(limit)
        if feed is not None:
            query = query.where(columns.feed_id == feed.id)
        if partition is not None:
            query = query.where(columns.partition_id == partition)
        return await self._select(query)

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        return next(iter(await self._select(self._all().where(self.table.c.id == id))), None)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """See `QuarantineStore.remove`."""
        removed = 0
        async with self._within(transaction) as connection:
            for id in sorted(set(ids)):
                delete = sa.delete(self.table).where(self.table.c.id == id)
                removed += (await connection.execute(delete)).rowcount
        return removed

    def _all(self) -> sa.Select[Any]:
        return sa.select(*(self.table.c[name] for name in COLUMNS))

    async def _select(self, query: sa.Select[Any]) -> list[QuarantinedEvent]:
        with self._translated():
            async with self._engine.connect() as connection:
                return [from_row(row) for row in await connection.execute(query)]

    @asynccontextmanager
    async def _within(self, transaction: Any) -> AsyncIterator[AnyConnection]:
        with self._translated():
            if transaction is None:
                context: Any = self._engine.begin()
            else:
                context = nullcontext(await connection_of(transaction, self.table))
            async with context as connection:
                yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._foreign_errors as error:
            # Without the cause, whose text holds the statement's parameters: payloads (R19).
            raise StoreError(
                f"the quarantine ({self.engine.dialect.name}) failed: {self._reason(error)}"
            ) from None

    def _reason(self, error: BaseException) -> str:
        text = database_message(self.engine, error)
        if self.table.name in text:
            return f"{text} (has SQLAlchemyQuarantineStore.create_tables() been called?)"
        return text

    def __repr__(self) -> str:
        return (
            f"<SQLAlchemyQuarantineStore {self.engine.dialect.name}, table {self.table.fullname!r}>"
        )
