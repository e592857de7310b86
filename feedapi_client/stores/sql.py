"""Cursors in the application's own SQL database, through SQLAlchemy. Needs the extra ``sql``.

Here are transactions; the statements are in `feedapi_client.stores.sql_statements`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any, NoReturn, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.causes import store_problem
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    asyncio_operation,
    check_predecessor,
    check_storable,
    consumer_interferes,
    stored_key,
    stored_position,
    with_next_revisions,
)
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    microseconds,
    now,
    reconstruct,
)
from feedapi_client.stores.moving import check_moves, moved_positions
from feedapi_client.stores.sql_connection import (
    connection_of,
    database_message,
    is_autocommit,
    is_conflict,
)
from feedapi_client.stores.sql_leases import SQLLeases
from feedapi_client.stores.sql_statements import CursorStatements, in_chunks
from feedapi_client.stores.sql_tables import (
    cursor_table,
    instance_table,
    journal_table,
    lease_table,
    table_in,
)

T = TypeVar("T")

_SAVE_ATTEMPTS = 3
_ADMIN_ATTEMPTS = 100


class _RefusedError(Exception):
    """A stored revision is not the expected one; the statements so far have to be rolled back."""


class SQLAlchemyCursorStore(SQLLeases, Closable):
    """Keeps positions in a table of the application's database.

    Databases: PostgreSQL (psycopg, asyncpg), MySQL and MariaDB, SQL Server, SQLite (aiosqlite).

    The tables are created by `create_tables`, or by the application's own migrations: with
    `metadata` they are part of it, and `table`, `journal_table` (None without a `journal`),
    `instance_table` and `lease_table` are the Table objects.

    Exactly once: pass the `AsyncConnection` or `AsyncSession` that writes the effects as
    ``transaction``. The save is then part of its transaction, which the caller commits or rolls
    back; a session is not flushed. A save that is refused or fails leaves nothing of itself in the
    transaction. READ COMMITTED, the default isolation of PostgreSQL and SQL Server, is enough. At
    stricter levels the database may report a conflict between two consumers by itself: a
    `StoreError` whose cause is the database's error.

    Cost: the usual save, of one position, is one statement; a save of many is one for each 500.

    Runs on asyncio only, as SQLAlchemy's async engines do: on trio every operation raises
    `StoreError` (use `SQLiteCursorStore` there).

    Arguments:
        engine: the caller's engine, which the store does not dispose of. It must not be in
            autocommit mode.
        table, schema: name of the table; the others' are the same with ``_journal``,
            ``_instances`` and ``_leases``.
        metadata: the metadata to put the tables into; by default one of the store's own.
        journal: keep a history of positions.
        timeout: maximum time for one operation, in seconds, waiting for a connection included.

    Cancellation: a save or load that has begun is finished.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        table: str = "feedapi_cursors",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
        journal: Journal | None = None,
        timeout: float = 30.0,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                "SQLAlchemyCursorStore needs an AsyncEngine "
                f"(sqlalchemy.ext.asyncio.create_async_engine), not a {type(engine).__name__}"
            )
        if engine.sync_engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise ValueError(
                "SQLAlchemyCursorStore needs an engine with transactions, "
                "and this one has the isolation level AUTOCOMMIT"
            )
        self.engine = engine
        metadata = sa.MetaData() if metadata is None else metadata
        self.table = table_in(metadata, cursor_table, table, schema)
        self.journal_table = (
            table_in(metadata, journal_table, f"{table}_journal", schema) if journal else None
        )
        super().__init__(
            engine,
            table_in(metadata, instance_table, f"{table}_instances", schema),
            table_in(metadata, lease_table, f"{table}_leases", schema),
            self._operation,
        )
        self._statements = CursorStatements(self.table, self.journal_table)
        self._journal = journal
        self._pruner = Pruner(journal)
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
        tables = [self.table, self.instance_table, self.lease_table]
        tables += [] if self.journal_table is None else [self.journal_table]

        def create(connection: sa.Connection) -> None:
            self.table.metadata.create_all(connection, tables=tables)

        async with self._operation(None):
            for attempt in range(len(tables) + 1):
                try:
                    async with self.engine.begin() as connection:
                        await connection.run_sync(create)
                except DBAPIError:
                    # Another process may have created a table between the look and the creation.
                    # The next look sees that one at least.
                    if attempt == len(tables):
                        raise
                else:
                    return

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._operation(feed), self.engine.connect() as connection:
            return await self._load(connection, feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. `transaction` is an `AsyncConnection` or an `AsyncSession`."""
        check_storable(feed, positions)
        async with self._operation(feed):
            if transaction is not None:
                connection = await self._callers_connection(feed, transaction)
                await self._save_within(connection, feed, positions)
            elif positions:
                await self._save_alone(feed, positions)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        async with self._operation(None), self.engine.connect() as connection:
            rows = await connection.execute(self._statements.select_feeds())
            return sorted((stored_key(*row) for row in rows), key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)

        async def work(connection: AsyncConnection) -> None:
            stored = await self._load(connection, feed, lock=True)
            to_delete = {p: found for p, found in stored.items() if wanted is None or p in wanted}
            await self._delete(connection, feed, to_delete)

        await self._administer(feed, work)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        check_storable(feed, positions)

        async def work(connection: AsyncConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            return await self._replace(connection, feed, positions, stored)

        return await self._administer(feed, work)

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)

        async def work(connection: AsyncConnection) -> dict[FeedKey, dict[int, Position]]:
            moved: dict[FeedKey, dict[int, Position]] = {}
            for old, new in keys.items():
                if positions := await self._load(connection, old, lock=True):
                    moved[new] = await self._move(connection, old, new, positions, overwrite)
            return moved

        return await self._administer(None, work)

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        async with self._operation(feed), self.engine.connect() as connection:
            return await self._history(connection, feed, when)

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)

        async def work(connection: AsyncConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            target = await self._history(connection, feed, to)
            check_rewind(feed, to, target)
            to_delete = {p: found for p, found in stored.items() if p not in target}
            await self._delete(connection, feed, to_delete)
            return await self._replace(connection, feed, target, stored)

        return await self._administer(feed, work)

    # Transactions

    async def _save_alone(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        """Save in a transaction of the store's own."""
        for attempt in range(1, _SAVE_ATTEMPTS + 1):
            try:
                async with self.engine.begin() as connection:
                    await self._check_rolls_back(connection, feed)
                    await self._write(connection, feed, positions)
            except (_RefusedError, DBAPIError) as error:
                if not _is_worth_another_attempt(error):
                    raise
                async with self.engine.connect() as connection:
                    await self._find_conflict(connection, feed, positions)
                if attempt == _SAVE_ATTEMPTS:
                    _give_up(feed, error)
            else:
                return

    async def _save_within(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Save in the caller's transaction."""
        await self._check_rolls_back(connection, feed)
        if not positions:
            return
        # The UPDATE of one row changes it or does not, without an error for which PostgreSQL would
        # end the transaction. Everything else needs a savepoint.
        single = len(positions) == 1 and next(iter(positions.values())).revision > 1
        try:
            await self._begin_writing(connection)
            async with nullcontext() if single else connection.begin_nested():
                await self._write(connection, feed, positions)
        except (_RefusedError, IntegrityError) as error:
            await self._find_conflict(connection, feed, positions)
            _give_up(feed, error)

    async def _administer(
        self, feed: FeedKey | None, work: Callable[[AsyncConnection], Awaitable[T]]
    ) -> T:
        """Do an operator's work in a transaction; again while consumers interfere."""
        async with self._operation(feed):
            for _ in range(_ADMIN_ATTEMPTS):
                try:
                    async with self.engine.begin() as connection:
                        await self._check_rolls_back(connection, feed)
                        await self._begin_writing(connection)
                        return await work(connection)
                except (_RefusedError, DBAPIError) as error:
                    if not _is_worth_another_attempt(error):
                        raise
            raise consumer_interferes(feed)

    async def _begin_writing(self, connection: AsyncConnection) -> None:
        """Take the write lock where there is one for the whole database.

        Python's SQLite driver begins a transaction only before a statement that changes something.
        Without this one a savepoint would be the outermost transaction, and releasing it a commit.
        """
        if self.engine.dialect.name == "sqlite":
            await connection.execute(self._statements.change_nothing())

    async def _callers_connection(self, feed: FeedKey, transaction: Any) -> AsyncConnection:
        connection = await connection_of(transaction, feed)
        if connection.dialect.name != self.engine.dialect.name:
            raise StoreError(
                f"the transaction is on {connection.dialect.name}, "
                f"but the cursors are on {self.engine.dialect.name}",
                feed=feed.url,
            )
        return connection

    async def _check_rolls_back(self, connection: AsyncConnection, feed: FeedKey | None) -> None:
        if await is_autocommit(connection):
            raise StoreError(
                "the connection is in autocommit mode: "
                "there is no transaction that the save could be part of",
                feed=None if feed is None else feed.url,
            )

    @asynccontextmanager
    async def _operation(self, feed: FeedKey | None) -> AsyncIterator[None]:
        """Run the block as `asyncio_operation` does, and translate the database's errors."""
        try:
            async with asyncio_operation(
                "SQLAlchemyCursorStore", "the cursor database", feed, self._timeout
            ):
                yield
        except FeedError:
            raise
        except Exception as error:
            # Any: drivers raise also ValueError, TypeError and RuntimeError of their own.
            raise StoreError(
                f"the cursor database ({self.engine.dialect.name}) failed: {self._reason(error)}",
                feed=None if feed is None else feed.url,
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

    # Work within a transaction

    async def _load(
        self,
        connection: AsyncConnection,
        feed: FeedKey,
        *,
        lock: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> dict[int, Position]:
        query = self._statements.select_positions(feed, lock=lock, partitions=partitions)
        return {row[0]: stored_position(feed, *row) for row in await connection.execute(query)}

    async def _write(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Save the positions if the stored revisions are the expected ones.

        Raises:
            _RefusedError, IntegrityError: one of them is not.
        """
        at = now()
        await self._prune_journal(connection, feed, at)
        for chunk in in_chunks({p: new for p, new in positions.items() if new.revision > 1}):
            revisions = {partition: new.revision - 1 for partition, new in chunk.items()}
            matching = self._statements.matching(feed, revisions)
            await self._archive(connection, matching, at)
            update = self._statements.update_positions(matching, chunk, at)
            if (await connection.execute(update)).rowcount != len(chunk):
                raise _RefusedError
        if first := {p: new for p, new in positions.items() if new.revision <= 1}:
            insert, rows = self._statements.insert_positions(feed, first, at)
            await connection.execute(insert, rows)

    async def _archive(
        self, connection: AsyncConnection, matching: list[sa.ColumnElement[bool]], at: int
    ) -> None:
        if (archive := self._statements.archive_positions(matching, at)) is not None:
            await connection.execute(archive)

    async def _prune_journal(self, connection: AsyncConnection, feed: FeedKey, at: int) -> None:
        if (before := self._pruner.due(feed, at)) is None:
            return
        if (prune := self._statements.prune_journal(feed, before)) is not None:
            await connection.execute(prune)

    async def _delete(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        at = now()
        for chunk in in_chunks(positions):
            revisions = {partition: found.revision for partition, found in chunk.items()}
            matching = self._statements.matching(feed, revisions)
            await self._archive(connection, matching, at)
            deleted = await connection.execute(self._statements.delete_positions(matching))
            if deleted.rowcount != len(chunk):
                raise _RefusedError

    async def _replace(
        self,
        connection: AsyncConnection,
        feed: FeedKey,
        positions: Mapping[int, Position],
        stored: Mapping[int, Position],
    ) -> dict[int, Position]:
        revisions = {partition: found.revision for partition, found in stored.items()}
        replaced = with_next_revisions(positions, revisions)
        await self._write(connection, feed, replaced)
        return replaced

    async def _move(
        self,
        connection: AsyncConnection,
        old: FeedKey,
        new: FeedKey,
        positions: Mapping[int, Position],
        overwrite: bool,
    ) -> dict[int, Position]:
        stored = await self._load(connection, new, lock=True)
        moved = moved_positions(new, positions, stored, overwrite=overwrite)
        await self._delete(connection, new, stored)
        await self._delete(connection, old, positions)
        insert, rows = self._statements.insert_positions(new, moved, now())
        await connection.execute(insert, rows)
        return moved

    async def _find_conflict(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Raise the `FencedError` of the first position that is refused, if one is found."""
        # A locking read sees what others committed, also where a transaction otherwise sees its
        # own snapshot. It locks no other partition: two consumers that commit several partitions
        # at a time would deadlock over those.
        for chunk in in_chunks(positions):
            stored = await self._load(connection, feed, lock=True, partitions=chunk)
            for partition, position in chunk.items():
                found = stored.get(partition)
                revision = None if found is None else found.revision
                check_predecessor(feed, partition, position, revision)

    async def _history(
        self, connection: AsyncConnection, feed: FeedKey, when: datetime
    ) -> dict[int, Position]:
        at = check_reach(feed, self._journal, when)
        covering: list[Any] = []
        for query in self._statements.select_covering(feed, at):
            covering += (await connection.execute(query)).all()
        later: list[Any] = []
        for query in self._statements.select_later(feed, at):
            later += (await connection.execute(query)).all()
        return reconstruct(feed, when, covering, later)

    def __repr__(self) -> str:
        dialect = self.engine.dialect
        return (
            f"<SQLAlchemyCursorStore {dialect.name}+{dialect.driver}, "
            f"table {self.table.fullname!r}>"
        )


def _is_worth_another_attempt(error: Exception) -> bool:
    return isinstance(error, _RefusedError) or is_conflict(error)


def _give_up(feed: FeedKey, error: Exception) -> NoReturn:
    """Raise the error of a refused save that no stored revision explains."""
    if isinstance(error, _RefusedError):
        raise StoreError(
            "the positions changed while they were being saved: load them and try again",
            feed=feed.url,
        ) from None
    raise error
