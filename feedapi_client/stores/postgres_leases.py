"""Leases in PostgreSQL, beside the cursors, without SQLAlchemy.

All times are those of the database, in microseconds since 1970 UTC.

One paused process never stops the others. Each statement commits itself, so that an instance that
is paused between two of them holds no lock. Statements pass by rows that another transaction
holds; those that can't wait for a part of a lease and no longer. They set that bound themselves:
nothing is set for a session, which a pooler in transaction mode would give to others.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change
from feedapi_client.stores.postgres_drivers import Database, runner_on
from feedapi_client.stores.postgres_statements import (
    FEED,
    NOW,
    milliseconds,
    quoted,
)
from feedapi_client.stores.save_attempts import is_conflict, is_lock_timeout
from feedapi_client.stores.scripts import Query, Script

T = TypeVar("T")

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted from the table after this time."""
_LOCK_PART = 20
"""A part of a lease: the longest wait of a statement for another's row lock."""
_LEAST_SECONDS = 5.0
"""The time that any other operation may take, if that is longer than a lease."""
_RENEWAL_PART = 2
"""A part of a lease: the longest time that a renewal may take."""
_ATTEMPTS = 10
_CONNECTIONS = 2
"""Those that an instance keeps while it has joined."""


class LeaseTables:
    """The tables of instances and of their leases, and the statements on them.

    Arguments:
        table, schema: as `PostgresCursorStore` takes them.
    """

    def __init__(self, table: str, schema: str | None) -> None:
        self.instances = instances = quoted(f"{table}_instances", schema)
        self.leases = leases = quoted(f"{table}_leases", schema)
        # The same tables as SQLAlchemyCursorStore creates.
        self.create = (
            f"""CREATE TABLE IF NOT EXISTS {instances} (
                feed_id CHAR(64) NOT NULL,
                instance VARCHAR(200) NOT NULL,
                joined_at BIGINT NOT NULL,
                expires_at BIGINT NOT NULL,
                changes BIGINT NOT NULL,
                options VARCHAR(200) NOT NULL,
                PRIMARY KEY (feed_id, instance)
            )""",
            f"""CREATE TABLE IF NOT EXISTS {leases} (
                feed_id CHAR(64) NOT NULL,
                partition_id INTEGER NOT NULL,
                owner VARCHAR(200),
                epoch BIGINT NOT NULL,
                ended INTEGER NOT NULL,
                changed_at BIGINT NOT NULL,
                PRIMARY KEY (feed_id, partition_id)
            )""",
        )
        mine = f"feed_id = {FEED} AND instance = $2::varchar"
        # The longest wait for another's row lock, for this statement alone. It is evaluated before
        # the first row is locked.
        bound = "(SELECT set_config('lock_timeout', $3::text, true)) AS bound"
        self.alive = f"""
            SELECT instance FROM {instances} WHERE feed_id = {FEED} AND expires_at > {NOW}"""
        self.prune = f"""
            WITH old AS (
                SELECT feed_id, instance FROM {instances} WHERE feed_id = {FEED}
                    AND expires_at < {NOW} - {_KEPT_SECONDS * _SECOND}
                FOR UPDATE SKIP LOCKED
            )
            DELETE FROM {instances} AS one USING old
            WHERE one.feed_id = old.feed_id AND one.instance = old.instance"""
        self.join = f"""
            INSERT INTO {instances} AS one (feed_id, instance, joined_at, expires_at, changes,
                options)
            SELECT {FEED}, $2::varchar, {NOW}, {NOW} + $4::bigint, $5::bigint, $6::varchar
            FROM {bound}
            ON CONFLICT (feed_id, instance) DO UPDATE SET expires_at = excluded.expires_at,
                changes = one.changes + 1, options = excluded.options"""
        self.renew = f"""
            UPDATE {instances} SET expires_at = {NOW} + $4::bigint FROM {bound}
            WHERE {mine} AND expires_at > {NOW} RETURNING instance"""
        self.leave = f"DELETE FROM {instances} USING {bound} WHERE {mine}"
        self.changed = f"UPDATE {instances} SET changes = changes + 1 FROM {bound} WHERE {mine}"
        self.list_instances = f"""
            SELECT instance, expires_at - {NOW}, {NOW} - joined_at, changes, options
            FROM {instances} WHERE feed_id = {FEED} ORDER BY instance"""
        self.list_leases = f"""
            SELECT partition_id, owner, epoch, ended, {NOW} - changed_at
            FROM {leases} WHERE feed_id = {FEED} ORDER BY partition_id"""
        self.owned = f"""
            SELECT partition_id FROM {leases}
            WHERE feed_id = {FEED} AND owner = $2::varchar ORDER BY partition_id"""
        self.claim_first = f"""
            INSERT INTO {leases} (feed_id, partition_id, owner, epoch, ended, changed_at)
            SELECT {FEED}, wanted.id, $2::varchar, 1, 0, {NOW}
            FROM unnest($4::integer[]) AS wanted (id), {bound} ORDER BY wanted.id
            ON CONFLICT (feed_id, partition_id) DO NOTHING RETURNING partition_id, epoch"""
        # Any other owner than the expected one would have raised the epoch.
        self.claim = f"""
            WITH free AS (
                SELECT one.partition_id FROM {leases} AS one
                JOIN unnest($3::integer[], $4::bigint[]) AS wanted (id, epoch)
                    ON one.partition_id = wanted.id AND one.epoch = wanted.epoch
                WHERE one.feed_id = {FEED}
                    AND (one.owner IS NULL OR one.owner = $2::varchar
                        OR one.owner NOT IN ({self.alive}))
                ORDER BY one.partition_id FOR UPDATE OF one SKIP LOCKED
            )
            UPDATE {leases} AS one
            SET owner = $2::varchar, epoch = one.epoch + 1, ended = 0, changed_at = {NOW}
            FROM free WHERE one.feed_id = {FEED} AND one.partition_id = free.partition_id
            RETURNING one.partition_id, one.epoch"""
        self.release = self._change("owner = NULL")
        self.end = self._change("ended = 1")
        ended = f"""
            WITH free AS (
                SELECT partition_id FROM {leases} WHERE feed_id = {FEED} AND ended = 1
                ORDER BY partition_id FOR UPDATE SKIP LOCKED
            )"""
        self.new_round = f"""{ended}
            UPDATE {leases} AS one SET ended = 0, changed_at = {NOW}
            FROM free WHERE one.feed_id = {FEED} AND one.partition_id = free.partition_id"""

    def _change(self, values: str) -> str:
        """Return the statement that changes the leases that the instance owns, save locked ones."""
        return f"""
            WITH free AS (
                SELECT partition_id FROM {self.leases}
                WHERE feed_id = {FEED} AND owner = $2::varchar
                    AND partition_id = ANY($3::integer[])
                ORDER BY partition_id FOR UPDATE SKIP LOCKED
            )
            UPDATE {self.leases} AS one SET {values}, changed_at = {NOW}
            FROM free WHERE one.feed_id = {FEED} AND one.partition_id = free.partition_id
            RETURNING one.partition_id"""


