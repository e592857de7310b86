"""The quarantine in the application's own SQL database. Needs the extra ``sql``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as error:
    raise ImportError(
        "SQLAlchemyQuarantineStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.sql_engines import (
    AnyConnection,
    Engine,
    Work,
    begun,
    check_engine,
    check_format,
    create_missing,
    database_message,
    table_in,
    transact,
    within,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT

T = TypeVar("T")


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
        engine: Engine,
        *,
        table: str = "feedapi_quarantine",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
    ) -> None:
        check_engine(engine)
        self.engine = engine
        metadata = sa.MetaData() if metadata is None else metadata
        schema = metadata.schema if schema is None else schema
        self.table = table_in(metadata, "feedapi_quarantine", table, schema)
        self.format_table = table_in(metadata, FORMAT_TABLE, FORMAT_TABLE, schema)
        self._foreign_errors = (SQLAlchemyError, OSError, engine.dialect.loaded_dbapi.Error)

    async def create_tables(self) -> None:
        """Create the table if it does not exist yet.

        Raises:
            StoreError
        """
        tables = [self.table]
        await self._run(
            partial(
                create_missing, tables=tables, formats=self.format_table, newest=QUARANTINE_FORMAT
            )
        )

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        await self._run(lambda each: each.execute(sa.select(self.table.c.id).where(sa.false())))
        await self._run(
            partial(
                check_format,
                table=self.table,
                formats=self.format_table,
                newest=QUARANTINE_FORMAT,
            )
        )

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: True if the cursors are in the same database."""
        engine = getattr(cursors, "engine", None)
        return isinstance(engine, Engine) and engine.url == self.engine.url

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AnyConnection]:
        """See `QuarantineStore.begin`."""
        with self._translated():
            async with begun(self.engine) as connection:
                yield connection

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        rows: list[dict[str, Any]] = [
            dict(zip(COLUMNS, to_row(event), strict=True)) for event in events
        ]
        if rows:
            await self._run(lambda each: each.execute(sa.insert(self.table), rows), transaction)

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

        def remove(connection: sa.Connection) -> int:
            deletes = (
                sa.delete(self.table).where(self.table.c.id == id) for id in sorted(set(ids))
            )
            return sum(connection.execute(delete).rowcount for delete in deletes)

        return await self._run(remove, transaction)

    def _all(self) -> sa.Select[Any]:
        return sa.select(*(self.table.c[name] for name in COLUMNS))

    async def _select(self, query: sa.Select[Any]) -> list[QuarantinedEvent]:
        return await self._run(lambda each: [from_row(row) for row in each.execute(query)])

    async def _run(self, work: Work[T], transaction: Any = None) -> T:
        with self._translated():
            if transaction is None:
                return await transact(self.engine, work)
            return await within(transaction, self.table, work)

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
