"""Cursors in PostgreSQL, through psycopg or asyncpg, which are imported only if they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.scripted import Database, ServerStore
from feedapi_client.stores.scripts import (
    CountedChange,
    Script,
    Step,
    is_conflict,
    is_lock_timeout,
    run_on_cursors,
    run_steps_async,
    with_placeholders,
)
from feedapi_client.stores.tables import CURSORS
from feedapi_client.stores.threads import in_callers_thread, in_thread, transact_in_thread

if TYPE_CHECKING:
    from typing import TypeAlias

    import asyncpg  # type: ignore[import-untyped]
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    Pool: TypeAlias = AsyncConnectionPool[Any] | ConnectionPool[Any] | asyncpg.Pool | str

T = TypeVar("T")

_POOL_SIZE = 8
"""Connections of a pool that the store opens by itself."""


class PostgresCursorStore(ServerStore):
    """Keeps positions in a table of the application's PostgreSQL database, without SQLAlchemy.

    The tables are those of `SQLAlchemyCursorStore`: one store can be exchanged for the other.

    Exactly once: pass the connection that writes the effects as ``transaction``: psycopg's
    `AsyncConnection` or `Connection`, or asyncpg's `Connection`, whichever driver the pool is of.
    The save is then part of the open transaction; asyncpg needs ``async with
    connection.transaction()``. A save that is refused leaves nothing of itself in the transaction.
    At stricter levels than READ COMMITTED the database may report a conflict between two consumers
    by itself: a `StoreError` whose cause is the driver's error.

    Threads: psycopg's `Connection` and `ConnectionPool` are used in worker threads. While ``await
    store.save(transaction=connection)`` runs, the caller must not use that connection.

    Leases (`LeaseStore`) keep two connections of the pool while an instance has joined.

    Arguments:
        pool: an `AsyncConnectionPool` or a `ConnectionPool` of psycopg, or a `Pool` of asyncpg:
            the caller's, open, which the store does not close. Or a DSN, for a pool of the store's
            own: of psycopg, or of asyncpg where psycopg_pool is not installed. ``async with
            store:`` closes that one.
        table, schema: name of the table; the others' are the same with ``_journal``, ``_done``,
            ``_instances`` and ``_leases``.
        journal: keep a history of positions.
        timeout: as `SQLAlchemyCursorStore` takes it.

    Cancellation: a save that has begun is finished.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        table: str = "feedapi_cursors",
        schema: str | None = None,
        journal: Journal | None = None,
        timeout: float = 30.0,
    ) -> None:
        database = PostgresDatabase(pool, schema, timeout)
        leases = [_KeptConnection(database) for _ in range(2)]
        super().__init__(database, table, journal, *leases)
        self.database: PostgresDatabase = database
        self.pool = pool
        self.schema = schema

    def __repr__(self) -> str:
        table = self.database.quoted(self._tables[CURSORS])
        return f"<PostgresCursorStore {self.database.driver}, table {table}>"


