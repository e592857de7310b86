"""SQLAlchemy's synchronous engines and connections, with the methods of the asynchronous ones.

Each statement runs in a worker thread, and one at a time on each connection. Needs the extra
``sql``.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import anyio
import sqlalchemy as sa
from sqlalchemy.pool import SingletonThreadPool

from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.threads import in_thread

T = TypeVar("T")


class ThreadConnection:
    """A `Connection` whose methods are awaited.

    Arguments:
        connection: the caller's, or one of the store's own.
        open: opens one of the store's own, with ``await`` or ``async with``.
    """

    def __init__(
        self,
        connection: sa.Connection | None = None,
        *,
        open: Callable[[], sa.Connection] | None = None,
    ) -> None:
        self._connection = connection
        self._open = open
        self._lock = threading.Lock()
        self._abandoned = False

    @property
    def sync_connection(self) -> sa.Connection:
        """The connection itself."""
        assert self._connection is not None
        return self._connection

    @property
    def dialect(self) -> sa.Dialect:
        """SQLAlchemy's dialect of the connection."""
        return self.sync_connection.dialect

    @property
    def invalidated(self) -> bool:
        """Whether the connection to the server was given up."""
        return self.sync_connection.invalidated

    async def execute(self, statement: sa.Executable, parameters: Any = None) -> Any:
        """Execute a statement, and return its result with all rows."""

        def execute(connection: sa.Connection) -> Any:
            result = connection.execute(statement, parameters)
            return result.freeze()() if result.returns_rows else result

        return await self.run_sync(execute)

    async def run_sync(self, function: Callable[[sa.Connection], T]) -> T:
        """Call a function with the connection."""
        return await self._call(lambda: function(self.sync_connection))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[sa.Transaction]:
        """Begin a transaction, which ends with the block."""
        transaction = await self._call(self.sync_connection.begin)
        try:
            yield transaction
        except BaseException:
            if not self._abandoned:
                with anyio.CancelScope(shield=True):
                    await self._call(transaction.rollback)
            raise
        await self._call(transaction.commit)

    async def invalidate(self) -> None:
        """Give up the connection to the server."""
        await self._call(self.sync_connection.invalidate)

    async def close(self) -> None:
        """Give the connection back."""
        if self._abandoned:
            # A statement that nobody waits for any more still uses it.
            threading.Thread(target=self._close_late, daemon=True).start()
        else:
            with anyio.CancelScope(shield=True):
                await self._call(self.sync_connection.close)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._open is not None:
            await self._connect(self._open)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread. Of the store's own connections it is not waited for."""

        def call() -> T:
            with self._lock:
                return function()

        if self._open is None:  # the caller's connection
            return await in_callers_thread(call, otherwise=in_thread)
        try:
            return await in_thread(call, abandon=True)
        except anyio.get_cancelled_exc_class():
            self._abandoned = True
            raise

    async def _connect(self, open: Callable[[], sa.Connection]) -> None:
        def connect() -> None:
            connection = open()
            with self._lock:
                self._connection = connection
                late = self._abandoned
            if late:
                connection.close()

        try:
            await in_thread(connect, abandon=True)
        except anyio.get_cancelled_exc_class():
            with self._lock:
                self._abandoned = True
                connected = self._connection is not None
            if connected:
                threading.Thread(target=self._close_late, daemon=True).start()
            raise

    def _close_late(self) -> None:
        with self._lock:
            self.sync_connection.invalidate()
            self.sync_connection.close()


class ThreadEngine:
    """An `Engine` whose methods are awaited."""

    def __init__(self, engine: sa.Engine) -> None:
        self.sync_engine = engine

    @property
    def dialect(self) -> sa.Dialect:
        """SQLAlchemy's dialect of the engine."""
        return self.sync_engine.dialect

    def connect(self) -> ThreadConnection:
        """Return a connection, to be entered or awaited."""
        return ThreadConnection(open=self.sync_engine.connect)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[ThreadConnection]:
        """Give a connection with a transaction, which ends with the block."""
        async with self.connect() as connection, connection.begin():
            yield connection

    async def dispose(self) -> None:
        """Close the connections of the pool."""
        await in_thread(self.sync_engine.dispose)


def is_of_one_thread(engine: sa.Engine) -> bool:
    """Return whether each thread has a connection of its own, as with SQLite in memory."""
    return isinstance(engine.pool, SingletonThreadPool)