class PostgresLeases:
    """Implements `LeaseStore`.

    While an instance has joined it keeps two connections of the pool: one for renewals, which wait
    for nothing else, and one for all other operations.
    """

    def __init__(
        self,
        database: Database,
        tables: LeaseTables,
        operation: Callable[..., AbstractAsyncContextManager[None]],
    ) -> None:
        self._lease_tables = tables
        self._lease_operation = operation
        self._pool = database
        self._renewing = _KeptConnection(database)
        self._leasing = _KeptConnection(database)
        self._joined: dict[tuple[FeedKey, str], float] = {}
        """The length of the lease of each instance that has joined, in seconds."""

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """See `LeaseStore.join`."""
        if self._pool.size is not None and self._pool.size <= _CONNECTIONS:
            raise StoreError(
                f"the pool has at most {self._pool.size} connections, and leases keep "
                f"{_CONNECTIONS} of them: give it a larger max_size",
                feed=feed.url,
            )
        self._joined[feed, instance] = seconds
        row = (*self._bounded(feed, instance), int(seconds * _SECOND), first_change(), options)

        def script() -> Script[None]:
            yield Query(self._lease_tables.prune, (feed.id,))
            alive = yield Query(self._lease_tables.alive, (feed.id,))
            yield Query(self._lease_tables.join, row)
            if not any(name != instance for (name,) in alive):
                yield Query(self._lease_tables.new_round, (feed.id,))

        await self._transact(feed, script)

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        row = (*self._bounded(feed, instance), int(seconds * _SECOND))
        query = Query(self._lease_tables.renew, row)
        return bool(await self._transact(feed, lambda: _rows(query), renewing=True))

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""

        def script() -> Script[None]:
            owned = yield Query(self._lease_tables.owned, (feed.id, instance))
            partitions = [partition for (partition,) in owned]
            yield from self._release(feed, instance, self._lease_tables.release, partitions)
            yield Query(self._lease_tables.leave, self._bounded(feed, instance))

        self._joined.pop((feed, instance), None)
        await self._transact(feed, script)
        if not self._joined:
            await self._renewing.close()

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        query = Query(self._lease_tables.list_instances, (feed.id,))
        rows = await self._transact(feed, lambda: _rows(query), reads=True)
        found = [
            Instance(name, left / _SECOND, age / _SECOND, changes, options)
            for name, left, age, changes, options in rows
        ]
        # Not in the order of the database's collation.
        return sorted(found, key=lambda each: each.name)

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        query = Query(self._lease_tables.list_leases, (feed.id,))
        rows = await self._transact(feed, lambda: _rows(query), reads=True)
        return {
            partition: Lease(partition, owner, epoch, bool(ended), age / _SECOND)
            for partition, owner, epoch, ended, age in rows
        }

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        tables = self._lease_tables
        first = sorted(partition for partition, epoch in epochs.items() if not epoch)
        again = sorted(epochs.keys() - set(first))

        def script() -> Script[dict[int, int]]:
            alive = yield Query(tables.alive, (feed.id,))
            if instance not in {name for (name,) in alive}:
                return {}
            bounded = self._bounded(feed, instance)
            claimed = yield from _insert_unlocked(tables.claim_first, bounded, first)
            if again:
                expected = [epochs[partition] for partition in again]
                claimed += yield Query(tables.claim, (feed.id, instance, again, expected))
            yield Query(tables.changed, bounded)
            return dict(claimed)

        return await self._transact(feed, script)

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        await self._change(feed, instance, self._lease_tables.release, partitions)

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        await self._change(feed, instance, self._lease_tables.end, partitions)

    async def _change(
        self, feed: FeedKey, instance: str, sql: str, partitions: Collection[int]
    ) -> None:
        await self._transact(feed, lambda: self._release(feed, instance, sql, partitions))

    def _release(
        self, feed: FeedKey, instance: str, sql: str, partitions: Collection[int]
    ) -> Script[None]:
        """Change leases that the instance owns. Raises `StoreError` if others hold some of them."""
        wanted = sorted(partitions)
        changed = {row[0] for row in (yield Query(sql, (feed.id, instance, wanted)))}
        yield Query(self._lease_tables.changed, self._bounded(feed, instance))
        missing = set(wanted) - changed
        if missing:
            owned = yield Query(self._lease_tables.owned, (feed.id, instance))
            if held := missing & {partition for (partition,) in owned}:
                raise StoreError(
                    f"another transaction holds the leases of {len(held)} partitions, the first "
                    f"is {min(held)}: is a process paused within it?"
                )

    async def _transact(
        self,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        renewing: bool = False,
        reads: bool = False,
    ) -> T:
        lease = self._lease()
        connection = self._renewing if renewing else self._leasing
        seconds = lease / _RENEWAL_PART if renewing else max(lease, _LEAST_SECONDS)
        async with self._lease_operation(feed, seconds=seconds, shield=not reads):
            return await connection.run(script, keep=lambda: bool(self._joined))

    def _lease(self) -> float:
        """Return the shortest lease of all that share the store."""
        # One that has not joined has none.
        return min(self._joined.values(), default=_LOCK_PART)

    def _bounded(self, feed: FeedKey, instance: str) -> tuple[str, str, str]:
        """Return the first parameters of a statement that may wait for another's row lock."""
        return feed.id, instance, milliseconds(self._lease() / _LOCK_PART)


