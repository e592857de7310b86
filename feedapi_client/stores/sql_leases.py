"""Leases in a SQL database, beside the cursors. Needs the extra ``sql``.

All times are those of the database, in microseconds since 1970 UTC.

One paused process never stops the others. Each statement commits itself, so that an instance that
is paused between two of them holds no lock. Statements change rows by their keys, in their order,
and pass by rows that another transaction holds; where a database can't, they wait for a part of a
lease and no longer. Renewals have a connection of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import anyio
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change
from feedapi_client.stores.save_attempts import is_lock_timeout
from feedapi_client.stores.sql_connection import AnyConnection, AnyEngine, OwnConnection
from feedapi_client.stores.sql_statements import DatabaseTime

T = TypeVar("T")

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted from the table after this time."""
_ROWS_PER_STATEMENT = 400
"""SQL Server takes 2,100 parameters a statement, and a new lease has five."""
_LOCK_PART = 20
"""A part of a lease: the longest wait of a statement for another's row lock."""
_LEAST_SECONDS = 5.0
"""The time that any other operation may take, if that is longer than a lease."""
_RENEWAL_PART = 2
"""A part of a lease: the longest time that a renewal may take."""


class SQLLeases:
    """Implements `LeaseStore`.

    While an instance has joined it keeps two connections, which are none of the engine's pool:
    one for renewals, which wait for nothing else, and one for all other operations.
    """

    def __init__(
        self,
        engine: AnyEngine,
        instances: sa.Table,
        leases: sa.Table,
        operation: Callable[..., AbstractAsyncContextManager[None]],
    ) -> None:
        self.instance_table = instances
        self.lease_table = leases
        self._lease_operation = operation
        self._renewing = OwnConnection(engine)
        # A file of SQLite may be in memory, where each connection has its own.
        self._leasing = self._renewing if engine.dialect.name == "sqlite" else OwnConnection(engine)
        self._joined: dict[tuple[FeedKey, str], float] = {}
        """The length of the lease of each instance that has joined, in seconds."""

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """See `LeaseStore.join`."""
        table, now, length = self.instance_table, DatabaseTime(), int(seconds * _SECOND)
        self._joined[feed, instance] = seconds

        async def work(connection: AnyConnection) -> None:
            await self._prune(connection, feed)
            alone = not (await self._alive(connection, feed)) - {instance}
            again = sa.update(table).where(self._heartbeat(feed, instance))
            again = again.values(
                expires_at=now + length, changes=table.c.changes + 1, options=options
            )
            if not (await connection.execute(again)).rowcount:
                row = {"feed_id": feed.id, "instance": instance, "changes": first_change()}
                values = {**row, "options": options, "joined_at": now, "expires_at": now + length}
                await connection.execute(sa.insert(table).values(values))
            if alone:
                await self._new_round(connection, feed)

        await self._transact(feed, work)

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        now, table = DatabaseTime(), self.instance_table
        renew = (
            sa.update(table)
            .where(self._heartbeat(feed, instance), table.c.expires_at > now)
            .values(expires_at=now + int(seconds * _SECOND))
        )

        async def work(connection: AnyConnection) -> bool:
            return bool((await connection.execute(renew)).rowcount)

        return await self._transact(feed, work, renewing=True)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        leases = self.lease_table

        async def work(connection: AnyConnection) -> None:
            own = sa.select(leases.c.partition_id).where(
                leases.c.feed_id == feed.id, leases.c.owner == instance
            )
            owned = (await connection.execute(own)).scalars().all()
            held = await self._update(connection, feed, owned, {"owner": None}, owner=instance)
            if held:
                raise _locked(held)
            gone = sa.delete(self.instance_table).where(self._heartbeat(feed, instance))
            await connection.execute(gone)

        self._joined.pop((feed, instance), None)
        await self._transact(feed, work)
        if not self._joined:
            await self._renewing.close()

    async def close_lease_connections(self) -> None:
        """Close the connections that are kept while an instance has joined. A later use opens one.

        Cancellation: they are closed all the same.
        """
        with anyio.CancelScope(shield=True):
            for connection in {self._renewing, self._leasing}:
                await connection.close()

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        table, now = self.instance_table, DatabaseTime()
        query = sa.select(
            table.c.instance,
            table.c.expires_at - now,
            now - table.c.joined_at,
            table.c.changes,
            table.c.options,
        ).where(table.c.feed_id == feed.id)
        rows = await self._rows(feed, query)
        return sorted(
            (
                Instance(name, left / _SECOND, age / _SECOND, changes, options)
                for name, left, age, changes, options in rows
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

        async def work(connection: AnyConnection) -> dict[int, int]:
            alive = await self._alive(connection, feed)
            if instance not in alive:
                return {}
            for chunk in _in_chunks(epochs):
                wanted = {p: epochs[p] for p in chunk}
                await self._claim(connection, feed, instance, wanted, alive)
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
        self,
        connection: AnyConnection,
        feed: FeedKey,
        instance: str,
        epochs: Mapping[int, int],
        alive: Collection[str],
    ) -> None:
        table = self.lease_table
        known = sa.select(table.c.partition_id, table.c.owner, table.c.epoch).where(
            table.c.feed_id == feed.id, table.c.partition_id.in_(list(epochs))
        )
        stored = {p: (owner, epoch) for p, owner, epoch in await connection.execute(known)}
        await self._claim_first(
            connection, feed, instance, [p for p in epochs if not epochs[p] and p not in stored]
        )
        free = [
            p
            for p, (owner, epoch) in stored.items()
            if epoch and epoch == epochs[p] and (owner == instance or owner not in alive)
        ]
        if free:
            # Any other owner would have raised the epoch.
            seen = sa.case({p: epochs[p] for p in free}, value=table.c.partition_id)
            values = {"owner": instance, "epoch": table.c.epoch + 1, "ended": 0}
            await self._update(connection, feed, free, values, epoch=seen)

    async def _claim_first(
        self, connection: AnyConnection, feed: FeedKey, instance: str, partitions: list[int]
    ) -> None:
        """Insert the leases of partitions that were never claimed, as far as nobody is faster."""
        row = {"feed_id": feed.id, "owner": instance, "epoch": 1, "ended": 0}

        async def insert(some: list[int]) -> None:
            # One statement: one for each row would hold its locks over many of them.
            rows = [{**row, "partition_id": p, "changed_at": DatabaseTime()} for p in some]
            await connection.execute(sa.insert(self.lease_table).values(rows))

        await _without_locked(insert, partitions)

    async def _update(
        self,
        connection: AnyConnection,
        feed: FeedKey,
        partitions: Collection[int],
        values: Mapping[str, Any],
        **expected: Any,
    ) -> list[int]:
        """Change the leases that have the expected values. Return those that others have locked."""
        table, held = self.lease_table, []
        for chunk in _in_chunks(partitions):
            unlocked = await self._unlocked(connection, feed, chunk)
            held += sorted(set(chunk) - set(unlocked))

            async def update(some: list[int]) -> None:
                change = sa.update(table).where(
                    table.c.feed_id == feed.id,
                    table.c.partition_id.in_(some),
                    *(table.c[name] == value for name, value in expected.items()),
                )
                await connection.execute(change.values(changed_at=DatabaseTime(), **values))

            held += await _without_locked(update, unlocked)
        return held

    async def _unlocked(
        self, connection: AnyConnection, feed: FeedKey, partitions: list[int]
    ) -> list[int]:
        """Return those of the rows that nobody holds at this moment, in the order of their keys."""
        table = self.lease_table
        query = (
            sa.select(table.c.partition_id)
            .where(table.c.feed_id == feed.id, table.c.partition_id.in_(partitions))
            .order_by(table.c.partition_id)
            .with_for_update(skip_locked=True)
        )
        return list((await connection.execute(query)).scalars())

    async def _alive(self, connection: AnyConnection, feed: FeedKey) -> set[str]:
        table = self.instance_table
        query = sa.select(table.c.instance).where(
            table.c.feed_id == feed.id, table.c.expires_at > DatabaseTime()
        )
        return set((await connection.execute(query)).scalars())

    async def _prune(self, connection: AnyConnection, feed: FeedKey) -> None:
        """Delete instances that died long ago. One whose row is locked is left for the next."""
        table = self.instance_table
        old = table.c.expires_at < DatabaseTime() - _KEPT_SECONDS * _SECOND
        query = sa.select(table.c.instance).where(table.c.feed_id == feed.id, old)
        for instance in (await connection.execute(query)).scalars().all():
            with _passing_locks():
                dead = sa.and_(self._heartbeat(feed, instance), old)
                await connection.execute(sa.delete(table).where(dead))

    async def _new_round(self, connection: AnyConnection, feed: FeedKey) -> None:
        """Delete the marks of `end`. One that stays belongs to a lease that is claimed anew."""
        table = self.lease_table
        query = sa.select(table.c.partition_id).where(
            table.c.feed_id == feed.id, table.c.ended == 1
        )
        ended = (await connection.execute(query)).scalars().all()
        await self._update(connection, feed, ended, {"ended": 0}, ended=1)

    def _heartbeat(self, feed: FeedKey, instance: str) -> sa.ColumnElement[bool]:
        table = self.instance_table
        return sa.and_(table.c.feed_id == feed.id, table.c.instance == instance)

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
        async def work(connection: AnyConnection) -> None:
            held = await self._update(connection, feed, partitions, values, owner=instance)
            await connection.execute(self._changed(feed, instance))
            if not held:
                return
            table = self.lease_table
            mine = sa.select(table.c.partition_id).where(
                table.c.feed_id == feed.id,
                table.c.owner == instance,
                table.c.partition_id.in_(held),
            )
            if still := (await connection.execute(mine)).scalars().all():
                raise _locked(still)

        await self._transact(feed, work)

    # The connections

    async def _rows(self, feed: FeedKey, query: sa.Executable) -> list[Any]:
        async def work(connection: AnyConnection) -> list[Any]:
            return list((await connection.execute(query)).all())

        return await self._transact(feed, work, reads=True)

    async def _transact(
        self,
        feed: FeedKey,
        work: Callable[[AnyConnection], Awaitable[T]],
        *,
        renewing: bool = False,
        reads: bool = False,
    ) -> T:
        # The shortest lease of all that share the store. One that has not joined has none.
        lease = min(self._joined.values(), default=_LOCK_PART)
        connection = self._renewing if renewing else self._leasing
        seconds = lease / _RENEWAL_PART if renewing else max(lease, _LEAST_SECONDS)
        async with self._lease_operation(feed, seconds=seconds, shield=not reads):
            return await connection.run(
                work, lock_seconds=lease / _LOCK_PART, keep=lambda: bool(self._joined)
            )


@contextmanager
def _passing_locks() -> Iterator[None]:
    """Pass by a row that another transaction holds."""
    try:
        yield
    except DBAPIError as error:
        if not is_lock_timeout(error):
            raise


async def _without_locked(
    change: Callable[[list[int]], Awaitable[None]], partitions: list[int]
) -> list[int]:
    """Change these rows in few statements. Return those that another transaction holds.

    A statement that has waited for one of its rows is repeated with each half of them.
    """
    held: list[int] = []
    left = [partitions] if partitions else []
    while left:
        some = left.pop()
        try:
            await change(some)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            if len(some) == 1:
                held += some
            else:
                middle = len(some) // 2
                left += [some[middle:], some[:middle]]
    return held


def _locked(partitions: Collection[int]) -> StoreError:
    return StoreError(
        f"another transaction holds the leases of {len(partitions)} partitions, the first is "
        f"{min(partitions)}: is a process paused within it?"
    )


def _in_chunks(partitions: Collection[int]) -> Iterator[list[int]]:
    ordered = sorted(partitions)
    for start in range(0, len(ordered), _ROWS_PER_STATEMENT):
        yield ordered[start : start + _ROWS_PER_STATEMENT]
