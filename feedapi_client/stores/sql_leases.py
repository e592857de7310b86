"""Leases in a SQL database, beside the cursors. Needs the extra ``sql``.

All times are those of the database, in microseconds since 1970 UTC. Transactions change rows in
the order of their keys, and are repeated after a deadlock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change
from feedapi_client.stores.sql_connection import is_conflict

T = TypeVar("T")

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted from the table after this time."""
_ATTEMPTS = 10
_ROWS_PER_STATEMENT = 500


class DatabaseTime(FunctionElement[int]):
    """The database's clock, in microseconds since 1970 UTC."""

    inherit_cache = True
    type = sa.BigInteger()


@compiles(DatabaseTime, "postgresql")
def _postgresql(*_: object, **__: object) -> str:
    # now() is the time at which the transaction began.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(DatabaseTime, "mysql")
@compiles(DatabaseTime, "mariadb")
def _mysql(*_: object, **__: object) -> str:
    # NOW() is in the time zone of the session; without (6) there are no fractions.
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


@compiles(DatabaseTime, "sqlite")
def _sqlite(*_: object, **__: object) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@compiles(DatabaseTime, "mssql")
def _mssql(*_: object, **__: object) -> str:
    return "DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())"


class SQLLeases:
    """Implements `LeaseStore`.

    While an instance has joined it keeps one connection of the engine's pool: handlers that use up
    the pool must not delay a renewal.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        instances: sa.Table,
        leases: sa.Table,
        operation: Callable[[FeedKey | None], AbstractAsyncContextManager[None]],
    ) -> None:
        self.instance_table = instances
        self.lease_table = leases
        self._lease_engine = engine
        self._lease_operation = operation
        self._lease_lock = anyio.Lock()
        self._lease_connection: AsyncConnection | None = None
        self._joined: set[tuple[FeedKey, str]] = set()

    async def join(self, feed: FeedKey, instance: str, seconds: float) -> None:
        """See `LeaseStore.join`."""
        table, now, length = self.instance_table, DatabaseTime(), int(seconds * _SECOND)
        mine = self._heartbeat(feed, instance)
        self._joined.add((feed, instance))

        async def work(connection: AsyncConnection) -> None:
            old = sa.and_(
                table.c.feed_id == feed.id, table.c.expires_at < now - _KEPT_SECONDS * _SECOND
            )
            await connection.execute(sa.delete(table).where(old))
            again = sa.update(table).where(mine)
            again = again.values(expires_at=now + length, changes=table.c.changes + 1)
            if not (await connection.execute(again)).rowcount:
                row = {"feed_id": feed.id, "instance": instance, "changes": first_change()}
                values = {**row, "joined_at": now, "expires_at": now + length}
                await connection.execute(sa.insert(table).values(values))
            others = self._alive(feed).where(table.c.instance != instance)
            if (await connection.execute(others)).first() is None:
                await connection.execute(self._new_round(feed))

        await self._transact(feed, work)

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        now, table = DatabaseTime(), self.instance_table
        renew = (
            sa.update(table)
            .where(self._heartbeat(feed, instance), table.c.expires_at > now)
            .values(expires_at=now + int(seconds * _SECOND))
        )

        async def work(connection: AsyncConnection) -> bool:
            return bool((await connection.execute(renew)).rowcount)

        return await self._transact(feed, work)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        leases = self.lease_table

        async def work(connection: AsyncConnection) -> None:
            own = sa.and_(leases.c.feed_id == feed.id, leases.c.owner == instance)
            release = sa.update(leases).where(own).values(owner=None, changed_at=DatabaseTime())
            await connection.execute(release)
            gone = sa.delete(self.instance_table).where(self._heartbeat(feed, instance))
            await connection.execute(gone)

        self._joined.discard((feed, instance))
        await self._transact(feed, work)

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        table, now = self.instance_table, DatabaseTime()
        query = sa.select(
            table.c.instance, table.c.expires_at - now, now - table.c.joined_at, table.c.changes
        ).where(table.c.feed_id == feed.id)
        rows = await self._rows(feed, query)
        return sorted(
            (
                Instance(name, left / _SECOND, age / _SECOND, changes)
                for name, left, age, changes in rows
            ),
            key=lambda found: found.name,
        )

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        table = self.lease_table
        query = (
            sa.select(
                table.c.partition_id,
                table.c.owner,
                table.c.epoch,
                table.c.ended,
                DatabaseTime() - table.c.changed_at,
            )
            .where(table.c.feed_id == feed.id)
            .order_by(table.c.partition_id)
        )
        return {
            partition: Lease(partition, owner, epoch, bool(ended), age / _SECOND)
            for partition, owner, epoch, ended, age in await self._rows(feed, query)
        }

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""

        async def work(connection: AsyncConnection) -> dict[int, int]:
            mine = self._alive(feed).where(self.instance_table.c.instance == instance)
            if (await connection.execute(mine)).first() is None:
                return {}
            for chunk in _in_chunks(epochs):
                await self._claim(connection, feed, instance, {p: epochs[p] for p in chunk})
            await connection.execute(self._changed(feed, instance))
            table = self.lease_table
            own = sa.select(table.c.partition_id, table.c.epoch).where(
                table.c.feed_id == feed.id, table.c.owner == instance
            )
            rows = (await connection.execute(own)).all()
            return {p: epoch for p, epoch in rows if epochs.get(p) == epoch - 1}

        return await self._transact(feed, work)

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        await self._change(feed, instance, partitions, {"owner": None})

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        await self._change(feed, instance, partitions, {"ended": 1})

    # Statements

    async def _claim(
        self, connection: AsyncConnection, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> None:
        table, now = self.lease_table, DatabaseTime()
        known = sa.select(table.c.partition_id).where(
            table.c.feed_id == feed.id, table.c.partition_id.in_(list(epochs))
        )
        stored = set((await connection.execute(known)).scalars())
        first = [p for p, epoch in epochs.items() if not epoch and p not in stored]
        if first:
            # The parameters must not hold an expression: the times are set by the next statement.
            row = {"feed_id": feed.id, "owner": instance, "epoch": 1, "ended": 0, "changed_at": 0}
            rows = [{**row, "partition_id": partition} for partition in first]
            await connection.execute(sa.insert(table), rows)
            inserted = sa.update(table).where(
                table.c.feed_id == feed.id, table.c.partition_id.in_(first)
            )
            await connection.execute(inserted.values(changed_at=now))
        again = {p: epochs[p] for p in epochs if epochs[p] and p in stored}
        if again:
            seen = sa.case(again, value=table.c.partition_id)
            free = sa.or_(
                table.c.owner.is_(None),
                table.c.owner == instance,
                table.c.owner.not_in(self._alive(feed)),
            )
            claim = sa.update(table).where(
                table.c.feed_id == feed.id,
                table.c.partition_id.in_(list(again)),
                table.c.epoch == seen,
                free,
            )
            values = {"owner": instance, "epoch": table.c.epoch + 1, "ended": 0}
            await connection.execute(claim.values(**values, changed_at=now))

    def _heartbeat(self, feed: FeedKey, instance: str) -> sa.ColumnElement[bool]:
        table = self.instance_table
        return sa.and_(table.c.feed_id == feed.id, table.c.instance == instance)

    def _alive(self, feed: FeedKey) -> sa.Select[Any]:
        table = self.instance_table
        return sa.select(table.c.instance).where(
            table.c.feed_id == feed.id, table.c.expires_at > DatabaseTime()
        )

    def _new_round(self, feed: FeedKey) -> sa.Update:
        table = self.lease_table
        ended = sa.and_(table.c.feed_id == feed.id, table.c.ended == 1)
        return sa.update(table).where(ended).values(ended=0)

    def _changed(self, feed: FeedKey, instance: str) -> sa.Update:
        table = self.instance_table
        mine = sa.update(table).where(self._heartbeat(feed, instance))
        return mine.values(changes=table.c.changes + 1)

    async def _change(
        self,
        feed: FeedKey,
        instance: str,
        partitions: Collection[int],
        values: Mapping[str, object],
    ) -> None:
        table = self.lease_table

        async def work(connection: AsyncConnection) -> None:
            for chunk in _in_chunks(partitions):
                change = sa.update(table).where(
                    table.c.feed_id == feed.id,
                    table.c.owner == instance,
                    table.c.partition_id.in_(chunk),
                )
                await connection.execute(change.values(changed_at=DatabaseTime(), **values))
            await connection.execute(self._changed(feed, instance))

        await self._transact(feed, work)

    # The connection

    async def _rows(self, feed: FeedKey, query: sa.Executable) -> list[Any]:
        async def work(connection: AsyncConnection) -> list[Any]:
            return list((await connection.execute(query)).all())

        return await self._transact(feed, work)

    async def _transact(self, feed: FeedKey, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        async with self._lease_operation(feed), self._lease_lock:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    async with self._connected() as connection, connection.begin():
                        return await work(connection)
                except DBAPIError as error:
                    if attempt == _ATTEMPTS or not is_conflict(error):
                        raise
            raise AssertionError("unreachable")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        if self._lease_connection is None:
            self._lease_connection = await self._lease_engine.connect()
        try:
            yield self._lease_connection
        except BaseException as error:
            if not isinstance(error, DBAPIError) or not is_conflict(error):
                await self._drop_connection()
            raise
        if not self._joined:
            await self._drop_connection()

    async def _drop_connection(self) -> None:
        connection, self._lease_connection = self._lease_connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await connection.close()


def _in_chunks(partitions: Collection[int]) -> Iterator[list[int]]:
    ordered = sorted(partitions)
    for start in range(0, len(ordered), _ROWS_PER_STATEMENT):
        yield ordered[start : start + _ROWS_PER_STATEMENT]
