"""Cursors in the application's own SQL database, through SQLAlchemy's async Core. Needs the extra ``sql``."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.lowlevel
import orjson

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mssql, mysql
    from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
    )
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import Closable, check_predecessor, following, stored_position
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    now,
    reconstruct,
)

T = TypeVar("T")

_ROWS_PER_STATEMENT = (
    500  # SQL Server takes 2,100 parameters a statement; here are at most three for each row
)
_SAVE_ATTEMPTS = 3
_ADMIN_ATTEMPTS = 100
# Another transaction was in the way: serialization failures and deadlocks of PostgreSQL and SQL Server, of MySQL, of MariaDB.
_CONFLICTS = ("40001", "40P01", 1213, 1020)


class _RefusedError(Exception):
    """A revision stored is not the one expected; the statements so far are to be rolled back."""


def cursor_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """The table of positions: one row for each partition of each `FeedKey`.

    `feed_id` is `FeedKey.id`; `feed_url`, `consumer` and `filters` (JSON) say the same to people. `saved_at` is in microseconds since 1970 UTC.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("feed_cursor", _long_text(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("saved_at", sa.BigInteger, nullable=False),
        sa.Column("feed_url", _long_text(), nullable=False),
        sa.Column("consumer", _long_text(), nullable=False),
        sa.Column("filters", _long_text(), nullable=False),
        schema=schema,
        **_TABLE_OPTIONS,
    )


def journal_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """The table of replaced positions, see `feedapi_client.stores.journal`. Times are in microseconds since 1970 UTC."""
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("replaced_at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("feed_cursor", _long_text(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("saved_at", sa.BigInteger, nullable=False),
        schema=schema,
        **_TABLE_OPTIONS,
    )


def _long_text() -> Any:
    # MySQL's TEXT ends at 64 KiB; SQL Server's NTEXT can't be compared.
    return (
        sa.UnicodeText()
        .with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
        .with_variant(mssql.NVARCHAR(None), "mssql")
    )


_TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


class SQLAlchemyCursorStore(Closable):
    """Keeps positions in a table of the application's database: PostgreSQL (psycopg, asyncpg), MySQL and MariaDB, SQL Server, SQLite (aiosqlite).

    `engine` is the caller's `AsyncEngine` and stays the caller's: the store doesn't dispose of it. The tables are made by `create_tables`, or by the
    application's own migrations: with `metadata` they are part of it, and `table` and `journal_table` (None without a `journal`) are the Table objects.
    `timeout` (seconds) bounds each operation, waiting for a connection included.

    Exactly once: pass the `AsyncConnection` or `AsyncSession` that the effects are written with as ``transaction``. The save is then part of its
    transaction, which the caller commits or rolls back; the session is not flushed. A save that is refused or fails leaves nothing of itself behind in
    the transaction. Isolation READ COMMITTED, PostgreSQL's and SQL Server's default, is enough. At the stricter levels the database may
    report a conflict between two consumers by itself: a `StoreError` whose cause is the database's own error.

    The usual save, of one position, is one statement; a save of many is one for each 500. A save or load that has begun is finished although
    its task is cancelled.

    SQLAlchemy's async engines run on asyncio: on trio every operation raises `StoreError` (use `SQLiteCursorStore` there).
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
                f"SQLAlchemyCursorStore needs an AsyncEngine (sqlalchemy.ext.asyncio.create_async_engine), not a {type(engine).__name__}"
            )
        if _autocommit(engine.sync_engine.get_execution_options(), engine.dialect):
            raise ValueError(
                "SQLAlchemyCursorStore needs an engine with transactions, and this one has the isolation level AUTOCOMMIT"
            )
        self.engine = engine
        metadata = sa.MetaData() if metadata is None else metadata
        self.table = _once(cursor_table, table, metadata, schema)
        self.journal_table = (
            _once(journal_table, f"{table}_journal", metadata, schema) if journal else None
        )
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
        """Make the tables that do not exist yet. Several processes may do so at once. Raises `StoreError`."""
        tables = [self.table] if self.journal_table is None else [self.table, self.journal_table]

        def create(connection: sa.Connection) -> None:
            self.table.metadata.create_all(connection, tables=tables)

        async with self._guard(None):
            try:
                async with self.engine.begin() as connection:
                    await connection.run_sync(create)
            except DBAPIError:
                # Another process may have been faster between the look and the creation; now they can be seen.
                async with self.engine.begin() as connection:
                    await connection.run_sync(create)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._guard(feed), self.engine.connect() as connection:
            return await self._load(connection, feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. `transaction` is the caller's `AsyncConnection` or `AsyncSession`."""
        async with self._guard(feed):
            if transaction is not None:
                connection = await self._connection_of(feed, transaction)
                if positions:
                    await self._save_within(connection, feed, positions)
            elif positions:
                await self._save_alone(feed, positions)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        columns = self.table.c
        async with self._guard(None), self.engine.connect() as connection:
            rows = await connection.execute(
                sa.select(columns.feed_url, columns.consumer, columns.filters).distinct()
            )
            return sorted(
                (FeedKey(url, name, orjson.loads(filters)) for url, name, filters in rows), key=str
            )

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)

        async def work(connection: AsyncConnection) -> None:
            stored = await self._load(connection, feed, lock=True)
            await self._delete(
                connection,
                feed,
                {p: found for p, found in stored.items() if wanted is None or p in wanted},
            )

        await self._administer(feed, work)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""

        async def work(connection: AsyncConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            return await self._replace(connection, feed, positions, stored)

        return await self._administer(feed, work)

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        async with self._guard(feed), self.engine.connect() as connection:
            return await self._history(connection, feed, when)

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""

        async def work(connection: AsyncConnection) -> dict[int, Position]:
            stored = await self._load(connection, feed, lock=True)
            target = await self._history(connection, feed, to)
            check_rewind(feed, to, target)
            await self._delete(
                connection, feed, {p: found for p, found in stored.items() if p not in target}
            )
            return await self._replace(connection, feed, target, stored)

        return await self._administer(feed, work)

    # Transactions

    async def _save_alone(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        for attempt in range(1, _SAVE_ATTEMPTS + 1):
            try:
                async with self.engine.begin() as connection:
                    await self._write(connection, feed, positions)
            except (_RefusedError, DBAPIError) as error:
                if not _conflict(error):
                    raise
                async with self.engine.connect() as connection:
                    await self._blame(connection, feed, positions)
                if attempt == _SAVE_ATTEMPTS:
                    _give_up(feed, error)
            else:
                return

    async def _save_within(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        # The UPDATE of one row does all or nothing, without an error that PostgreSQL would end the transaction for. All else needs a savepoint.
        single = len(positions) == 1 and next(iter(positions.values())).revision > 1
        try:
            await self._begin(connection)
            async with nullcontext() if single else connection.begin_nested():
                await self._write(connection, feed, positions)
        except (_RefusedError, IntegrityError) as error:
            await self._blame(connection, feed, positions)
            _give_up(feed, error)

    async def _administer(
        self, feed: FeedKey, work: Callable[[AsyncConnection], Awaitable[T]]
    ) -> T:
        async with self._guard(feed):
            for _ in range(_ADMIN_ATTEMPTS):
                try:
                    async with self.engine.begin() as connection:
                        await self._begin(connection)
                        return await work(connection)
                except (_RefusedError, DBAPIError) as error:
                    if not _conflict(error):
                        raise
            raise StoreError(
                "a running consumer keeps changing the positions: stop it and try again",
                feed=feed.url,
            )

    async def _begin(self, connection: AsyncConnection) -> None:
        """Take the write lock where it is one for the whole database.

        Python's SQLite driver begins a transaction only before a statement that changes something: without this one a savepoint would be the
        outermost transaction, and releasing it a commit.
        """
        if self.engine.dialect.name == "sqlite":
            await connection.execute(sa.delete(self.table).where(sa.false()))

    async def _connection_of(self, feed: FeedKey, transaction: Any) -> AsyncConnection:
        if isinstance(transaction, (AsyncSession, async_scoped_session)):
            transaction = await transaction.connection()
        if not isinstance(transaction, AsyncConnection):
            raise StoreError(
                f"transaction must be an AsyncConnection or an AsyncSession, not a {type(transaction).__name__}",
                feed=feed.url,
            )
        if transaction.dialect.name != self.engine.dialect.name:
            raise StoreError(
                f"the transaction is on {transaction.dialect.name}, but the cursors are on {self.engine.dialect.name}",
                feed=feed.url,
            )
        if transaction.sync_connection is not None and _autocommit(
            transaction.sync_connection.get_execution_options(), transaction.dialect
        ):
            raise StoreError(
                "the connection is in autocommit mode: there is no transaction that the save could be part of",
                feed=feed.url,
            )
        return transaction

    @asynccontextmanager
    async def _guard(self, feed: FeedKey | None) -> AsyncIterator[None]:
        """Within it cancellation waits, time is bounded, and foreign errors are translated. Cancelled before, it is not entered."""
        url = None if feed is None else feed.url
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise StoreError(
                "SQLAlchemyCursorStore runs on asyncio only: on trio use SQLiteCursorStore",
                feed=url,
            ) from None
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            with anyio.fail_after(self._timeout, shield=True):
                yield
        except TimeoutError as error:
            raise StoreError(
                f"the cursor database did not answer within {self._timeout:g} s", feed=url
            ) from error
        except self._foreign_errors as error:
            raise StoreError(
                f"the cursor database ({self.engine.dialect.name}) failed: {self._reason(error)}",
                feed=url,
            ) from error

    def _reason(self, error: BaseException) -> str:
        """The first line of the database's own words: not the statement and its parameters, and never the password."""
        foreign = getattr(error, "orig", None) or error
        text = next(iter(str(foreign).strip().splitlines()), "") or type(foreign).__name__
        password = self.engine.url.password
        text = text.replace(str(password), "***") if password else text
        return f"{text} (has create_tables() been called?)" if self.table.name in text else text

    # Statements

    async def _load(
        self,
        connection: AsyncConnection,
        feed: FeedKey,
        *,
        lock: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> dict[int, Position]:
        columns = self.table.c
        query = sa.select(
            columns.partition_id, columns.feed_cursor, columns.status, columns.revision
        ).where(columns.feed_id == feed.id)
        if partitions is not None:
            query = query.where(columns.partition_id.in_(list(partitions)))
        # Always in the order of the partitions, against deadlocks.
        rows = await connection.execute(
            query.order_by(columns.partition_id).with_for_update() if lock else query
        )
        return {row[0]: stored_position(feed, *row) for row in rows}

    async def _write(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Compare and set; raises `_RefusedError` or IntegrityError when a revision is not as expected. Always in the order of the partitions, against
        deadlocks."""
        at = now()
        await self._prune(connection, feed, at)
        for chunk in _chunks({p: new for p, new in positions.items() if new.revision > 1}):
            matching = self._matching(feed, {p: new.revision - 1 for p, new in chunk.items()})
            await self._archive(connection, matching, at)
            changed = await connection.execute(self._update(matching, chunk, at))
            if changed.rowcount != len(chunk):
                raise _RefusedError
        if born := [
            self._row(feed, p, new, at) for p, new in sorted(positions.items()) if new.revision <= 1
        ]:
            await connection.execute(sa.insert(self.table), born)

    def _row(self, feed: FeedKey, partition: int, new: Position, at: int) -> dict[str, Any]:
        return {
            "feed_id": feed.id,
            "partition_id": partition,
            "feed_cursor": new.cursor,
            "status": new.status,
            "revision": new.revision,
            "saved_at": at,
            "feed_url": feed.url,
            "consumer": feed.name,
            "filters": orjson.dumps(feed.filters).decode(),
        }

    def _update(
        self, matching: list[sa.ColumnElement[bool]], positions: Mapping[int, Position], at: int
    ) -> sa.Update:
        return (
            sa.update(self.table)
            .where(*matching)
            .values(
                feed_cursor=self._by_partition(
                    "feed_cursor", {p: new.cursor for p, new in positions.items()}
                ),
                status=self._by_partition(
                    "status", {p: new.status for p, new in positions.items()}
                ),
                revision=self.table.c.revision + 1,
                saved_at=at,
            )
        )

    def _matching(
        self, feed: FeedKey, revisions: Mapping[int, int]
    ) -> list[sa.ColumnElement[bool]]:
        """The rows of these partitions that have these revisions."""
        columns = self.table.c
        return [
            columns.feed_id == feed.id,
            columns.partition_id.in_(list(revisions)),
            columns.revision == self._by_partition("revision", revisions),
        ]

    def _by_partition(self, name: str, values: Mapping[int, Any]) -> sa.ColumnElement[Any]:
        """The value that belongs to a row's partition, for a column."""
        type_ = self.table.c[name].type
        if len(set(values.values())) == 1:
            return sa.literal(next(iter(values.values())), type_)
        # As text, since building 500 comparisons of columns takes longer than the database needs for them. Identifiers and numbers are the store's own.
        branches = " ".join(
            f"WHEN {int(partition)} THEN :{name}{partition}" for partition in values
        )
        parameters = [
            sa.bindparam(f"{name}{partition}", value, type_) for partition, value in values.items()
        ]
        return sa.type_coerce(
            sa.text(f"CASE partition_id {branches} END").bindparams(*parameters), type_
        )

    async def _archive(
        self, connection: AsyncConnection, matching: list[sa.ColumnElement[bool]], at: int
    ) -> None:
        if self.journal_table is None:
            return
        columns = self.table.c
        names = [
            "feed_id",
            "replaced_at",
            "partition_id",
            "revision",
            "feed_cursor",
            "status",
            "saved_at",
        ]
        replaced = sa.select(
            columns.feed_id,
            sa.literal(at, sa.BigInteger),
            columns.partition_id,
            columns.revision,
            columns.feed_cursor,
            columns.status,
            columns.saved_at,
        ).where(*matching)
        # Locked as the UPDATE that follows will lock them: two consumers that both had read them could only deadlock.
        await connection.execute(
            sa.insert(self.journal_table).from_select(names, replaced.with_for_update())
        )

    async def _prune(self, connection: AsyncConnection, feed: FeedKey, at: int) -> None:
        if self.journal_table is not None and (limit := self._pruner.due(feed, at)) is not None:
            columns = self.journal_table.c
            await connection.execute(
                sa.delete(self.journal_table).where(
                    columns.feed_id == feed.id, columns.replaced_at < limit
                )
            )

    async def _delete(
        self, connection: AsyncConnection, feed: FeedKey, doomed: Mapping[int, Position]
    ) -> None:
        at = now()
        for chunk in _chunks(doomed):
            matching = self._matching(
                feed, {partition: found.revision for partition, found in chunk.items()}
            )
            await self._archive(connection, matching, at)
            deleted = await connection.execute(sa.delete(self.table).where(*matching))
            if deleted.rowcount != len(chunk):
                raise _RefusedError

    async def _replace(
        self,
        connection: AsyncConnection,
        feed: FeedKey,
        positions: Mapping[int, Position],
        stored: Mapping[int, Position],
    ) -> dict[int, Position]:
        replaced = following(
            positions, {partition: found.revision for partition, found in stored.items()}
        )
        await self._write(connection, feed, replaced)
        return replaced

    async def _blame(
        self, connection: AsyncConnection, feed: FeedKey, positions: Mapping[int, Position]
    ) -> None:
        """Raise the `FencedError` of the first position that is refused, as far as can be seen."""
        # A locking read sees what others committed also where a transaction otherwise sees its own snapshot. It locks no other partition: two consumers
        # that commit several at a time would deadlock over those.
        for chunk in _chunks(positions):
            stored = await self._load(connection, feed, lock=True, partitions=chunk)
            for partition, position in chunk.items():
                check_predecessor(
                    feed,
                    partition,
                    position,
                    stored[partition].revision if partition in stored else None,
                )

    async def _history(
        self, connection: AsyncConnection, feed: FeedKey, when: datetime
    ) -> dict[int, Position]:
        at = check_reach(feed, self._journal, when)
        covering: list[Any] = []
        later: list[Any] = []
        for table in (self.journal_table, self.table):
            assert table is not None
            columns = table.c
            valid = [columns.feed_id == feed.id, columns.saved_at <= at]
            if table is self.journal_table:
                valid.append(columns.replaced_at > at)
            position = sa.select(
                columns.partition_id,
                columns.feed_cursor,
                columns.status,
                columns.revision,
                columns.saved_at,
            )
            covering += (await connection.execute(position.where(*valid))).all()
            birth = sa.func.min(sa.case((columns.revision == 1, columns.saved_at)))
            first = sa.select(columns.partition_id, sa.func.min(columns.saved_at), birth).group_by(
                columns.partition_id
            )
            later += (
                await connection.execute(
                    first.where(columns.feed_id == feed.id, columns.saved_at > at)
                )
            ).all()
        return reconstruct(feed, when, covering, later)

    def __repr__(self) -> str:
        return f"<SQLAlchemyCursorStore {self.engine.dialect.name}+{self.engine.dialect.driver}, table {self.table.fullname!r}>"


def _once(
    make: Callable[[str, sa.MetaData, str | None], sa.Table],
    name: str,
    metadata: sa.MetaData,
    schema: str | None,
) -> sa.Table:
    """The table, also when another store has put it into the same metadata before."""
    found = metadata.tables.get(f"{schema}.{name}" if schema else name)
    return make(name, metadata, schema) if found is None else found


def _chunks(positions: Mapping[int, Position]) -> Iterator[dict[int, Position]]:
    items: Sequence[tuple[int, Position]] = sorted(positions.items())
    for start in range(0, len(items), _ROWS_PER_STATEMENT):
        yield dict(items[start : start + _ROWS_PER_STATEMENT])


def _conflict(error: Exception) -> bool:
    """Whether another transaction was in the way, rather than a failure."""
    if isinstance(error, (_RefusedError, IntegrityError)):
        return True
    cause = getattr(error, "orig", None)
    codes = (getattr(cause, "sqlstate", None), *getattr(cause, "args", ())[:1])
    return any(code in _CONFLICTS for code in codes)


def _give_up(feed: FeedKey, error: Exception) -> NoReturn:
    """No revision explains why the save was refused."""
    if isinstance(error, _RefusedError):
        raise StoreError(
            "the positions changed while they were being saved: load them and try again",
            feed=feed.url,
        ) from None
    raise error


def _autocommit(options: Mapping[str, Any], dialect: Any) -> bool:
    """Whether statements are committed one by one; `options` are those of the connection or engine, the dialect knows what create_engine was given."""
    return bool(
        options.get("isolation_level", getattr(dialect, "_on_connect_isolation_level", None))
        == "AUTOCOMMIT"
    )
