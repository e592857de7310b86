"""PostgreSQL's drivers: scripts on connections of psycopg and asyncpg, and the pools of both.

Neither driver is imported unless the caller uses it already, or gives a DSN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.scripts import (
    CountedChange,
    Query,
    Script,
    run_steps,
    run_steps_async,
    with_placeholders,
)
from feedapi_client.stores.threads import in_thread, transact_in_thread

T = TypeVar("T")

_POOL_SIZE = 8
"""Connections of a pool that the store opens by itself."""


class Database:
    """A pool of connections of one driver: of the caller, which the store does not close.

    Attributes:
        pool: the driver's, or the DSN.
        size: the largest number of connections; None: no limit.
        name: what to call the driver.
    """

    name = "psycopg"
    asyncio_only = True

    def __init__(self, pool: Any, size: int | None) -> None:
        self.pool = pool
        self.size = size

    async def transact(self, script: Script[T]) -> T:
        """Run a script in a transaction of the store's own."""
        raise NotImplementedError

    async def acquire(self) -> Any:
        """Take a connection out of the pool, on which each statement commits itself."""
        raise NotImplementedError

    async def release(self, connection: Any, *, broken: bool) -> None:
        """Give back what `acquire` returned."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close what the store has opened itself."""


def database_of(pool: Any) -> Database:
    """Return the database of a pool, of a DSN, or of what this function has returned.

    Raises:
        TypeError: it is neither.
        ImportError: a DSN, and no driver is installed.
    """
    if isinstance(pool, str):
        return _OwnPool(pool)
    if isinstance(pool, Database):
        return pool
    if is_of(pool, "psycopg_pool", "AsyncConnectionPool"):
        return _PsycopgPool(pool)
    if is_of(pool, "psycopg_pool", "ConnectionPool"):
        return _PsycopgThreadPool(pool)
    if is_of(pool, "asyncpg", "Pool"):
        return _AsyncpgPool(pool)
    raise TypeError(
        "a pool of PostgreSQL connections is an AsyncConnectionPool or a ConnectionPool of "
        f"psycopg_pool, a Pool of asyncpg, or a DSN, not a {type(pool).__name__}"
    )


def kind_of(connection: Any) -> tuple[str, str]:
    """Return the driver of a connection, and the name of its class there.

    Raises:
        StoreError: it is of no driver that is known.
    """
    for kind in (
        ("psycopg", "AsyncConnection"),
        ("psycopg", "Connection"),
        ("asyncpg", "Connection"),
    ):
        if is_of(connection, *kind):
            return kind
    raise StoreError(
        "transaction must be an AsyncConnection or a Connection of psycopg, or a Connection of "
        f"asyncpg, not a {type(connection).__name__}"
    )


def is_of(value: Any, module: str, kind: str) -> bool:
    """Return whether a value is of a class of a module that the program may have imported."""
    imported = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, kind))


async def run_on(connection: Any, script: Script[T]) -> T:
    """Run a script on a connection of a driver, and return its result. Raises as `kind_of`."""
    match kind_of(connection):
        case "psycopg", "AsyncConnection":
            return await _run_psycopg(connection, script)
        case "psycopg", _:
            run = partial(_run_psycopg_here, connection, script)
            return await in_callers_thread(run, otherwise=in_thread)
    return await _run_asyncpg(connection, script)


async def is_autocommit(connection: Any) -> bool:
    """Return whether the database would commit each statement by itself. Raises as `kind_of`.

    In psycopg's pipeline mode that is known only after the statements that were sent before.
    """
    driver, name = kind_of(connection)
    if driver == "asyncpg":
        return not connection.is_in_transaction()
    if not connection.autocommit:
        return False
    if name == "AsyncConnection":
        await _receive(connection)
    else:
        await in_callers_thread(partial(_receive_here, connection), otherwise=in_thread)
    idle = import_module("psycopg").pq.TransactionStatus.IDLE
    return bool(connection.info.transaction_status == idle)


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


class _PsycopgPool(Database):
    """An `AsyncConnectionPool` of psycopg."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, pool.max_size)
        self._restore: dict[int, bool] = {}

    async def transact(self, script: Script[T]) -> T:
        async with self.pool.connection() as connection, connection.transaction():
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


class _PsycopgThreadPool(Database):
    """A `ConnectionPool` of psycopg, used in worker threads."""

    asyncio_only = False

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, pool.max_size)
        self._restore: dict[int, bool] = {}

    @contextmanager
    def _begun(self) -> Iterator[Any]:
        with self.pool.connection() as connection, connection.transaction():
            yield connection

    async def transact(self, script: Script[T]) -> T:
        return await transact_in_thread(self._begun, partial(_run_psycopg_here, script=script))

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


class _AsyncpgPool(Database):
    """A `Pool` of asyncpg."""

    name = "asyncpg"

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, pool.get_max_size())

    async def transact(self, script: Script[T]) -> T:
        async with self.pool.acquire() as connection, connection.transaction():
            return await _run_asyncpg(connection, script)

    async def acquire(self) -> Any:
        return await self.pool.acquire()

    async def release(self, connection: Any, *, broken: bool) -> None:
        if broken:
            connection.terminate()
        await self.pool.release(connection)


class _OwnPool(Database):
    """A pool of the store's own, opened at its first use: of psycopg, else of asyncpg.

    Without prepared statements, which are lost behind a pooler in transaction mode.
    """

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, _POOL_SIZE)
        if not _is_installed("psycopg_pool"):
            if not _is_installed("asyncpg"):
                raise ImportError(
                    "PostgresCursorStore needs a driver: pip install 'feedapi-client[psycopg]'"
                )
            self.name = "asyncpg"
        self._lock = anyio.Lock()
        self._opened: Database | None = None

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

    async def _open(self) -> Database:
        async with self._lock:
            if self._opened is None:
                self._opened = await self._connect()
            return self._opened

    async def _connect(self) -> Database:
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