class _KeptConnection:
    """A connection of the pool on which each statement commits itself.

    Concurrency: operations wait for each other.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = anyio.Lock()
        self._connection: Any = None

    async def run(self, script: Callable[[], Script[T]], *, keep: Callable[[], bool]) -> T:
        """Return the result of a script. After a deadlock another one is made.

        Arguments:
            script: makes the script.
            keep: whether the connection is kept for the next operation.
        """
        async with self._lock:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._attempt(script, keep)
                except Exception as error:
                    if attempt == _ATTEMPTS or not is_conflict(error):
                        raise
            raise AssertionError("unreachable")

    async def close(self) -> None:
        """Give the connection back. The next operation takes another one."""
        async with self._lock:
            await self._drop(broken=False)

    async def _attempt(self, script: Callable[[], Script[T]], keep: Callable[[], bool]) -> T:
        try:
            if self._connection is None:
                self._connection = await self._database.acquire()
            run = runner_on(self._connection)
            assert run is not None
            result: T = await run(script())
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
                await self._database.release(connection, broken=broken)


def _rows(query: Query) -> Script[list[Any]]:
    return (yield query)


def _insert_unlocked(
    sql: str, bounded: tuple[str, str, str], partitions: list[int]
) -> Script[list[Any]]:
    """Insert leases in few statements, save those that another transaction has inserted.

    A statement that has waited for one of its rows is repeated with each half of them.
    """
    inserted: list[Any] = []
    left = [partitions] if partitions else []
    while left:
        some = left.pop()
        try:
            inserted += yield Query(sql, (*bounded, some))
        except Exception as error:
            if not is_lock_timeout(error):
                raise
            if len(some) > 1:
                middle = len(some) // 2
                left += [some[middle:], some[:middle]]
    return inserted