class PostgresDatabase(Database):
    dialect = "postgresql"
    name = "(postgresql)"

    def __init__(self, pool: Any, schema: str | None, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._schema = schema
        self._given = pool
        self._pool: Any = None if isinstance(pool, str) else pool
        self._lock = anyio.Lock()
        if isinstance(pool, str):
            if not _is_installed("psycopg_pool") and not _is_installed("asyncpg"):
                raise ImportError(
                    "PostgresCursorStore needs a driver: pip install 'feedapi-client[psycopg]'"
                )
            self.driver = "psycopg" if _is_installed("psycopg_pool") else "asyncpg"
        elif not (driver := _driver_of(pool, "Pool")):
            raise TypeError(
                "a pool of PostgreSQL connections is an AsyncConnectionPool or a ConnectionPool "
                f"of psycopg_pool, a Pool of asyncpg, or a DSN, not a {type(pool).__name__}"
            )
        else:
            self.driver = driver

    @property
    def place(self) -> object:
        return self._given

    def quoted(self, table: str) -> str:
        named = (self._schema, table)
        return ".".join('"' + part.replace('"', '""') + '"' for part in named if part)

    async def transact(self, script: Script[T]) -> T:
        pool = await self._opened()
        if self.driver == "psycopg in threads":
            return await transact_in_thread(
                partial(_begun, pool), partial(_run_psycopg_here, script=script)
            )
        take = pool.acquire if self.driver == "asyncpg" else pool.connection
        async with take() as connection, connection.transaction():
            return await self.run(connection, script)

    async def within(self, transaction: Any, script: Script[T]) -> T:
        await _check_transaction(transaction)
        return await self.run(transaction, script)

    async def run(self, connection: Any, script: Script[T]) -> T:
        driver = _driver_of(connection, "Connection")
        if driver == "asyncpg":
            return await _run_asyncpg(connection, script)
        if driver == "psycopg":
            return await _run_psycopg(connection, script)
        run = partial(_run_psycopg_here, connection, script)
        return await in_callers_thread(run, otherwise=in_thread)

    async def acquire(self) -> Any:
        """Take a connection out of the pool, on which each statement commits itself."""
        pool = await self._opened()
        if self.driver == "asyncpg":
            return await pool.acquire()
        if self.driver == "psycopg":
            connection = await pool.getconn()
            await connection.set_autocommit(True)
        else:
            connection = await in_thread(pool.getconn)
            connection.autocommit = True  # sends nothing
        return connection

    async def throw_away(self, connection: Any) -> None:
        """Give the pool room for another connection: this one may be broken, and commits itself."""
        if self.driver == "asyncpg":
            connection.terminate()
            await self._pool.release(connection)
        elif self.driver == "psycopg":
            await connection.close()
            await self._pool.putconn(connection)
        else:
            connection.close()
            await in_thread(partial(self._pool.putconn, connection))

    # The pool

    async def aclose(self) -> None:
        if isinstance(self._given, str):
            async with self._lock:
                opened, self._pool = self._pool, None
                if opened is not None:
                    await opened.close()

    async def _opened(self) -> Any:
        if self._pool is not None:
            return self._pool
        async with self._lock:
            if self._pool is None:
                self._pool = await self._open(self._given)
            return self._pool

    async def _open(self, dsn: str) -> Any:
        """Open a pool without prepared statements, which are lost behind a pooler."""
        if self.driver == "asyncpg":
            create = import_module("asyncpg").create_pool
            return await create(dsn, min_size=0, max_size=_POOL_SIZE, statement_cache_size=0)
        from psycopg_pool import AsyncConnectionPool

        # A connection of a server that went away is replaced before it is used.
        pool = AsyncConnectionPool(
            dsn,
            min_size=0,
            max_size=_POOL_SIZE,
            open=False,
            check=AsyncConnectionPool.check_connection,
            kwargs={"prepare_threshold": None},
        )
        await pool.open()
        return pool

    def text_of(self, error: Exception) -> str:
        """See `Database.text_of`: other lines may quote values, and the driver's texts the DSN."""
        if not getattr(error, "sqlstate", None):
            return ""
        return next(iter(str(error).strip().splitlines()), "")


class _KeptConnection(Database):
    """A connection of the pool for leases. Scripts wait for each other."""

    dialect = "postgresql"
    name = PostgresDatabase.name

    def __init__(self, database: PostgresDatabase) -> None:
        self.timeout = database.timeout
        self._database = database
        self._lock = anyio.Lock()
        self._connection: Any = None

    async def transact(self, script: Script[T]) -> T:
        async with self._lock:
            if self._connection is None:
                self._connection = await self._database.acquire()
            try:
                return await self._database.run(self._connection, script)
            except BaseException as error:
                waited = isinstance(error, Exception) and (
                    is_conflict(error) or is_lock_timeout(error)
                )
                if not waited:
                    await self._drop()
                raise

    async def aclose(self) -> None:
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await self._database.throw_away(connection)

    def text_of(self, error: Exception) -> str:
        return self._database.text_of(error)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:
        return False  # blocked by the program


def _driver_of(value: Any, kind: str) -> str:
    """Return the driver of a "Pool" or a "Connection", which is not imported for that; or ""."""
    for each in type(value).__mro__:
        library = each.__module__.partition(".")[0]
        if each.__name__.removesuffix("Proxy").endswith(kind):
            if library == "asyncpg":
                return library
            if library in ("psycopg", "psycopg_pool"):
                return "psycopg" if each.__name__.startswith("Async") else "psycopg in threads"
    return ""


async def _check_transaction(connection: Any) -> None:
    driver = _driver_of(connection, "Connection")
    if not driver:
        raise StoreError(
            "transaction must be an AsyncConnection or a Connection of psycopg, or a Connection "
            f"of asyncpg, not a {type(connection).__name__}"
        )
    if driver == "asyncpg":
        is_open = connection.is_in_transaction()
    else:
        if driver == "psycopg":
            await _receive(connection)
        elif connection.info.pipeline_status:
            await in_callers_thread(partial(_receive_here, connection), otherwise=in_thread)
        idle = import_module("psycopg").pq.TransactionStatus.IDLE
        is_open = not connection.autocommit or connection.info.transaction_status != idle
    if not is_open:
        raise StoreError(
            "no transaction is open on the connection, which is in autocommit mode: "
            "save within `async with connection.transaction()`"
        )


# Scripts on connections. psycopg's raw cursors take PostgreSQL's own parameters, as asyncpg does.


async def _run_psycopg(connection: Any, script: Script[T]) -> T:
    import psycopg
    from psycopg.rows import tuple_row

    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:

        async def execute(step: Step) -> Any:
            await cursor.execute(with_placeholders(step.sql, "$").encode(), step.parameters or None)
            await _receive(connection)
            if isinstance(step, CountedChange):
                return cursor.rowcount
            return await cursor.fetchall() if cursor.description else []

        return await run_steps_async(script, execute)
    raise AssertionError("unreachable")


def _run_psycopg_here(connection: Any, script: Script[T]) -> T:
    import psycopg
    from psycopg.rows import tuple_row

    cursor = partial(psycopg.RawCursor, connection, row_factory=tuple_row)
    return run_on_cursors(script, cursor, "$", partial(_receive_here, connection))


async def _receive(connection: Any) -> None:
    """In pipeline mode receive the results of all statements: a pipeline within does that."""
    if connection.info.pipeline_status:
        async with connection.pipeline():
            pass


def _receive_here(connection: Any) -> None:
    if connection.info.pipeline_status:
        with connection.pipeline():
            pass


async def _run_asyncpg(connection: Any, script: Script[T]) -> T:
    record = import_module("asyncpg").Record

    async def execute(step: Step) -> Any:
        sql = with_placeholders(step.sql, "$")
        if isinstance(step, CountedChange):
            status = await connection.execute(sql, *step.parameters)
            return int(status.rpartition(" ")[2])
        return list(await connection.fetch(sql, *step.parameters, record_class=record))

    return await run_steps_async(script, execute)


@contextmanager
def _begun(pool: Any) -> Iterator[Any]:
    with pool.connection() as connection, connection.transaction():
        yield connection
