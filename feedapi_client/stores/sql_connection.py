"""Properties of SQLAlchemy's connections, transactions and errors, for the SQL stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.save_attempts import is_conflict, is_lock_timeout
from feedapi_client.stores.sql_threads import ThreadConnection, ThreadEngine, is_of_one_thread
from feedapi_client.stores.threads import in_thread

_ATTEMPTS = 10
_MYSQL = ("mysql", "mariadb")

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


async def connection_of(transaction: Any, feed: FeedKey | None = None) -> AnyConnection:
    """Return the connection of the caller's connection or session.

    Raises:
        StoreError: it is neither.
    """
    if isinstance(transaction, (AsyncSession, async_scoped_session)):
        transaction = await transaction.connection()
    elif isinstance(transaction, Session):
        transaction = await in_callers_thread(transaction.connection, otherwise=in_thread)
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


def lock_timeout(dialect: str, seconds: float) -> sa.TextClause | None:
    """Return the statement that bounds the wait for row locks in a session; None if it has none."""
    if dialect == "postgresql":
        return sa.text(f"SET lock_timeout = {max(1, round(seconds * 1000))}")
    if dialect in _MYSQL:
        return sa.text(f"SET SESSION innodb_lock_wait_timeout = {max(1, round(seconds))}")
    if dialect == "mssql":
        return sa.text(f"SET LOCK_TIMEOUT {max(1, round(seconds * 1000))}")
    return None


async def bound_transaction(connection: AnyConnection, locks: float, idle: float) -> None:
    """Bound how long a transaction of the store's own waits for row locks, and holds its own.

    PostgreSQL ends one that has been idle for so many seconds: its process is paused, or its
    machine is gone. Other databases have no such limit for one transaction.
    """
    if connection.dialect.name == "postgresql":
        limits = {"lock_timeout": locks, "idle_in_transaction_session_timeout": idle}
        columns = ", ".join(
            f"set_config('{name}', '{max(1, round(seconds * 1000))}ms', true)"
            for name, seconds in limits.items()
        )
        await connection.execute(sa.text(f"SELECT {columns}"))


@asynccontextmanager
async def bounded_lock_waits(connection: AnyConnection, seconds: float) -> AsyncIterator[None]:
    """Bound the wait for row locks within the caller's transaction, and restore what was set.

    Where PostgreSQL has ended the transaction it restores that itself.
    """
    dialect = connection.dialect.name
    if dialect == "postgresql":
        setting, set_it = "current_setting('lock_timeout')", "SET LOCAL lock_timeout = '{}'"
        value: object = f"{max(1, round(seconds * 1000))}ms"
    elif dialect in _MYSQL:
        setting = "@@SESSION.innodb_lock_wait_timeout"
        set_it, value = "SET SESSION innodb_lock_wait_timeout = {}", max(1, round(seconds))
    else:
        yield
        return
    before = (await connection.execute(sa.text(f"SELECT {setting}"))).scalar_one()
    await connection.execute(sa.text(set_it.format(value)))
    try:
        yield
    except DBAPIError:
        if dialect != "postgresql":
            await connection.execute(sa.text(set_it.format(before)))
        raise
    await connection.execute(sa.text(set_it.format(before)))


class OwnConnection:
    """A connection of the store's own, outside of the application's pool.

    Each statement commits itself: a process that is paused between two of them holds no lock.
    SQLite has one writer at a time, and no server that would end a statement: there one connection
    of the application's engine is used, in a transaction.

    Concurrency: operations wait for each other.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._transacts = engine.dialect.name == "sqlite"
        self._engine = engine if self._transacts else _with_own_pool(engine)
        self._lock = anyio.Lock()
        self._connection: AnyConnection | None = None
        self._bound: float | None = None

    async def run(
        self,
        work: Callable[[AnyConnection], Awaitable[T]],
        *,
        lock_seconds: float,
        keep: Callable[[], bool],
    ) -> T:
        """Return what `work` returns. After a deadlock it is called again.

        Arguments:
            work: executes statements.
            lock_seconds: the longest wait of a statement for another's row lock.
            keep: whether the connection stays open for the next operation.
        """
        async with self._lock:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._attempt(work, lock_seconds, keep)
                except DBAPIError as error:
                    if attempt == _ATTEMPTS or not is_conflict(error):
                        raise
            raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connection, if it is open. The next operation opens another one."""
        async with self._lock:
            await self._drop()

    async def _attempt(
        self,
        work: Callable[[AnyConnection], Awaitable[T]],
        lock_seconds: float,
        keep: Callable[[], bool],
    ) -> T:
        try:
            connection = await self._open(lock_seconds)
            if self._transacts:
                async with connection.begin():
                    result = await work(connection)
            else:
                result = await work(connection)
        except BaseException as error:
            passes = isinstance(error, DBAPIError) and (
                is_conflict(error) or is_lock_timeout(error)
            )
            if not passes:
                await self._drop(broken=True)
            raise
        if not keep():
            await self._drop()
        return result

    async def _open(self, lock_seconds: float) -> AnyConnection:
        if self._connection is None:
            self._connection, self._bound = await self._engine.connect(), None
        if self._bound != lock_seconds:
            statement = lock_timeout(self._engine.dialect.name, lock_seconds)
            if statement is not None:
                await self._connection.execute(statement)
            self._bound = lock_seconds
        return self._connection

    async def _drop(self, *, broken: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
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
