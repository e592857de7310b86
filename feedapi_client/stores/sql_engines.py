"""SQLAlchemy's engines, connections and tables, for the SQL stores. Needs the extra ``sql``.

What a store does in a transaction is one synchronous function of a `Connection`. SQLAlchemy runs it
on an asynchronous driver (`run_sync`); for a synchronous one it runs in a thread as a whole.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session
from sqlalchemy.pool import SingletonThreadPool

from feedapi_client.errors import StoreError
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.scripts import CountedChange, Script, Step, run_steps, with_placeholders
from feedapi_client.stores.sql_dialects import MYSQL, lock_wait
from feedapi_client.stores.stored_format import check_noted, note_format
from feedapi_client.stores.tables import FORMATS, TABLES
from feedapi_client.stores.threads import in_thread, transact_in_thread

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
    "{text}": sa.UnicodeText().with_variant(mysql.LONGTEXT(), *MYSQL),
    "{bytes}": sa.LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL),
    "INTEGER": sa.Integer(),
    "BIGINT": sa.BigInteger(),
    "CHAR": sa.CHAR,
    "VARCHAR": sa.Unicode,
}


def check_engine(engine: Engine) -> None:
    """Check that it is an engine, and that all its threads see the same database.

    Raises:
        ValueError, TypeError
    """
    if isinstance(engine, AsyncEngine):
        return
    if not isinstance(engine, sa.Engine):
        raise TypeError(f"an Engine or an AsyncEngine is needed, not a {type(engine).__name__}")
    if isinstance(engine.pool, SingletonThreadPool):
        raise ValueError(
            "this engine keeps a database of SQLite in memory for each thread: create it with "
            "poolclass=sqlalchemy.StaticPool and connect_args={'check_same_thread': False}"
        )


def synchronous(engine: Engine) -> sa.Engine:
    """Return the engine that is behind an asynchronous one, or the engine itself."""
    return engine.sync_engine if isinstance(engine, AsyncEngine) else engine


# Functions of a connection


def run_script(connection: sa.Connection, script: Script[T]) -> T:
    """Run a script on a connection, and return its result."""
    style = _PLACEHOLDERS.get(connection.dialect.paramstyle, "%s")

    def execute(step: Step) -> Any:
        result = connection.exec_driver_sql(with_placeholders(step.sql, style), tuple(step[1]))
        if isinstance(step, CountedChange):
            return result.rowcount
        return result.fetchall() if result.returns_rows else []

    return run_steps(script, execute)


def is_autocommit(connection: sa.Connection) -> bool:
    """Return whether the database commits each statement, so that nothing can be rolled back.

    Asks the driver, which costs no round trip.
    """
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


async def transact(engine: Engine, work: Work[T]) -> T:
    """Call a function with a connection, in a transaction of its own."""
    if isinstance(engine, AsyncEngine):
        async with engine.begin() as connection:
            return await connection.run_sync(work)

    return await transact_in_thread(engine.begin, work)


async def within(transaction: Any, table: sa.Table, work: Work[T]) -> T:
    """Call a function with the caller's connection, or with that of a session for the table.

    Raises:
        StoreError: it is neither.
    """
    # A session with several engines (`binds=`, `get_bind`) chooses by the statement.
    change: Any = {"clause": sa.update(table)}
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


class LeaseConnections:
    """Connections of the store's own, outside of the application's pool.

    Each statement commits itself: a process that is paused between two of them holds no lock.
    SQLite has one writer at a time, and no server that would end a statement: there one connection
    of the application's engine is used, in a transaction.
    """

    def __init__(self, engine: Engine) -> None:
        sync = synchronous(engine)
        self._transacts = sync.dialect.name == "sqlite"
        self._engine = engine
        if not self._transacts:
            pool = sync.pool.recreate()  # the application can't use it up
            own = sa.Engine(pool, sync.dialect, sync.url, hide_parameters=sync.hide_parameters)
            own = own.execution_options(isolation_level="AUTOCOMMIT")
            self._engine = AsyncEngine(own) if isinstance(engine, AsyncEngine) else own
        self._bound: float | None = None
        self._lock = threading.Lock()

    async def acquire(self) -> AnyConnection:
        """See `Connections.acquire`."""
        self._bound = None
        if isinstance(self._engine, AsyncEngine):
            return await self._engine.connect()
        return await in_thread(self._engine.connect)

    async def run(self, connection: AnyConnection, script: Script[T], lock_seconds: float) -> T:
        """See `Connections.run`."""

        def work(connection: sa.Connection) -> T:
            if self._transacts:
                with connection.begin():
                    return run_script(connection, script)
            if self._bound != lock_seconds and connection.dialect.name in MYSQL:
                wait = lock_wait(connection.dialect.name, lock_seconds)
                connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {wait}")
            self._bound = lock_seconds
            return run_script(connection, script)

        if isinstance(connection, AsyncConnection):
            return await connection.run_sync(work)
        return await in_thread(partial(self._one_at_a_time, work, connection), abandon=True)

    async def release(self, connection: AnyConnection, *, broken: bool) -> None:
        """See `Connections.release`."""

        def work(connection: sa.Connection) -> None:
            if broken and not self._transacts and not connection.invalidated:
                connection.invalidate()
            connection.close()

        if isinstance(connection, AsyncConnection):
            await connection.run_sync(work)
            if isinstance(self._engine, AsyncEngine) and not self._transacts:
                await self._engine.dispose()
            return

        def leave() -> None:
            self._one_at_a_time(work, connection)
            if not self._transacts:
                synchronous(self._engine).dispose()

        if broken:  # a statement that nobody waits for any more may still use it
            threading.Thread(target=leave, daemon=True).start()
        else:
            await in_thread(leave)

    def _one_at_a_time(self, work: Work[T], connection: sa.Connection) -> T:
        with self._lock:
            return work(connection)


# Tables


def table_in(metadata: sa.MetaData, kind: str, name: str, schema: str | None) -> sa.Table:
    """Return a table of `TABLES`, also if another store has put it into the same metadata before.

    Arguments:
        kind, name: what it is called there, and here.
    """
    if (found := metadata.tables.get(f"{schema}.{name}" if schema else name)) is not None:
        return found
    columns, key = (TABLES | FORMATS)[kind]
    keys = key.split(", ")
    return sa.Table(
        name,
        metadata,
        *(
            sa.Column(
                column,
                _type(declared.removesuffix(" NOT NULL")),
                primary_key=column in keys,
                autoincrement=False,
                nullable="NOT NULL" not in declared,
            )
            for column, declared in columns.items()
        ),
        schema=schema,
        **_TABLE_OPTIONS,
    )


def _type(declared: str) -> Any:
    if sized := re.fullmatch(r"(\w+)\((\d+)\)", declared):
        return _TYPES[sized[1]](int(sized[2]))
    return _TYPES[declared]


def quoted_names(engine: Engine, table: str, schema: str | None) -> Callable[[str], str]:
    """Return what `PositionScripts` takes; the schema is the one that the engine maps it to."""
    preparer, schema = engine.dialect.identifier_preparer, _mapped(synchronous(engine), schema)
    prefix = f"{preparer.quote_schema(schema)}." if schema else ""
    return lambda suffix: prefix + preparer.quote(f"{table}{suffix}")


def _mapped(to: sa.Engine | sa.Connection, schema: str | None) -> str | None:
    schemas = to.get_execution_options().get("schema_translate_map") or {}
    mapped: str | None = schemas.get(schema, schema)
    return mapped


def _quoted(connection: sa.Connection, table: sa.Table) -> str:
    schema, preparer = _mapped(connection, table.schema), connection.dialect.identifier_preparer
    prefix = f"{preparer.quote_schema(schema)}." if schema else ""
    return prefix + preparer.quote(table.name)


def create_missing(
    connection: sa.Connection, tables: list[sa.Table], formats: sa.Table, newest: int
) -> None:
    """Create the tables that are not there, and note the format of the first one."""
    tables[0].metadata.create_all(connection, tables=[*tables, formats])
    run_script(connection, note_format(_quoted(connection, formats), tables[0].name, newest))


def check_format(
    connection: sa.Connection, table: sa.Table, formats: sa.Table, newest: int
) -> None:
    """Check the noted format of a table. Without a note it is the first one.

    Raises:
        StoreError: a newer version of this package wrote it.
    """
    schema = _mapped(connection, formats.schema)
    if sa.inspect(connection).has_table(formats.name, schema=schema):
        run_script(connection, check_noted(_quoted(connection, formats), table.name, newest))


def database_message(engine: Engine, error: BaseException) -> str:
    """Return the first line of the database's own message.

    It holds neither the statement and its parameters, which may be payloads, nor the password.
    """
    foreign = getattr(error, "orig", None) or error
    text = next(iter(str(foreign).strip().splitlines()), "") or type(foreign).__name__
    password = synchronous(engine).url.password
    return text.replace(str(password), "***") if password else text
