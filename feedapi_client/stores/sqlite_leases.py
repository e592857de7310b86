"""Leases in a SQLite file, beside the cursors.

The clock is SQLite's, in microseconds since 1970. It is computed from ``julianday``: SQLite 3.40
does not know ``unixepoch('subsec')`` and gives NULL, a lease that never expires.
"""

# ruff: noqa: S608 - the statements are made of constants

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change
from feedapi_client.stores.scripts import Query, Script, StatementRows
from feedapi_client.stores.sqlite_connection import SQLiteFile, run_script, transact

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted from the table after this time."""
# The same tables as SQLAlchemyCursorStore creates.
_CREATE = (
    """
CREATE TABLE IF NOT EXISTS feedapi_cursors_instances (
    feed_id CHAR(64) NOT NULL,
    instance VARCHAR(200) NOT NULL,
    joined_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    changes BIGINT NOT NULL,
    options VARCHAR(200) NOT NULL,
    PRIMARY KEY (feed_id, instance)
)
""",
    """
CREATE TABLE IF NOT EXISTS feedapi_cursors_leases (
    feed_id CHAR(64) NOT NULL,
    partition_id INTEGER NOT NULL,
    owner VARCHAR(200),
    epoch BIGINT NOT NULL,
    ended INTEGER NOT NULL,
    changed_at BIGINT NOT NULL,
    PRIMARY KEY (feed_id, partition_id)
)
""",
)
_NOW = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
_ALIVE = f"SELECT instance FROM feedapi_cursors_instances WHERE feed_id = ? AND expires_at > {_NOW}"
_PRUNE = (
    "DELETE FROM feedapi_cursors_instances "
    f"WHERE feed_id = ? AND expires_at < {_NOW} - {_KEPT_SECONDS * _SECOND}"
)
_JOIN = f"""
INSERT INTO feedapi_cursors_instances (
    feed_id, instance, joined_at, expires_at, changes, options
) VALUES (?, ?, {_NOW}, {_NOW} + ?, ?, ?)
ON CONFLICT (feed_id, instance) DO UPDATE SET
    expires_at = excluded.expires_at, changes = changes + 1, options = excluded.options
