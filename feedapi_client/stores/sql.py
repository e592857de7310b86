"""Cursors in the application's own SQL database, through SQLAlchemy. Needs the extra ``sql``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.dialects import mysql
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
    )
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import SingletonThreadPool
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.errors import StoreError
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.scripted import Database, ServerStore
from feedapi_client.stores.scripts import (
    DIALECTS,
    MYSQL,
    CountedChange,
    Script,
    Step,
    run_steps,
    with_placeholders,
)
from feedapi_client.stores.tables import CURSORS, FORMAT_TABLE, TABLES
from feedapi_client.stores.threads import in_callers_thread, in_thread, transact_in_thread

T = TypeVar("T")
Engine = AsyncEngine | sa.Engine
AnyConnection = AsyncConnection | sa.Connection
Work = Callable[[sa.Connection], T]

_PLACEHOLDERS = {"numeric_dollar": "$", "qmark": "?"}
_TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in MYSQL
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
_TYPES: dict[str, Any] = {
    # MySQL's TEXT and BLOB end at 64 KiB.
    "TEXT": lambda: sa.UnicodeText().with_variant(mysql.LONGTEXT(), *MYSQL),
    "BLOB": lambda: sa.LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL),
    "INTEGER": sa.Integer,
    "BIGINT": sa.BigInteger,
    "CHAR": sa.CHAR,
    "VARCHAR": sa.Unicode,
}


class SQLAlchemyCursorStore(ServerStore):
    """Keeps positions in a table of the application's database, through SQLAlchemy.

    Databases: PostgreSQL, MySQL and MariaDB, SQLite, each with an asynchronous driver or a
    synchronous one. The tables are created by `create_tables`, or by the application's own
    migrations: with `metadata` they are part of it, and `table`, `journal_table` (None without a
    `journal`), `done_table`, `instance_table`, `lease_table` and `format_table` are the Tables.

    Exactly once: pass what writes the effects as ``transaction``: an `AsyncConnection`, an
    `AsyncSession`, a `Connection` or a `Session`. The save is then part of its transaction; a
    session is not flushed. Of a session with several engines (``binds=``, ``get_bind``) it is the
    one to which an UPDATE of `table` goes. A save that is refused or fails leaves nothing of itself
    in the transaction. At stricter levels than READ COMMITTED the database may report a conflict
    between two consumers by itself: a `StoreError` whose cause is the database's error.

    Threads: a synchronous engine, `Connection` or `Session` is used in worker threads. While
    ``await store.save(transaction=session)`` runs, the caller must not use that session.

    Runs on asyncio only, as SQLAlchemy's async engines do.

    Arguments:
        engine: the caller's `AsyncEngine` or `Engine`, which the store does not dispose of, not in
            autocommit mode. Make it with ``pool_pre_ping=True``: a pool's connections may be dead
            after a quiet night.
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
        database = SQLDatabase(engine, metadata, schema, CURSORS, table, timeout)
        self.engine = engine
        self.table = database.table
        self.format_table = database.format_table
        self.done_table = database.table_of(f"{CURSORS}_done", f"{table}_done")
        self.instance_table = database.table_of(f"{CURSORS}_instances", f"{table}_instances")
        self.lease_table = database.table_of(f"{CURSORS}_leases", f"{table}_leases")
        self.journal_table = (
            database.table_of(f"{CURSORS}_journal", f"{table}_journal") if journal else None
        )
        # SQLite has no server that others could keep busy.
        served = database.dialect != "sqlite"
        leases = _LeaseDatabase(database) if served else database
        super().__init__(database, table, journal, leases, leases)

    def __repr__(self) -> str:
        return f"<SQLAlchemyCursorStore {self.database!r}>"


