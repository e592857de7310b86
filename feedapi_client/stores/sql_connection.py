"""Properties of SQLAlchemy's connections, transactions and errors, for the SQL stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.scripts import (
    CountedChange,
    Script,
    StatementRows,
    run_steps_async,
    with_placeholders,
)
from feedapi_client.stores.sql_dialects import MYSQL
from feedapi_client.stores.sql_threads import ThreadConnection, ThreadEngine, is_of_one_thread
from feedapi_client.stores.threads import in_thread

AnyConnection = AsyncConnection | ThreadConnection
AnyEngine = AsyncEngine | ThreadEngine

T = TypeVar("T")


def awaited(engine: AsyncEngine | sa.Engine) -> AnyEngine:
    """Return the engine, or one with awaited methods that uses a synchronous one in threads.

    Raises:
        ValueError: threads of the engine would not see the same database.
        TypeError: it is no engine.
    """
    if isinstance(engine, AsyncEngine):
        return engine
    if not isinstance(engine, sa.Engine):
        raise TypeError(f"an Engine or an AsyncEngine is needed, not a {type(engine).__name__}")
    if is_of_one_thread(engine):
        raise ValueError(
            "this engine keeps a database of SQLite in memory for each thread: create it with "
            "poolclass=sqlalchemy.StaticPool and connect_args={'check_same_thread': False}"
        )
    return ThreadEngine(engine)


async def connection_of(
    transaction: Any, table: sa.Table, feed: FeedKey | None = None
) -> AnyConnection:
    """Return the connection of the caller's connection or session that changes the table.

    Raises:
        StoreError: it is neither.
    """
    # A session with several engines (`binds=`, `get_bind`) chooses by the statement.
    change: Any = {"clause": sa.update(table)}
    if isinstance(transaction, (AsyncSession, async_scoped_session)):
        transaction = await transaction.connection(bind_arguments=change)
    elif isinstance(transaction, Session):
        connect = partial(transaction.connection, bind_arguments=change)
        transaction = await in_callers_thread(connect, otherwise=in_thread)
    if isinstance(transaction, sa.Connection):
        return ThreadConnection(transaction)
    if not isinstance(transaction, (AsyncConnection, ThreadConnection)):
        raise StoreError(
            "transaction must be an AsyncConnection or an AsyncSession, a Connection or a "
            f"Session, not a {type(transaction).__name__}",
            feed=None if feed is None else feed.url,
        )
    return transaction


async def is_autocommit(connection: AnyConnection) -> bool:
    """Return whether the database commits each statement, so that nothing can be rolled back.

    Asks the driver, which costs no round trip.
    """
    if connection.sync_connection is None:
        return False
    pooled = connection.sync_connection.connection
    if pooled.dbapi_connection is None:
        return False
    try:
        autocommit = connection.dialect.detect_autocommit_setting(pooled.dbapi_connection)
    except NotImplementedError:
        return False  # a dialect that can't say
    if autocommit and connection.dialect.name == "sqlite":
        # SQLAlchemy's recipe for savepoints in SQLite switches the driver to autocommit and emits
        # BEGIN when a transaction begins, which is at the latest with this statement.
        await connection.execute(sa.select(sa.literal(1)))
        return not getattr(pooled.driver_connection, "in_transaction", True)
    return autocommit


def _lock_timeout(dialect: str, seconds: float) -> sa.TextClause | None:
    """Return the statement that bounds the wait for row locks in a session.

    None where statements do it themselves, or nothing can.
    """
    if dialect in MYSQL:
        return sa.text(f"SET SESSION innodb_lock_wait_timeout = {max(1, round(seconds))}")
    return None


async def run_on(connection: AnyConnection, script: Script[T]) -> T:
    """Run a script on a connection, and return its result.

    A step may also be a statement of SQLAlchemy.
    """

    async def execute(step: Any) -> Any:
        if isinstance(step, sa.Executable):
            return await connection.execute(step)
        sql = sa.text(with_placeholders(step.sql.replace(":", "\\:"), ":p"))
        if isinstance(step, StatementRows):
            return await connection.execute(sql, [_parameters(row) for row in step.rows])
        result = await connection.execute(sql, _parameters(step.parameters))
        if isinstance(step, CountedChange):
            return result.rowcount
        without_rows = isinstance(result, sa.CursorResult) and not result.returns_rows
        return [] if without_rows else result.all()

    return await run_steps_async(script, execute)


def _parameters(values: Sequence[Any]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(values, 1)}


def named(engine: AnyEngine, table: str, schema: str | None) -> Callable[[str], str]:
    """Return what `PositionScripts` takes; the schema is the one that the engine maps it to."""
    preparer = engine.dialect.identifier_preparer
    schemas = engine.sync_engine.get_execution_options().get("schema_translate_map") or {}
    schema = schemas.get(schema, schema)
    prefix = f"{preparer.quote_schema(schema)}." if schema else ""
    return lambda suffix: prefix + preparer.quote(f"{table}{suffix}")


class LeaseConnections:
    """Connections of the store's own, outside of the application's pool.

    Each statement commits itself: a process that is paused between two of them holds no lock.
    SQLite has one writer at a time, and no server that would end a statement: there one connection
    of the application's engine is used, in a transaction.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._transacts = engine.dialect.name == "sqlite"
        self._engine = engine if self._transacts else _with_own_pool(engine)
        self._bound: float | None = None

    async def acquire(self) -> AnyConnection:
        """See `Connections.acquire`."""
        self._bound = None
        return await self._engine.connect()

    async def run(self, connection: AnyConnection, script: Script[T], lock_seconds: float) -> T:
        """See `Connections.run`."""
        if self._transacts:
            async with connection.begin():
                return await run_on(connection, script)
        if self._bound != lock_seconds:
            if (statement := _lock_timeout(self._engine.dialect.name, lock_seconds)) is not None:
                await connection.execute(statement)
            self._bound = lock_seconds
        return await run_on(connection, script)

    async def release(self, connection: AnyConnection, *, broken: bool) -> None:
        """See `Connections.release`."""
        if broken and not self._transacts and not connection.invalidated:
            await connection.invalidate()
        await connection.close()
        if not self._transacts:
            await self._engine.dispose()


def _with_own_pool(engine: AnyEngine) -> AnyEngine:
    """Return an engine that connects as the given one does, whose pool others can't use up."""
    sync = engine.sync_engine
    own = sa.Engine(
        sync.pool.recreate(), sync.dialect, sync.url, hide_parameters=sync.hide_parameters
    )
    own = own.execution_options(isolation_level="AUTOCOMMIT")
    return AsyncEngine(own) if isinstance(engine, AsyncEngine) else ThreadEngine(own)


def database_message(engine: AnyEngine | sa.Engine, error: BaseException) -> str:
    """Return the first line of the database's own message.

    It holds neither the statement and its parameters, which may be payloads, nor the password.
    """
    foreign = getattr(error, "orig", None) or error
    text = next(iter(str(foreign).strip().splitlines()), "") or type(foreign).__name__
    sync = engine if isinstance(engine, sa.Engine) else engine.sync_engine
    password = sync.url.password
    return text.replace(str(password), "***") if password else text