"""
_NEW_ROUND = "UPDATE feedapi_cursors_leases SET ended = 0 WHERE feed_id = ? AND ended = 1"
_RENEW = f"""
UPDATE feedapi_cursors_instances SET expires_at = {_NOW} + ?
WHERE feed_id = ? AND instance = ? AND expires_at > {_NOW} RETURNING 1
"""
_RELEASE_ALL = (
    f"UPDATE feedapi_cursors_leases SET owner = NULL, changed_at = {_NOW} "
    "WHERE feed_id = ? AND owner = ?"
)
_LEAVE = "DELETE FROM feedapi_cursors_instances WHERE feed_id = ? AND instance = ?"
_INSTANCES = (
    f"SELECT instance, expires_at - {_NOW}, {_NOW} - joined_at, changes, options "
    "FROM feedapi_cursors_instances WHERE feed_id = ? ORDER BY instance"
)
_LEASES = (
    f"SELECT partition_id, owner, epoch, ended, {_NOW} - changed_at "
    "FROM feedapi_cursors_leases WHERE feed_id = ? ORDER BY partition_id"
)
_CLAIM_FIRST = f"""
INSERT INTO feedapi_cursors_leases (feed_id, partition_id, owner, epoch, ended, changed_at)
VALUES (?, ?, ?, 1, 0, {_NOW}) ON CONFLICT (feed_id, partition_id) DO NOTHING
"""
_CLAIM = f"""
UPDATE feedapi_cursors_leases SET owner = ?, epoch = epoch + 1, ended = 0, changed_at = {_NOW}
WHERE feed_id = ? AND partition_id = ? AND epoch = ?
AND (owner IS NULL OR owner = ? OR owner NOT IN ({_ALIVE}))
"""
_OWN = "SELECT partition_id, epoch FROM feedapi_cursors_leases WHERE feed_id = ? AND owner = ?"
_CHANGED = (
    "UPDATE feedapi_cursors_instances SET changes = changes + 1 WHERE feed_id = ? AND instance = ?"
)
_RELEASE = (
    f"UPDATE feedapi_cursors_leases SET owner = NULL, changed_at = {_NOW} "
    "WHERE feed_id = ? AND owner = ? AND partition_id = ?"
)
_END = (
    f"UPDATE feedapi_cursors_leases SET ended = 1, changed_at = {_NOW} "
    "WHERE feed_id = ? AND owner = ? AND partition_id = ?"
)


def create_lease_tables() -> Script[None]:
    """Create the tables that do not exist yet."""
    for statement in _CREATE:
        yield Query(statement)


class SQLiteLeases:
    """Implements `LeaseStore` on a connection of its own, so that no save delays a renewal."""

    def __init__(self, file: SQLiteFile) -> None:
        self._lease_file = file

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """See `LeaseStore.join`."""
        await self._lease_change(feed, _join(feed, instance, int(seconds * _SECOND), options))

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        parameters = (int(seconds * _SECOND), feed.id, instance)
        return bool(await self._lease_change(feed, _query(_RENEW, parameters)))

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        await self._lease_change(feed, _leave(feed, instance))

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        rows = await self._lease_rows(feed, _INSTANCES)
        return [
            Instance(name, left / _SECOND, age / _SECOND, changes, options)
            for name, left, age, changes, options in rows
        ]

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        rows = await self._lease_rows(feed, _LEASES)
        return {
            partition: Lease(partition, owner, epoch, bool(ended), age / _SECOND)
            for partition, owner, epoch, ended, age in rows
        }

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        claimed: dict[int, int] = await self._lease_change(feed, _claim(feed, instance, epochs))
        return claimed

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        await self._lease_change(feed, _change(_RELEASE, feed, instance, partitions))

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        await self._lease_change(feed, _change(_END, feed, instance, partitions))

    async def _lease_change(self, feed: FeedKey, script: Script[Any]) -> Any:
        return await self._lease_file.run(feed, lambda connection: transact(connection, script))

    async def _lease_rows(self, feed: FeedKey, sql: str) -> list[Any]:
        script = _query(sql, (feed.id,))
        return await self._lease_file.run(feed, lambda connection: run_script(connection, script))


def _query(sql: str, parameters: tuple[Any, ...]) -> Script[list[Any]]:
    return (yield Query(sql, parameters))


def _join(feed: FeedKey, instance: str, microseconds: int, options: str) -> Script[None]:
    yield Query(_PRUNE, (feed.id,))
    alive = yield Query(_ALIVE, (feed.id,))
    if not any(name != instance for (name,) in alive):
        yield Query(_NEW_ROUND, (feed.id,))
    yield Query(_JOIN, (feed.id, instance, microseconds, first_change(), options))


def _leave(feed: FeedKey, instance: str) -> Script[None]:
    yield Query(_RELEASE_ALL, (feed.id, instance))
    yield Query(_LEAVE, (feed.id, instance))


def _claim(feed: FeedKey, instance: str, epochs: Mapping[int, int]) -> Script[dict[int, int]]:
    alive = yield Query(_ALIVE, (feed.id,))
    if (instance,) not in alive:
        return {}
    first = [(feed.id, partition, instance) for partition, epoch in epochs.items() if not epoch]
    yield StatementRows(_CLAIM_FIRST, first)
    again = [
        (instance, feed.id, partition, epoch, instance, feed.id)
        for partition, epoch in epochs.items()
        if epoch
    ]
    yield StatementRows(_CLAIM, again)
    rows = yield Query(_OWN, (feed.id, instance))
    yield Query(_CHANGED, (feed.id, instance))
    return {partition: epoch for partition, epoch in rows if epochs.get(partition) == epoch - 1}


def _change(sql: str, feed: FeedKey, instance: str, partitions: Collection[int]) -> Script[None]:
    yield StatementRows(sql, [(feed.id, instance, partition) for partition in partitions])
    yield Query(_CHANGED, (feed.id, instance))
