"""Cursors in the application's own SQL database, through SQLAlchemy. Needs the extra ``sql``.

Here are transactions; the statements are in `feedapi_client.stores.sql_statements`.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncEngine
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.causes import store_problem
from feedapi_client.errors import FeedError, FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    asyncio_operation,
    check_predecessor,
    check_same_database,
    check_storable,
    consumer_interferes,
    stored_key,
    stored_position,
    with_next_revisions,
)
from feedapi_client.stores.done import Claim, DoneEvent
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
from feedapi_client.stores.save_attempts import (
    ADMIN_ATTEMPTS,
    IDLE_PARTS,
    RefusedError,
    SaveAttempts,
    give_up,
    is_worth_another_attempt,
    raise_held,
)
from feedapi_client.stores.sql_connection import (
    AnyConnection,
    awaited,
    bound_transaction,
    bounded_lock_waits,
    connection_of,
    database_message,
    is_autocommit,
)
from feedapi_client.stores.sql_done import SQLDone, done_table
from feedapi_client.stores.sql_leases import SQLLeases
from feedapi_client.stores.sql_statements import CursorStatements, DatabaseTime, Time, in_chunks
from feedapi_client.stores.sql_tables import (
    check_noted_format,
    cursor_table,
    format_table,
    instance_table,
    journal_table,
    lease_table,
    note_format,
    table_in,
)
from feedapi_client.stores.stored_format import STORE_FORMAT

T = TypeVar("T")

_SKIP_LOCKED = ("postgresql", "mysql", "mariadb")
"""Databases that can pass by rows that another transaction holds."""


class SQLAlchemyCursorStore(SQLLeases, Closable):
    """Keeps positions in a table of the application's database.

    Databases: PostgreSQL, MySQL and MariaDB, SQL Server, SQLite, each with an asynchronous driver
    or a synchronous one.

    The tables are created by `create_tables`, or by the application's own migrations: with
    `metadata` they are part of it, and `table`, `journal_table` (None without a `journal`),
    `done_table`, `instance_table`, `lease_table` and `format_table` are the Table objects.

    Exactly once: pass what writes the effects as ``transaction``: an `AsyncConnection`, an
    `AsyncSession`, a `Connection` or a `Session`. The save is then part of its transaction, which
    the caller commits or rolls back; a session is not flushed. A save that is refused or fails
    leaves nothing of itself in the transaction. READ COMMITTED, the default isolation of PostgreSQL
    and SQL Server, is enough. At stricter levels the database may report a conflict between two
    consumers by itself: a `StoreError` whose cause is the database's error.

    Cost: the usual save, of one position, is one statement; a save of many is one for each 500.

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
            ``_instances`` and ``_leases``.
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
        self._engine = awaited(engine)
        if self._engine.sync_engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
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
        self.format_table = format_table(metadata, schema)
        self._format_is_known = False
        self.done_table = table_in(metadata, done_table, f"{table}_done", schema)
        self._done = SQLDone(self.done_table, self.table)
        super().__init__(
            self._engine,
            table_in(metadata, instance_table, f"{table}_instances", schema),
            table_in(metadata, lease_table, f"{table}_leases", schema),
            self._operation,
        )
        self._statements = CursorStatements(self.table, self.journal_table)
        self._journal = journal
        self._pruner = Pruner(journal)
        self._timeout = timeout
        self._lock_waits: dict[FeedKey, float] = {}
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
        tables += [self.format_table]
        tables += [] if self.journal_table is None else [self.journal_table]

        def create(connection: sa.Connection) -> None:
            self.table.metadata.create_all(connection, tables=tables)
            note_format(connection, self.format_table, self.table.name, STORE_FORMAT)

        async with self._operation(None, shield=False):
            for attempt in range(len(tables) + 1):
                try:
                    async with self._engine.begin() as connection:
                        await connection.run_sync(create)
                except DBAPIError:
                    # Another process may have created a table between the look and the creation.
                    # The next look sees that one at least.
                    if attempt == len(tables):
                        raise
                else:
                    return

    def limit_lock_waits(self, feed: FeedKey, seconds: float) -> None:
        """See `LockingStore.limit_lock_waits`.

        The store's own transactions of that feed are ended by PostgreSQL after ten times as long,
        when this process is paused within one.
        """
        self._lock_waits[feed] = seconds

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._operation(feed, shield=False), self._engine.connect() as connection:
            if not self._format_is_known:
                await connection.run_sync(self._check_format)
                self._format_is_known = True
            return await self._load(connection, feed)

    def _check_format(self, connection: sa.Connection) -> None:
        check_noted_format(connection, self.format_table, self.table.name, STORE_FORMAT)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`.

        `transaction` is an `AsyncConnection`, `AsyncSession`, `Connection` or `Session`.
        """
        await self.save_passing(feed, positions, {}, transaction=transaction)

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`. `transaction` as in `save`."""
        check_storable(feed, positions)
        async with self._operation(feed):
            if transaction is not None:
                connection = await self._callers_connection(feed, transaction)
                await self._save_within(connection, feed, positions, passed)
            elif positions:
                await self._save_alone(feed, positions, passed)

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
        bound = self._lock_waits.get(feed)

        async def work(connection: AnyConnection) -> int:
            if bound is not None:
                await bound_transaction(connection, bound, IDLE_PARTS * bound)
            return await self._done.claim(connection, feed, partitions, revision)

        try:
            number = await self._administer(feed, work)
        except StoreError as error:
            raise_held(feed, partitions[0], bound, error)
            raise
        async with self._operation(feed, shield=False), self._engine.connect() as connection:
            return Claim(number, await self._done.load(connection, feed, partitions, revision))

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`. `transaction` as in `save`."""
        async with self._operation(feed):
            if transaction is None:
                async with self._engine.begin() as connection:
                    await self._check_rolls_back(connection, feed)
                    await self._begin_writing(connection)
                    await self._done.done(connection, feed, event)
                return
            connection = await self._callers_connection(feed, transaction)
            await self._check_rolls_back(connection, feed)
            await self._begin_writing(connection)
            await self._done.done(connection, feed, event)

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        async with self._operation(feed, shield=False), self._engine.connect() as connection:
            return await self._done.is_done(connection, feed, event)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        async with self._operation(None), self._engine.connect() as connection:
            rows = await connection.execute(self._statements.select_feeds())
            return sorted((stored_key(*row) for row in rows), key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)

        async def work(connection: AnyConnection) -> None:
            stored = await self._load(connection, feed, lock=True)
            to_delete = {p: found for p, found in stored.items() if wanted is None or p in wanted}
            await self._delete(connection, feed, to_delete)
            await self._done.delete(connection, feed, wanted)

        await self._administer(feed, work)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        check_storable(feed, positions)

        async def work(connection: AnyConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            await self._done.delete(connection, feed, positions)
            return await self._replace(connection, feed, positions, stored)

        return await self._administer(feed, work)

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)

        async def work(connection: AnyConnection) -> dict[FeedKey, dict[int, Position]]:
            moved: dict[FeedKey, dict[int, Position]] = {}
            for old, new in keys.items():
                if positions := await self._load(connection, old, lock=True):
                    moved[new] = await self._move(connection, old, new, positions, overwrite)
            return moved

        return await self._administer(None, work)

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        async with self._operation(feed), self._engine.connect() as connection:
            return await self._history(connection, feed, when)

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)

        async def work(connection: AnyConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            target = await self._history(connection, feed, to)
            check_rewind(feed, to, target)
            to_delete = {p: found for p, found in stored.items() if p not in target}
            await self._delete(connection, feed, to_delete)
            await self._done.delete(connection, feed, None)
            return await self._replace(connection, feed, target, stored)

        return await self._administer(feed, work)

    async def aclose(self) -> None:
        """See `Closable.aclose`. Closes the connections of leases, and nothing of the caller's."""
        await self.close_lease_connections()

    # Transactions

    async def _save_alone(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
    ) -> None:
        """Save in a transaction of the store's own."""
        bound = self._lock_waits.get(feed)
        attempts = SaveAttempts(feed, positions, bound)
        while True:
            try:
                async with self._engine.begin() as connection:
                    await self._check_rolls_back(connection, feed)
                    if bound is not None:
                        await bound_transaction(connection, bound, IDLE_PARTS * bound)
                    await self._write(connection, feed, positions)
                    await self._done.forget(connection, feed, passed)
            except (RefusedError, DBAPIError) as error:
                attempts.stop_at(error)
                if not is_worth_another_attempt(error):
                    raise
                async with self._engine.connect() as connection:
                    held = await self._find_conflict(connection, feed, positions)
                await attempts.pause(error, held)
            else:
                return

    async def _save_within(
        self,
        connection: AnyConnection,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
    ) -> None:
        """Save in the caller's transaction."""
        await self._check_rolls_back(connection, feed)
        if not positions:
            return
        # The UPDATE of one row changes it or does not, without an error for which PostgreSQL would
        # end the transaction. Everything else needs a savepoint.
        single = len(positions) == 1 and next(iter(positions.values())).revision > 1
        attempts = SaveAttempts(feed, positions, self._lock_waits.get(feed))
        while True:
            try:
                await self._begin_writing(connection)
                async with nullcontext() if single else connection.begin_nested():
                    await self._write(connection, feed, positions)
                    await self._done.forget(connection, feed, passed)
            except (RefusedError, DBAPIError) as error:
                attempts.stop_at(error)
                if not isinstance(error, (RefusedError, IntegrityError)):
                    raise
                try:
                    held = await self._find_conflict(connection, feed, positions)
                except FencedError as refused:
                    await check_same_database(
                        feed, refused, positions, partial(self._load_beside, feed)
                    )
                    raise
                if not attempts.bounded:
                    give_up(feed, error)
                await attempts.pause(error, held)
            else:
                return

    async def _load_beside(self, feed: FeedKey) -> dict[int, Position]:
        """Load outside of the caller's transaction, if another connection sees the same."""
        if self.engine.dialect.name == "sqlite":  # it may be in memory, with one connection
            return {}
        async with self._engine.connect() as connection:
            return await self._load(connection, feed)

    async def _administer(
        self, feed: FeedKey | None, work: Callable[[AnyConnection], Awaitable[T]]
    ) -> T:
        """Do an operator's work in a transaction; again while consumers interfere."""
        async with self._operation(feed):
            for _ in range(ADMIN_ATTEMPTS):
                try:
                    async with self._engine.begin() as connection:
                        await self._check_rolls_back(connection, feed)
                        await self._begin_writing(connection)
                        return await work(connection)
                except (RefusedError, DBAPIError) as error:
                    if not is_worth_another_attempt(error):
                        raise
            raise consumer_interferes(feed)

    async def _begin_writing(self, connection: AnyConnection) -> None:
        """Take the write lock where there is one for the whole database.

        Python's SQLite driver begins a transaction only before a statement that changes something.
        Without this one a savepoint would be the outermost transaction, and releasing it a commit.
        """
        if self.engine.dialect.name == "sqlite":
            await connection.execute(self._statements.change_nothing())

    async def _callers_connection(self, feed: FeedKey, transaction: Any) -> AnyConnection:
        connection = await connection_of(transaction, feed)
        if connection.dialect.name != self.engine.dialect.name:
            raise StoreError(
                f"the transaction is on {connection.dialect.name}, "
                f"but the cursors are on {self.engine.dialect.name}",
                feed=feed.url,
            )
        return connection

    async def _check_rolls_back(self, connection: AnyConnection, feed: FeedKey | None) -> None:
        if await is_autocommit(connection):
            raise StoreError(
                "the connection is in autocommit mode: "
                "there is no transaction that the save could be part of",
                feed=None if feed is None else feed.url,
            )

    @asynccontextmanager
    async def _operation(
        self, feed: FeedKey | None, *, seconds: float | None = None, shield: bool = True
    ) -> AsyncIterator[None]:
        """Run the block as `asyncio_operation` does, and translate the database's errors."""
        limit = self._timeout if seconds is None else min(self._timeout, seconds)
        try:
            async with asyncio_operation(
                "SQLAlchemyCursorStore", "the cursor database", feed, limit, shield=shield
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
        connection: AnyConnection,
        feed: FeedKey,
        *,
        lock: bool = False,
        skip_locked: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> dict[int, Position]:
        query = self._statements.select_positions(
            feed, lock=lock, skip_locked=skip_locked, partitions=partitions
        )
        return {row[0]: stored_position(feed, *row) for row in await connection.execute(query)}

    async def _write(
        self, connection: AnyConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Save the positions if the stored revisions are the expected ones.

        Raises:
            RefusedError, IntegrityError: one of them is not.
        """
        at = await self._time_of_save(connection, feed)
        bound = self._lock_waits.get(feed)
        for chunk in in_chunks({p: new for p, new in positions.items() if new.revision > 1}):
            revisions = {partition: new.revision - 1 for partition, new in chunk.items()}
            matching = self._statements.matching(feed, revisions)
            if bound is not None:
                await self._lock_rows(connection, matching, len(chunk))
            await self._archive(connection, matching, at)
            update = self._statements.update_positions(matching, chunk, at)
            if (await connection.execute(update)).rowcount != len(chunk):
                raise RefusedError
        if first := {p: new for p, new in positions.items() if new.revision <= 1}:
            insert, rows = self._statements.insert_positions(feed, first, at)
            # An equal key that another transaction has inserted can't be passed by.
            async with nullcontext() if bound is None else bounded_lock_waits(connection, bound):
                await connection.execute(insert, rows)

    async def _lock_rows(
        self, connection: AnyConnection, matching: list[sa.ColumnElement[bool]], count: int
    ) -> None:
        """Lock the rows without waiting. Raises `RefusedError` if some are locked or changed."""
        if self.engine.dialect.name in _SKIP_LOCKED:
            locked = await connection.execute(self._statements.lock_positions(matching))
            if len(locked.all()) != count:
                raise RefusedError

    async def _time_of_save(self, connection: AnyConnection, feed: FeedKey) -> Time:
        """Return the time by the clock of the database.

        With a journal as a number: the end of one position is the beginning of the next.
        """
        if self.journal_table is None:
            return self._clock()
        at = await self._time(connection)
        await self._prune_journal(connection, feed, at)
        return at

    async def _time(self, connection: AnyConnection) -> int:
        clock = self._clock()
        if isinstance(clock, int):
            return clock
        return int((await connection.execute(sa.select(clock))).scalar_one())

    def _clock(self) -> Time:
        # SQLite's clock is the machine's, and has milliseconds only.
        return now() if self.engine.dialect.name == "sqlite" else DatabaseTime()

    async def _archive(
        self, connection: AnyConnection, matching: list[sa.ColumnElement[bool]], at: Time
    ) -> None:
        if self.journal_table is None:
            return
        assert isinstance(at, int)
        if (archive := self._statements.archive_positions(matching, at)) is not None:
            await connection.execute(archive)

    async def _prune_journal(self, connection: AnyConnection, feed: FeedKey, at: int) -> None:
        if (before := self._pruner.due(feed, at)) is None:
            return
        if (prune := self._statements.prune_journal(feed, before)) is not None:
            await connection.execute(prune)

    async def _delete(
        self, connection: AnyConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        at = await self._time_of_save(connection, feed)
        for chunk in in_chunks(positions):
            revisions = {partition: found.revision for partition, found in chunk.items()}
            matching = self._statements.matching(feed, revisions)
            await self._archive(connection, matching, at)
            deleted = await connection.execute(self._statements.delete_positions(matching))
            if deleted.rowcount != len(chunk):
                raise RefusedError

    async def _replace(
        self,
        connection: AnyConnection,
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
        connection: AnyConnection,
        old: FeedKey,
        new: FeedKey,
        positions: Mapping[int, Position],
        overwrite: bool,
    ) -> dict[int, Position]:
        stored = await self._load(connection, new, lock=True)
        moved = moved_positions(new, positions, stored, overwrite=overwrite)
        await self._delete(connection, new, stored)
        await self._delete(connection, old, positions)
        insert, rows = self._statements.insert_positions(new, moved, self._clock())
        await connection.execute(insert, rows)
        await self._done.move(connection, old, new)
        return moved

    async def _find_conflict(
        self, connection: AnyConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> int | None:
        """Raise the `FencedError` of the first position that is refused, if one is found.

        Returns a partition whose row another transaction holds, if the save may not wait for it.
        """
        # A locking read sees what others committed, also where a transaction otherwise sees its
        # own snapshot. It locks no other partition: two consumers that commit several partitions
        # at a time would deadlock over those.
        passes = feed in self._lock_waits and self.engine.dialect.name in _SKIP_LOCKED
        held: set[int] = set()
        for chunk in in_chunks(positions):
            stored = await self._load(
                connection, feed, lock=True, skip_locked=passes, partitions=chunk
            )
            if passes and (missing := chunk.keys() - stored.keys()):
                held |= (await self._load(connection, feed, partitions=missing)).keys()
            for partition, position in chunk.items():
                if partition not in held:
                    found = stored.get(partition)
                    revision = None if found is None else found.revision
                    check_predecessor(feed, partition, position, revision)
        return min(held, default=None)

    async def _history(
        self, connection: AnyConnection, feed: FeedKey, when: datetime
    ) -> dict[int, Position]:
        at = check_reach(feed, self._journal, when, await self._time(connection))
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