class SQLDatabase(Database):
    """A session of several engines is used on that to which an UPDATE of the table `kind` goes."""

    def __init__(
        self,
        engine: Engine,
        metadata: sa.MetaData | None,
        schema: str | None,
        kind: str,
        table: str,
        timeout: float = 30.0,
    ) -> None:
        if not isinstance(engine, (AsyncEngine, sa.Engine)):
            raise TypeError(f"an Engine or an AsyncEngine is needed, not a {type(engine).__name__}")
        self.sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if isinstance(self.sync_engine.pool, SingletonThreadPool) and self.sync_engine is engine:
            raise ValueError(
                "this engine keeps a database of SQLite in memory for each thread: create it with "
                "poolclass=sqlalchemy.StaticPool and connect_args={'check_same_thread': False}"
            )
        options = self.sync_engine.get_execution_options()
        if options.get("isolation_level") == "AUTOCOMMIT":
            raise ValueError(
                "an engine with transactions is needed, and this one has the isolation level "
                "AUTOCOMMIT"
            )
        self.dialect = engine.dialect.name
        if self.dialect not in DIALECTS:
            raise ValueError(f"cursors are kept in {', '.join(DIALECTS)}, not {self.dialect}")
        self.name = f"({self.dialect})"
        self.engine = engine
        self.timeout = timeout
        self._metadata = sa.MetaData() if metadata is None else metadata
        self._schema = self._metadata.schema if schema is None else schema
        # The one that the engine maps it to.
        schemas = options.get("schema_translate_map") or {}
        self._mapped: str | None = schemas.get(self._schema, self._schema)
        self._known = (SQLAlchemyError, OSError, engine.dialect.loaded_dbapi.Error)
        self.table = self.table_of(kind, table)
        self.format_table = self.table_of(FORMAT_TABLE, FORMAT_TABLE)

    @property
    def place(self) -> object:
        return self.sync_engine.url

    def table_of(self, kind: str, name: str) -> sa.Table:
        """Return a table of `TABLES`, also if another store has put it into the metadata before."""
        full = f"{self._schema}.{name}" if self._schema else name
        if (found := self._metadata.tables.get(full)) is not None:
            return found
        declared, key = TABLES[kind]
        columns = [
            sa.Column(
                column,
                _type(kind.removesuffix(" NULL")),
                primary_key=column in key,
                autoincrement=False,
                nullable=kind.endswith(" NULL"),
            )
            for column, kind in declared.items()
        ]
        return sa.Table(name, self._metadata, *columns, schema=self._schema, **_TABLE_OPTIONS)

    def quoted(self, table: str) -> str:
        preparer = self.engine.dialect.identifier_preparer
        prefix = f"{preparer.quote_schema(self._mapped)}." if self._mapped else ""
        return prefix + preparer.quote(table)

    async def transact(self, script: Script[T]) -> T:
        return await self._transact(partial(_run_where_it_rolls_back, script=script))

    async def read(self, script: Script[T]) -> T:
        return await self._transact(partial(_run, script=script))

    async def _transact(self, work: Work[T]) -> T:
        if isinstance(self.engine, AsyncEngine):
            async with self.engine.begin() as connection:
                return await connection.run_sync(work)
        return await transact_in_thread(self.engine.begin, work)

    async def within(self, transaction: Any, script: Script[T]) -> T:
        def work(connection: sa.Connection) -> T:
            if connection.dialect.name != self.dialect:
                raise StoreError(
                    f"the transaction is on {connection.dialect.name}, "
                    f"but the cursors are on {self.dialect}"
                )
            return _run_where_it_rolls_back(connection, script)

        # A session with several engines (`binds=`, `get_bind`) chooses by the statement.
        change: Any = {"clause": sa.update(self.table)}
        if isinstance(transaction, (AsyncSession, async_scoped_session)):
            transaction = await transaction.connection(bind_arguments=change)
        if isinstance(transaction, AsyncConnection):
            return await transaction.run_sync(work)
        if not isinstance(transaction, (sa.Connection, Session)):
            raise StoreError(
                "transaction must be an AsyncConnection or an AsyncSession, a Connection or a "
                f"Session, not a {type(transaction).__name__}"
            )

        def call() -> T:
            if isinstance(transaction, Session):
                return work(transaction.connection(bind_arguments=change))
            return work(transaction)

        return await in_callers_thread(call, otherwise=in_thread)

    def text_of(self, error: Exception) -> str:
        """Neither the statement and its parameters, which may be payloads, nor the password."""
        if not isinstance(error, self._known):
            return ""
        foreign = getattr(error, "orig", None) or error
        text = next(iter(str(foreign).strip().splitlines()), "") or type(foreign).__name__
        password = self.sync_engine.url.password
        return text.replace(str(password), "***") if password else text

    def __repr__(self) -> str:
        driver = self.engine.dialect.driver
        return f"{self.dialect}+{driver}, table {self.table.fullname!r}"


def _type(declared: str) -> Any:
    if sized := re.fullmatch(r"(\w+)\((\d+)\)", declared):
        return _TYPES[sized[1]](int(sized[2]))
    return _TYPES[declared]()


# Functions of a connection


def _run(connection: sa.Connection, script: Script[T]) -> T:
    style = _PLACEHOLDERS.get(connection.dialect.paramstyle, "%s")

    def execute(step: Step) -> Any:
        result = connection.exec_driver_sql(with_placeholders(step.sql, style), tuple(step[1]))
        if isinstance(step, CountedChange):
            return result.rowcount
        return result.fetchall() if result.returns_rows else []

    return run_steps(script, execute)


def _run_where_it_rolls_back(connection: sa.Connection, script: Script[T]) -> T:
    if _is_autocommit(connection):
        raise StoreError(
            "the connection is in autocommit mode: "
            "there is no transaction that the save could be part of"
        )
    return _run(connection, script)


def _is_autocommit(connection: sa.Connection) -> bool:
    """Ask the driver, which costs no round trip."""
    pooled = connection.connection
    assert pooled.dbapi_connection is not None
    try:
        autocommit = connection.dialect.detect_autocommit_setting(pooled.dbapi_connection)
    except NotImplementedError:
        return False  # a dialect that can't say
    if autocommit and connection.dialect.name == "sqlite":
        # SQLAlchemy's recipe for savepoints in SQLite switches the driver to autocommit and emits
        # BEGIN when a transaction begins, which is at the latest with this statement.
        connection.exec_driver_sql("SELECT 1")
        return not getattr(pooled.driver_connection, "in_transaction", True)
    return autocommit


class _LeaseDatabase(SQLDatabase):
    """The same on connections outside of the application's pool. Each statement commits itself."""

    def __init__(self, of: SQLDatabase) -> None:
        sync = of.sync_engine
        pool = sync.pool.recreate()  # the application can't use it up
        own = sa.Engine(pool, sync.dialect, sync.url, hide_parameters=sync.hide_parameters)
        if of.dialect in MYSQL:  # where a statement can't say how long it waits for a row lock
            event.listen(own, "connect", _wait_briefly)
        own = own.execution_options(isolation_level="AUTOCOMMIT")
        self.engine = AsyncEngine(own) if isinstance(of.engine, AsyncEngine) else own
        self.sync_engine = own
        self.dialect, self.name, self.timeout = of.dialect, of.name, of.timeout
        self._known = of._known

    async def transact(self, script: Script[T]) -> T:
        return await self.read(script)

    async def aclose(self) -> None:
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            await in_thread(self.engine.dispose)


def _wait_briefly(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
    cursor.close()
