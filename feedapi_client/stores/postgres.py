"""Cursors in PostgreSQL, through psycopg or asyncpg. Needs the extra ``psycopg`` or ``asyncpg``.

Here are transactions and errors; the statements are in `feedapi_client.stores.positions`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from feedapi_client.causes import store_problem
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    asyncio_operation,
    operation,
)
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.lease_stores import KeptConnection, KeptLeases
from feedapi_client.stores.leases import LeaseScripts
from feedapi_client.stores.positions import PositionScripts
from feedapi_client.stores.postgres_drivers import (
    Database,
    database_of,
    is_autocommit,
    is_of,
    run_on,
)
from feedapi_client.stores.scripted import Run
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.stored_format import (
    FORMAT_TABLE,
    STORE_FORMAT,
    check_noted,
    note_format,
)
from feedapi_client.stores.tables import create_table

if TYPE_CHECKING:
    from typing import TypeAlias

    import asyncpg  # type: ignore[import-untyped]
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    Pool: TypeAlias = AsyncConnectionPool[Any] | ConnectionPool[Any] | asyncpg.Pool | str

T = TypeVar("T")

_NAME = "the cursor database"
_CREATE_ATTEMPTS = 6
_LEASE_CONNECTIONS = 2
"""Those of the pool that are kept while an instance has joined."""


class PostgresCursorStore(KeptLeases):
    """Keeps positions in a table of the application's PostgreSQL database, without SQLAlchemy.

    The tables are those of `SQLAlchemyCursorStore`: one store can be exchanged for the other, and
    the command line reads them. It keeps leases, too (`LeaseStore`).

    Exactly once: pass the connection that writes the effects as ``transaction``: psycopg's
    `AsyncConnection` or `Connection`, or asyncpg's `Connection`, whichever driver the pool is of.
    The save is then part of the open transaction, which the caller commits or rolls back. psycopg
    opens one with the first statement, unless the connection is in autocommit mode; asyncpg needs
    ``async with connection.transaction()``. A save that is refused leaves nothing of itself in the
    transaction. READ COMMITTED, PostgreSQL's default isolation, is enough. At stricter levels the
    database may report a conflict between two consumers by itself: a `StoreError` whose cause is
    the driver's error.

    Threads: psycopg's `Connection` and `ConnectionPool` are used in worker threads, so that they
    don't hold up the event loop. While ``await store.save(transaction=connection)`` runs, the
    caller must not use that connection. With both the store runs on trio, too; everything else of
    it runs on asyncio only, as the drivers do.

    Cost: the usual save, of one position, is one statement, and three with a journal; a save of
    many is one for each 100, and one for each 490 that locks their rows.

    Arguments:
        pool: an `AsyncConnectionPool` or a `ConnectionPool` of psycopg, or a `Pool` of asyncpg:
            the caller's, open, which the store does not close. Or a DSN, for a pool of the store's
            own: of psycopg, or of asyncpg where psycopg_pool is not installed. ``async with
            store:`` closes that one.
        table, schema: name of the table; the others' are the same with ``_journal``, ``_done``,
            ``_instances`` and ``_leases``.
        journal: keep a history of positions.
        timeout: maximum time for one operation, in seconds, waiting for a connection included. A
            statement on the caller's synchronous connection is waited for all the same: end it by
            the server's ``statement_timeout``.

    Cancellation: a save that has begun is finished.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        table: str = "feedapi_cursors",
        schema: str | None = None,
        journal: Journal | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.database = database_of(pool)
        self._scripts = PositionScripts("postgresql", named(table, schema), journal)
        self._table = table
        self._formats = quoted(FORMAT_TABLE, schema)
        suffixes = ["", "_done", "_instances", "_leases", *(["_journal"] if journal else [])]
        self._tables = {f"feedapi_cursors{each}": quoted(table + each, schema) for each in suffixes}
        self._format_is_known = False
        connections = _LeaseConnections(self.database)
        super().__init__(
            LeaseScripts("postgresql", named(table, schema)),
            KeptConnection(connections),
            KeptConnection(connections),
        )
        self.pool = pool
        self.schema = schema
        self._timeout = timeout

    async def create_tables(self) -> None:
        """Create the tables that do not exist yet. Several processes may do so at once.

        Raises:
            StoreError
        """
        async with self._operation(None, shield=False):
            for attempt in range(1, _CREATE_ATTEMPTS + 1):
                try:
                    create = create_missing(self._tables, self._formats, self._table, STORE_FORMAT)
                    await self.database.transact(create)
                except Exception:
                    # Another process may have created a table between the look and the creation.
                    # The next look sees that one at least.
                    if attempt == _CREATE_ATTEMPTS:
                        raise
                else:
                    return

    def limit_lock_waits(self, feed: FeedKey, seconds: float) -> None:
        """See `LockingStore.limit_lock_waits`.

        The store's own transactions of that feed are ended by PostgreSQL after ten times as long,
        when this process is paused within one.
        """
        self._scripts.lock_waits[feed] = seconds

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        if self.database.size is not None and self.database.size <= _LEASE_CONNECTIONS:
            raise StoreError(
                f"the pool has at most {self.database.size} connections, and leases keep "
                f"{_LEASE_CONNECTIONS} of them: give it a larger max_size",
                feed=feed.url,
            )
        return await super().beat(feed, instance, seconds, options)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        if not self._format_is_known:
            async with self._operation(feed, shield=False):
                await self.database.transact(check_format(self._formats, self._table, STORE_FORMAT))
            self._format_is_known = True
        return await super().load(feed)

    async def aclose(self) -> None:
        """See `Closable.aclose`. Closes nothing of the caller's."""
        await self.database.aclose()

    # Transactions

    def _within(self, feed: FeedKey, transaction: Any) -> AbstractAsyncContextManager[None]:
        only = None if transaction is None else not is_of(transaction, "psycopg", "Connection")
        return self._operation(feed, asyncio_only=only)

    async def _runner(self, feed: FeedKey, transaction: Any) -> Run | None:
        if transaction is None:
            return None
        if await is_autocommit(transaction):
            raise StoreError(
                "no transaction is open on the connection, which is in autocommit mode: "
                "save within `async with connection.transaction()`",
                feed=feed.url,
            )
        return partial(run_on, transaction)

    async def _run_alone(self, script: Script[T]) -> T:
        return await self.database.transact(script)

    @asynccontextmanager
    async def _operation(
        self,
        feed: FeedKey | None,
        *,
        seconds: float | None = None,
        shield: bool = True,
        asyncio_only: bool | None = None,
    ) -> AsyncIterator[None]:
        """Bound the block in time, finish it although it is cancelled, and translate errors."""
        limit = self._timeout if seconds is None else min(self._timeout, seconds)
        only = self.database.asyncio_only if asyncio_only is None else asyncio_only
        bounded = (
            asyncio_operation("PostgresCursorStore", _NAME, feed, limit, shield=shield)
            if only
            else operation(_NAME, feed, limit, shield=shield)
        )
        try:
            async with bounded:
                yield
        except FeedError as error:
            error.feed = error.feed or (None if feed is None else feed.url)
            raise
        except Exception as error:
            # Any: drivers raise also ValueError, TypeError and RuntimeError of their own.
            raise StoreError(
                f"the cursor database (postgresql) failed: {self._reason(error)}",
                feed=None if feed is None else feed.url,
            ) from error

    def _reason(self, error: BaseException) -> str:
        text = server_message(error)
        if self._table in text:
            return f"{text} (has create_tables() been called?)"
        problem = store_problem(error)
        return text if problem is None else f"{problem} ({text})"

    def __repr__(self) -> str:
        return (
            f"<PostgresCursorStore {self.database.name}, table {quoted(self._table, self.schema)}>"
        )


