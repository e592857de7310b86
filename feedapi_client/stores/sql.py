"""Cursors in the application's own SQL database, through SQLAlchemy. Needs the extra ``sql``.

Here are transactions; the statements are in `feedapi_client.stores.positions`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncEngine
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.causes import store_problem
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import asyncio_operation
from feedapi_client.stores.done import DoneEvent
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.lease_stores import KeptConnection, KeptLeases
from feedapi_client.stores.leases import LeaseScripts
from feedapi_client.stores.positions import PositionScripts
from feedapi_client.stores.scripted import Run
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.sql_dialects import CLOCKS
from feedapi_client.stores.sql_engines import (
    LeaseConnections,
    check_engine,
    check_format,
    create_missing,
    database_message,
    is_autocommit,
    quoted_names,
    run_script,
    synchronous,
    table_in,
    transact,
    within,
)
from feedapi_client.stores.stored_format import FORMAT_TABLE, STORE_FORMAT

T = TypeVar("T")


class SQLAlchemyCursorStore(KeptLeases):
    """Keeps positions in a table of the application's database.

    Databases: PostgreSQL, MySQL and MariaDB, SQLite, each with an asynchronous driver
    or a synchronous one.

    The tables are created by `create_tables`, or by the application's own migrations: with
    `metadata` they are part of it, and `table`, `journal_table` (None without a `journal`),
    `done_table`, `instance_table`, `lease_table` and `format_table` are the Table objects.

    Exactly once: pass what writes the effects as ``transaction``: an `AsyncConnection`, an
    `AsyncSession`, a `Connection` or a `Session`. The save is then part of its transaction, which
    the caller commits or rolls back; a session is not flushed. Of a session with several engines
    (``binds=``, ``get_bind``) it is the one to which an UPDATE of `table` goes. A save that is
    refused or fails leaves nothing of itself in the transaction. READ COMMITTED, the default
    isolation of PostgreSQL, is enough. At stricter levels the database may report a conflict
    between two consumers by itself: a `StoreError` whose cause is the database's error.

    Cost: the usual save, of one position, is one statement, and three with a journal; a save of
    many is one for each 100, and one for each 490 that locks their rows.

    Threads: the statements on a synchronous engine, `Connection` or `Session` run in worker
    threads, so that they don't hold up the event loop. While ``await
    store.save(transaction=session)`` runs, the caller must not use that session. A
    `scoped_session` belongs to a thread: call it, and pass the session that it returns.

    Runs on asyncio only, as SQLAlchemy's async engines do: on trio every operation raises
    `StoreError` (use `SQLiteCursorStore` there).

    Arguments:
        engine: the caller's `AsyncEngine` or `Engine`, which the store does not dispose of. It
            must not be in autocommit mode. Make it with ``pool_pre_ping=True``: a pool's
            connections may be dead after a quiet night.
        table, schema: name of the table; the others' are the same with ``_journal``, ``_done``,
            ``_instances`` and ``_leases``. Without a `schema` that of the `metadata` counts.
        metadata: the metadata to put the tables into; by default one of the store's own.
        journal: keep a history of positions.
        timeout: maximum time for one operation, in seconds, waiting for a connection included. A
            statement on the caller's synchronous connection is waited for all the same.

    Cancellation: a save or load that has begun is finished.
    """

    def __init__(
        self,
        engine: AsyncEngine | sa.Engine,
        *,
        table: str = "feedapi_cursors",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
        journal: Journal | None = None,
        timeout: float = 30.0,
    ) -> None:
        check_engine(engine)
        if synchronous(engine).get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise ValueError(
                "SQLAlchemyCursorStore needs an engine with transactions, "
                "and this one has the isolation level AUTOCOMMIT"
            )
        self.engine = engine
        dialect = engine.dialect.name
        if dialect not in CLOCKS:
            raise ValueError(f"SQLAlchemyCursorStore works with {', '.join(CLOCKS)}, not {dialect}")
        metadata = sa.MetaData() if metadata is None else metadata
        schema = metadata.schema if schema is None else schema

        def table_of(suffix: str) -> sa.Table:
            return table_in(metadata, f"feedapi_cursors{suffix}", f"{table}{suffix}", schema)

        self.table = table_of("")
        self.journal_table = table_of("_journal") if journal else None
        self.format_table = table_in(metadata, FORMAT_TABLE, FORMAT_TABLE, schema)
        self._format_is_known = False
        self.done_table = table_of("_done")
        self.instance_table = table_of("_instances")
        self.lease_table = table_of("_leases")
        names = quoted_names(engine, table, schema)
        self._scripts = PositionScripts(dialect, names, journal)
        beating = KeptConnection(LeaseConnections(engine))
        # A file of SQLite may be in memory, where each connection has its own.
        self._in_file = dialect == "sqlite"
        super().__init__(
            LeaseScripts(dialect, names),
            beating,
            beating if self._in_file else KeptConnection(LeaseConnections(engine)),
        )
        self._timeout = timeout
        self._foreign_errors = (
            SQLAlchemyError,
            OSError,
            UnicodeError,
            engine.dialect.loaded_dbapi.Error,
        )

    async def create_tables(self) -> None:
        """Create the tables that do not exist yet. Several processes may do so at once.

        Raises:
            StoreError
        """
        tables = [self.table, self.done_table, self.instance_table, self.lease_table]
        tables += [] if self.journal_table is None else [self.journal_table]
        create = partial(
            create_missing, tables=tables, formats=self.format_table, newest=STORE_FORMAT
        )
        async with self._operation(None, shield=False):
            for attempt in range(len(tables) + 2):
                try:
                    await transact(self.engine, create)
                except DBAPIError:
                    # Another process may have created a table between the look and the creation.
                    # The next look sees that one at least.
                    if attempt == len(tables) + 1:
                        raise
                else:
                    return

    def limit_lock_waits(self, feed: FeedKey, seconds: float) -> None:
        """See `LockingStore.limit_lock_waits`.

        The store's own transactions of that feed are ended by PostgreSQL after ten times as long,
        when this process is paused within one.
        """
        self._scripts.lock_waits[feed] = seconds

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        if not self._format_is_known:
            check = partial(
                check_format, table=self.table, formats=self.format_table, newest=STORE_FORMAT
            )
            async with self._operation(feed, shield=False):
                await transact(self.engine, check)
            self._format_is_known = True
        return await super().load(feed)

    async def aclose(self) -> None:
        """See `Closable.aclose`. Closes the connections of leases, and nothing of the caller's."""
        await self.close_lease_connections()

    async def close_lease_connections(self) -> None:
        """Close the connections that are kept while an instance has joined. A later use opens one.

        Cancellation: they are closed all the same.
        """
        with anyio.CancelScope(shield=True):
            for connection in {self._beating, self._leasing}:
                await connection.close()

    # Transactions

    async def _run_alone(self, script: Script[T]) -> T:
        return await transact(self.engine, partial(_run_where_it_rolls_back, script=script))

    async def _read(self, script: Script[T]) -> T:
        return await transact(self.engine, partial(run_script, script=script))

    async def _runner(self, feed: FeedKey, transaction: Any) -> Run | None:  # noqa: ARG002
        if transaction is None:
            return None

        def work(connection: sa.Connection, script: Script[T]) -> T:
            if connection.dialect.name != self.engine.dialect.name:
                raise StoreError(
                    f"the transaction is on {connection.dialect.name}, "
                    f"but the cursors are on {self.engine.dialect.name}"
                )
            return _run_where_it_rolls_back(connection, self._writing(script))

        return lambda script: within(transaction, self.table, partial(work, script=script))

    async def _administer(self, feed: FeedKey | None, script: Callable[[], Script[T]]) -> T:
        return await super()._administer(feed, lambda: self._writing(script()))

    async def _done(self, feed: FeedKey, event: DoneEvent, within: Run | None) -> None:
        await super()._done(feed, event, within or self._run_writing)

    async def _run_writing(self, script: Script[T]) -> T:
        return await self._run_alone(self._writing(script))

    def _writing(self, script: Script[T]) -> Script[T]:
        """Take the write lock first where there is one for the whole database.

        Python's SQLite driver begins a transaction only before a statement that changes something.
        Without this one a savepoint would be the outermost transaction, and releasing it a commit.
        """
        if self._in_file:
            yield Query(self._scripts.write_nothing)
        return (yield from script)

    @asynccontextmanager
    async def _operation(
        self, feed: FeedKey | None, *, seconds: float | None = None, shield: bool = True
    ) -> AsyncIterator[None]:
        """Run the block as `asyncio_operation` does, and translate the database's errors."""
        url = None if feed is None else feed.url
        limit = self._timeout if seconds is None else min(self._timeout, seconds)
        try:
            async with asyncio_operation(
                "SQLAlchemyCursorStore", "the cursor database", feed, limit, shield=shield
            ):
                yield
        except FeedError as error:
            error.feed = error.feed or url
            raise
        except Exception as error:
            # Any: drivers raise also ValueError, TypeError and RuntimeError of their own.
            raise StoreError(
                f"the cursor database ({self.engine.dialect.name}) failed: {self._reason(error)}",
                feed=url,
            ) from error

    def _reason(self, error: BaseException) -> str:
        problem = store_problem(error)
        if not isinstance(error, self._foreign_errors):
            text = type(error).__name__  # its text may quote a cursor
        else:
            text = database_message(self.engine, error)
            if self.table.name in text:
                return f"{text} (has create_tables() been called?)"
        return text if problem is None else f"{problem} ({text})"

    def __repr__(self) -> str:
        dialect = self.engine.dialect
        return (
            f"<SQLAlchemyCursorStore {dialect.name}+{dialect.driver}, "
            f"table {self.table.fullname!r}>"
        )


def _run_where_it_rolls_back(connection: sa.Connection, script: Script[T]) -> T:
    if is_autocommit(connection):
        raise StoreError(
            "the connection is in autocommit mode: "
            "there is no transaction that the save could be part of"
        )
    return run_script(connection, script)
