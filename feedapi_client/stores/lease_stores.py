"""Leases beside the cursors of a SQL database, and the connections that are kept for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Lease, LeaseScripts, View
from feedapi_client.stores.scripted import JournalledScripts
from feedapi_client.stores.scripts import Script
from feedapi_client.stores.sql_dialects import is_conflict, is_lock_timeout

T = TypeVar("T")

_LOCK_PART = 20
"""A part of a lease: the longest wait of a statement for another's row lock."""
_LEAST_SECONDS = 5.0
"""The time that any other operation may take, if that is longer than a lease."""
_RENEWAL_PART = 2
"""A part of a lease: the longest time that a renewal may take."""
_ATTEMPTS = 10


class ScriptedLeases:
    """Implements `LeaseStore`. A subclass sets `_lease_scripts` and defines `_lease`."""

    _lease_scripts: LeaseScripts

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        """See `LeaseStore.look`."""
        return await self._lease(feed, lambda: self._lease_scripts.look(feed, last), reads=True)

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        scripts = self._lease_scripts
        return await self._lease(
            feed, lambda: scripts.beat(feed, instance, seconds, options), beats=True
        )

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        """See `LeaseStore.put`."""
        return await self._lease(feed, lambda: self._lease_scripts.put(feed, instance, leases))

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        await self._lease(feed, lambda: self._lease_scripts.leave(feed, instance))

    async def _lease(
        self,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        beats: bool = False,
        reads: bool = False,
    ) -> T:
        """Run what makes a script; `beats` waits for no other operation, `reads` only reads."""
        raise NotImplementedError


class Connections(Protocol):
    """Where a `KeptConnection` comes from. Each statement on one commits itself."""

    async def acquire(self) -> Any:
        """Open a connection, or take one out of a pool."""
        ...

    async def run(self, connection: Any, script: Script[T], lock_seconds: float) -> T:
        """Run a script. Where statements can't bound their waits for row locks, do it."""
        ...

    async def release(self, connection: Any, *, broken: bool) -> None:
        """Give back what `acquire` returned."""
        ...


class KeptLeases(ScriptedLeases, JournalledScripts):
    """Leases in a database with a server.

    While an instance has joined two connections are kept: one for heartbeats, which wait for
    nothing else, and one for all other operations.
    """

    def __init__(
        self, scripts: LeaseScripts, beating: KeptConnection, leasing: KeptConnection
    ) -> None:
        self._lease_scripts = scripts
        self._beating = beating
        self._leasing = leasing
        self._joined: dict[tuple[FeedKey, str], float] = {}
        """The length of the lease of each instance that has joined, in seconds."""

    def _operation(
        self, feed: FeedKey | None, *, seconds: float | None = None, shield: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Bound the block in time, finish it although it is cancelled, and translate errors."""
        raise NotImplementedError

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        self._joined[feed, instance] = seconds
        return await super().beat(feed, instance, seconds, options)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        self._joined.pop((feed, instance), None)
        await super().leave(feed, instance)
        if not self._joined:
            await self._beating.close()

    async def _lease(
        self,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        beats: bool = False,
        reads: bool = False,
    ) -> T:
        # The shortest lease of all that share the store. One that has not joined has none.
        lease = min(self._joined.values(), default=_LOCK_PART)
        self._lease_scripts.lock_seconds = lease / _LOCK_PART
        connection = self._beating if beats else self._leasing
        seconds = lease / _RENEWAL_PART if beats else max(lease, _LEAST_SECONDS)
        async with self._operation(feed, seconds=seconds, shield=not reads):
            return await connection.run(script, lease / _LOCK_PART, keep=lambda: bool(self._joined))


class KeptConnection:
    """A connection on which each statement commits itself.

    Concurrency: operations wait for each other.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = anyio.Lock()
        self._connection: Any = None

    async def run(
        self, script: Callable[[], Script[T]], lock_seconds: float, *, keep: Callable[[], bool]
    ) -> T:
        """Return the result of a script. After a deadlock another one is made.

        Arguments:
            script: makes the script.
            lock_seconds: the longest wait of a statement for another's row lock.
            keep: whether the connection is kept for the next operation.
        """
        async with self._lock:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._attempt(script(), lock_seconds, keep)
                except Exception as error:
                    if attempt == _ATTEMPTS or not is_conflict(error):
                        raise
            raise AssertionError("unreachable")

    async def close(self) -> None:
        """Give the connection back. The next operation takes another one."""
        async with self._lock:
            await self._drop(broken=False)

    async def _attempt(self, script: Script[T], lock_seconds: float, keep: Callable[[], bool]) -> T:
        try:
            if self._connection is None:
                self._connection = await self._connections.acquire()
            result = await self._connections.run(self._connection, script, lock_seconds)
        except BaseException as error:
            known = isinstance(error, Exception) and (is_conflict(error) or is_lock_timeout(error))
            if not known:
                await self._drop(broken=not isinstance(error, StoreError))
            raise
        if not keep():
            await self._drop(broken=False)
        return result

    async def _drop(self, *, broken: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await self._connections.release(connection, broken=broken)