class _LeaseConnections:
    """Connections of the pool. Statements bound their waits themselves."""

    def __init__(self, database: Database) -> None:
        self.acquire = database.acquire
        self.release = database.release

    async def run(
        self,
        connection: Any,
        script: Script[T],
        lock_seconds: float,  # noqa: ARG002
    ) -> T:
        """See `Connections.run`."""
        return await run_on(connection, script)


def create_missing(tables: Mapping[str, str], formats: str, name: str, newest: int) -> Script[None]:
    """Create the tables that are not there, and note their format if it is not noted.

    PostgreSQL asks a role for the right to create a table although it exists.

    Arguments:
        tables: their quoted names, by those of `feedapi_client.stores.tables`.
        formats: the quoted name of the table of formats.
        name, newest: of the table whose format is noted.
    """
    for table, here in {**tables, FORMAT_TABLE: formats}.items():
        if not (yield from _exists(here)):
            yield Query(create_table(table, "postgresql", unless=here))
    yield from note_format(formats, name, newest)


def check_format(formats: str, name: str, newest: int) -> Script[None]:
    """Check the noted format of a table. Without the table of formats it is the first one.

    Raises:
        StoreError: a newer version of this package wrote the table.
    """
    if (yield from _exists(formats)):
        yield from check_noted(formats, name, newest)


def quoted(table: str, schema: str | None) -> str:
    """Return a table's name as an identifier of SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, table) if part)


def named(table: str, schema: str | None) -> Callable[[str], str]:
    """Return what `PositionScripts` takes."""
    return lambda suffix: quoted(f"{table}{suffix}", schema)


def _exists(table: str) -> Script[bool]:
    rows = yield Query("SELECT to_regclass(CAST(? AS TEXT)) IS NOT NULL", (table,))
    return bool(rows[0][0])


def server_message(error: BaseException) -> str:
    """Return the first line of what the server said; of any other error only its name.

    The other lines may quote values, and a driver's own messages may quote the DSN.
    """
    if not getattr(error, "sqlstate", None):
        return type(error).__name__
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
