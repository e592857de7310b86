"""PostgreSQL's drivers: scripts on connections of psycopg and asyncpg, and the pools of both.

Neither driver is imported unless the caller uses it already, or gives a DSN.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import anyio

from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.scripts import (
    CountedChange,
    Query,
    Script,
    run_steps,
    run_steps_async,
    with_placeholders,
)
from feedapi_client.stores.threads import in_thread

T = TypeVar("T")

_POOL_SIZE = 8
"""Connections of a pool that the store opens by itself."""


class Database(Protocol):
    """A pool of connections, whatever the driver."""

    pool: Any
    name: str
    """What to call the driver."""
    asyncio_only: bool
    size: int | None
    """The largest number of connections; None: no limit."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Return a transaction of the store's own; it gives the driver's connection."""
        ...

    async def transact(self, script: Script[T]) -> T:
        """Run a script in a transaction of the store's own."""
        ...

    async def acquire(self) -> Any:
        """Take a connection out of the pool, on which each statement commits itself."""
        ...

    async def release(self, connection: Any, *, broken: bool) -> None:
        """Give back what `acquire` returned."""
        ...

    async def aclose(self) -> None:
        """Close what the store has opened itself."""
        ...


def database_of(pool: Any) -> Database:
    """Return the database of a pool, of a DSN, or of what this function has returned.

    Raises:
        TypeError: it is neither.
        ImportError: a DSN, and no driver is installed.
    """
    if isinstance(pool, str):
        return _OwnPool(pool)
    if isinstance(pool, (_OwnPool, _PsycopgPool, _PsycopgThreadPool, _AsyncpgPool)):
        return pool
    psycopg_pool, asyncpg = sys.modules.get("psycopg_pool"), sys.modules.get("asyncpg")
    if psycopg_pool is not None:
        if isinstance(pool, psycopg_pool.AsyncConnectionPool):
            return _PsycopgPool(pool)
        if isinstance(pool, psycopg_pool.ConnectionPool):
            return _PsycopgThreadPool(pool)
    if asyncpg is not None and isinstance(pool, asyncpg.Pool):
        return _AsyncpgPool(pool)
    raise TypeError(
        "a pool of PostgreSQL connections is an AsyncConnectionPool or a ConnectionPool of "
        f"psycopg_pool, a Pool of asyncpg, or a DSN, not a {type(pool).__name__}"
    )


def runner_on(connection: Any) -> Callable[[Script[Any]], Awaitable[Any]] | None:
    """Return the coroutine function that runs a script on the caller's connection.

    None: the object is no connection of a driver that is known.
    """
    psycopg, asyncpg = sys.modules.get("psycopg"), sys.modules.get("asyncpg")
    if psycopg is not None:
        if isinstance(connection, psycopg.AsyncConnection):
            return partial(_run_psycopg, connection)
        if isinstance(connection, psycopg.Connection):
            return partial(_run_psycopg_of_caller, connection)
    if asyncpg is not None and isinstance(connection, asyncpg.Connection):
        return partial(_run_asyncpg, connection)
    return None


def needs_asyncio(connection: Any) -> bool:
    """Return whether a connection of the caller works on asyncio only."""
    psycopg = sys.modules.get("psycopg")
    return psycopg is None or not isinstance(connection, psycopg.Connection)


async def is_autocommit(connection: Any) -> bool:
    """Return whether the database would commit each statement by itself.

    In psycopg's pipeline mode that is known only after the statements that were sent before.
    """
    psycopg = sys.modules.get("psycopg")
    if psycopg is None or not isinstance(connection, psycopg.BaseConnection):
        return not connection.is_in_transaction()
    if not connection.autocommit:
        return False
    if isinstance(connection, psycopg.AsyncConnection):
        await _receive(connection)
    else:
        await in_callers_thread(partial(_receive_here, connection), otherwise=in_thread)
    return bool(connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE)


# Scripts on connections. psycopg's raw cursors take PostgreSQL's own parameters, as asyncpg does.


def _numbered(step: Query | CountedChange) -> str:
    return with_placeholders(step.sql, "$")


async def _receive(connection: Any) -> None:
    """In pipeline mode receive the results of all statements: a pipeline within does that."""
    if connection.info.pipeline_status:
        async with connection.pipeline():
            pass


def _receive_here(connection: Any) -> None:
    if connection.info.pipeline_status:
        with connection.pipeline():
            pass


async def _run_psycopg(connection: Any, script: Script[T]) -> T:
    import psycopg
    from psycopg.rows import tuple_row

    async def execute(step: Query | CountedChange) -> Any:
        async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(_numbered(step).encode(), step.parameters or None)
            await _receive(connection)
            if isinstance(step, CountedChange):
                return cursor.rowcount
            return await cursor.fetchall() if cursor.description else []

    return await run_steps_async(script, execute)


def _run_psycopg_here(connection: Any, script: Script[T]) -> T:
    import psycopg
    from psycopg.rows import tuple_row

    def execute(step: Query | CountedChange) -> Any:
        with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(_numbered(step).encode(), step.parameters or None)
            _receive_here(connection)
            if isinstance(step, CountedChange):
                return cursor.rowcount
            return cursor.fetchall() if cursor.description else []

    return run_steps(script, execute)


async def _run_psycopg_of_caller(connection: Any, script: Script[T]) -> T:
    run = partial(_run_psycopg_here, connection, script)
    return await in_callers_thread(run, otherwise=in_thread)


