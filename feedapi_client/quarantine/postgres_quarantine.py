"""The quarantine in PostgreSQL, through psycopg or asyncpg, beside `PostgresCursorStore`."""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.postgres import (
    PostgresCursorStore,
    check_format,
    create_missing,
    quoted,
    server_message,
)
from feedapi_client.stores.postgres_drivers import database_of, run_on
from feedapi_client.stores.scripts import Query, Script, T
from feedapi_client.stores.stored_format import FORMAT_TABLE, QUARANTINE_FORMAT

_TYPES = {
    "id": "VARCHAR(32)",
    "feed_id": "CHAR(64)",
    "partition_id": "INTEGER",
    "event_index": "INTEGER",
    "payload": "BYTEA",
    "quarantined_at": "BIGINT",
}
"""Of the columns that hold no text."""


class PostgresQuarantineStore:
    """Keeps events in a table of the application's PostgreSQL database, without SQLAlchemy.

    The table is that of `SQLAlchemyQuarantineStore`. A `transaction` is a connection, as
    `PostgresCursorStore` takes it.

    Arguments:
        pool: as `PostgresCursorStore` takes it.
        table, schema: name of the table.
    """

    def __init__(
        self, pool: Any, *, table: str = "feedapi_quarantine", schema: str | None = None
    ) -> None:
        self._database = database_of(pool)
        self._name = table
        self._formats = quoted(FORMAT_TABLE, schema)
        self._table = name = quoted(table, schema)
        names = ", ".join(COLUMNS)
        arrays = [
            f"${number}::{_TYPES.get(column, 'TEXT')}[]" for number, column in enumerate(COLUMNS, 1)
        ]
        self._insert = f"INSERT INTO {name} ({names}) SELECT * FROM unnest({', '.join(arrays)})"
        self._select = f"SELECT {names} FROM {name}"
        self._page = (
            f"{self._select} WHERE id > $1::varchar "
            "AND ($2::char(64) IS NULL OR feed_id = $2::char(64)) "
            "AND ($3::integer IS NULL OR partition_id = $3::integer) ORDER BY id LIMIT $4::bigint"
        )
        self._get = f"{self._select} WHERE id = $1::varchar"
        self._remove = f"DELETE FROM {name} WHERE id = ANY($1::varchar[]) RETURNING id"

    async def create_tables(self) -> None:
        """Create the table if it does not exist yet.

        Raises:
            StoreError
        """
        tables = {"feedapi_quarantine": self._table}
        await self._run(create_missing(tables, self._formats, self._name, QUARANTINE_FORMAT))

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        await self._run(
            _rows(
                Query(f"{self._select} WHERE false"),
                check_format(self._formats, self._name, QUARANTINE_FORMAT),
            )
        )

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: True for a `PostgresCursorStore` of the same pool or DSN."""
        return isinstance(cursors, PostgresCursorStore) and cursors.pool == self._database.pool

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """See `QuarantineStore.begin`: gives the driver's connection."""
        with self._translated():
            async with self._database.begin() as connection:
                yield connection

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        if events:
            columns = [list(column) for column in zip(*map(to_row, events), strict=True)]
            await self._run(_rows(Query(self._insert, columns)), transaction)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        parameters = (after, None if feed is None else feed.id, partition, limit)
        return [from_row(row) for row in await self._run(_rows(Query(self._page, parameters)))]

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        rows = await self._run(_rows(Query(self._get, (id,))))
        return from_row(rows[0]) if rows else None

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """See `QuarantineStore.remove`."""
        return len(await self._run(_rows(Query(self._remove, (sorted(set(ids)),))), transaction))

    async def aclose(self) -> None:
        """Close the pool that was opened for a DSN. A later use opens another one."""
        await self._database.aclose()

    async def _run(self, script: Script[T], transaction: Any = None) -> T:
        with self._translated():
            if transaction is None:
                return await self._database.transact(script)
            return await run_on(transaction, script)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FeedError:
            raise
        except Exception as error:
            if not self._is_foreign(error):
                raise
            text = server_message(error)
            hint = " (has PostgresQuarantineStore.create_tables() been called?)"
            # Without the cause, whose text may hold a payload (R19).
            raise StoreError(
                f"the quarantine (postgresql) failed: {text}{hint if self._name in text else ''}"
            ) from None

    @staticmethod
    def _is_foreign(error: Exception) -> bool:
        """Return whether an error is the driver's, and not of a block within `begin`."""
        home = type(error).__module__.partition(".")[0]
        return isinstance(error, OSError) or home in ("psycopg", "psycopg_pool", "asyncpg")

    def __repr__(self) -> str:
        return f"<PostgresQuarantineStore {self._database.name}, table {self._table}>"


def _rows(query: Query, then: Script[None] | None = None) -> Script[list[Any]]:
    rows: list[Any] = yield query
    if then is not None:
        yield from then
    return rows