async def _run_asyncpg(connection: Any, script: Script[T]) -> T:
    record = import_module("asyncpg").Record

    async def execute(step: Query | CountedChange) -> Any:
        sql = _numbered(step)
        if isinstance(step, CountedChange):
            status = await connection.execute(sql, *step.parameters)
            return int(status.rpartition(" ")[2])
        return list(await connection.fetch(sql, *step.parameters, record_class=record))

    return await run_steps_async(script, execute)


# Pools


class _PsycopgPool:
    """An `AsyncConnectionPool` of psycopg."""

    name = "psycopg"
    asyncio_only = True

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.size: int | None = pool.max_size
        self._restore: dict[int, bool] = {}

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.pool.connection() as connection, connection.transaction():
            yield connection

    async def transact(self, script: Script[T]) -> T:
        async with self.begin() as connection:
            return await _run_psycopg(connection, script)

    async def acquire(self) -> Any:
        connection = await self.pool.getconn()
        self._restore[id(connection)] = connection.autocommit
        await connection.set_autocommit(True)
        return connection

    async def release(self, connection: Any, *, broken: bool) -> None:
        autocommit = self._restore.pop(id(connection))
        if broken:
            await connection.close()
        elif not connection.closed:
            await connection.set_autocommit(autocommit)
        await self.pool.putconn(connection)

    async def aclose(self) -> None:
        """Leave the caller's pool open."""


class _PsycopgThreadPool:
    """A `ConnectionPool` of psycopg, used in worker threads."""

    name = "psycopg"
    asyncio_only = False

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.size: int | None = pool.max_size
        self._restore: dict[int, bool] = {}

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        entered = self.pool.connection()
        connection = await in_thread(entered.__enter__)
        try:
            transaction = connection.transaction()
            await in_thread(transaction.__enter__)
            try:
                yield connection
            except BaseException as error:
                await self._leave(transaction, error)
                raise
            await self._leave(transaction, None)
        except BaseException as error:
            await self._leave(entered, error)
            raise
        await self._leave(entered, None)

    @staticmethod
    async def _leave(context: Any, error: BaseException | None) -> None:
        kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
        with anyio.CancelScope(shield=True):
            await in_thread(lambda: context.__exit__(kind, error, traceback))

    async def transact(self, script: Script[T]) -> T:
        def work() -> T:
            with self.pool.connection() as connection, connection.transaction():
                return _run_psycopg_here(connection, script)

        # The thread gives the connection back also when nobody waits for it any more.
        return await in_thread(work, abandon=True)

    async def acquire(self) -> Any:
        connection = await in_thread(self.pool.getconn)
        self._restore[id(connection)] = connection.autocommit
        connection.autocommit = True  # sends nothing
        return connection

    async def release(self, connection: Any, *, broken: bool) -> None:
        autocommit = self._restore.pop(id(connection))
        if broken:
            connection.close()
        elif not connection.closed:
            connection.autocommit = autocommit
        await in_thread(lambda: self.pool.putconn(connection))

    async def aclose(self) -> None:
        """Leave the caller's pool open."""


class _AsyncpgPool:
    """A `Pool` of asyncpg."""

    name = "asyncpg"
    asyncio_only = True

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.size: int | None = pool.get_max_size()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.pool.acquire() as connection, connection.transaction():
            yield connection

    async def transact(self, script: Script[T]) -> T:
        async with self.begin() as connection:
            return await _run_asyncpg(connection, script)

    async def acquire(self) -> Any:
        return await self.pool.acquire()

    async def release(self, connection: Any, *, broken: bool) -> None:
        if broken:
            connection.terminate()
        await self.pool.release(connection)

    async def aclose(self) -> None:
        """Leave the caller's pool open."""


class _OwnPool:
    """A pool of the store's own, opened at its first use: of psycopg, else of asyncpg.

    Without prepared statements, which are lost behind a pooler in transaction mode.
    """

    asyncio_only = True
    size: int | None = _POOL_SIZE

    def __init__(self, dsn: str) -> None:
        if _is_installed("psycopg_pool"):
            self.name = "psycopg"
        elif _is_installed("asyncpg"):
            self.name = "asyncpg"
        else:
            raise ImportError(
                "PostgresCursorStore needs a driver: pip install 'feedapi-client[psycopg]'"
            )
        self.pool = dsn
        self._lock = anyio.Lock()
        self._opened: _PsycopgPool | _AsyncpgPool | None = None

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with (await self._open()).begin() as connection:
            yield connection

    async def transact(self, script: Script[T]) -> T:
        return await (await self._open()).transact(script)

    async def acquire(self) -> Any:
        return await (await self._open()).acquire()

    async def release(self, connection: Any, *, broken: bool) -> None:
        if self._opened is not None:
            await self._opened.release(connection, broken=broken)

    async def aclose(self) -> None:
        async with self._lock:
            opened, self._opened = self._opened, None
            if opened is not None:
                await opened.pool.close()

    async def _open(self) -> _PsycopgPool | _AsyncpgPool:
        async with self._lock:
            if self._opened is None:
                self._opened = await self._connect()
            return self._opened

    async def _connect(self) -> _PsycopgPool | _AsyncpgPool:
        if self.name == "asyncpg":
            asyncpg = import_module("asyncpg")
            return _AsyncpgPool(
                await asyncpg.create_pool(
                    self.pool, min_size=0, max_size=_POOL_SIZE, statement_cache_size=0
                )
            )
        from psycopg_pool import AsyncConnectionPool

        # A connection of a server that went away is replaced before it is used.
        pool = AsyncConnectionPool(
            self.pool,
            min_size=0,
            max_size=_POOL_SIZE,
            open=False,
            check=AsyncConnectionPool.check_connection,
            kwargs={"prepare_threshold": None},
        )
        await pool.open()
        return _PsycopgPool(pool)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:
        return False  # blocked by the program
