"""Statements that only PostgreSQL has: arrays, and several changes in one.

Parameters are its own, `$1` and `$2`, in every driver. Rows are locked in the order of the
partitions, as in `feedapi_client.stores.position_scripts`.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.position_scripts import PositionScripts
from feedapi_client.stores.save_attempts import RefusedError
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.sql_dialects import CLOCKS
from feedapi_client.stores.stored_format import FORMAT_TABLE, check_format

_FEED = "$1::char(64)"
_NEW = """unnest($2::integer[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
    AS new (partition_id, feed_cursor, status, revision, replaces)"""


def quoted(name: str, schema: str | None = None) -> str:
    """Return a table's name as an identifier of SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part)


def named(table: str, schema: str | None) -> Callable[[str], str]:
    """Return what `PositionScripts` takes."""
    return lambda suffix: quoted(f"{table}{suffix}", schema)


class FormatTable:
    """The table that notes the formats of other tables, and the statements on it.

    Arguments:
        name, schema: of the table whose format is noted.
        newest: the newest version of it that can be read.
    """

    def __init__(self, name: str, schema: str | None, newest: int) -> None:
        self._name = name
        self._newest = newest
        self._table = table = quoted(FORMAT_TABLE, schema)
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} "
            "(name VARCHAR(200) NOT NULL PRIMARY KEY, version INTEGER NOT NULL)"
        )
        self._insert = (
            f"INSERT INTO {table} (name, version) VALUES ($1::varchar, $2::integer) "
            "ON CONFLICT DO NOTHING"
        )
        self._select = f"SELECT version FROM {table} WHERE name = $1::varchar"

    def create(self, tables: Sequence[str], create: Script[None]) -> Script[None]:
        """Create the tables if one does not exist yet, and note their format if it is not noted.

        PostgreSQL asks a role for the right to create a table although it exists.

        Arguments:
            tables: their quoted names.
            create: creates them where they do not exist.
        """
        names = [self._table, *tables]
        exist = "SELECT count(to_regclass(name)) FROM unnest($1::text[]) AS names (name)"
        if (yield Query(exist, (names,)))[0][0] < len(names):
            yield Query(self._create)
            yield from create
        if not (yield Query(self._select, (self._name,))):
            yield Query(self._insert, (self._name, self._newest))
        yield from self.check()

    def check(self) -> Script[None]:
        """Check the format. Without the table it is the first one.

        Raises:
            StoreError: a newer version of this package wrote the table.
        """
        rows = yield Query("SELECT to_regclass($1::text) IS NOT NULL", (self._table,))
        if rows[0][0]:
            rows = yield Query(self._select, (self._name,))
            check_format(f"the table {self._name}", rows[0][0] if rows else None, self._newest)


class PostgresScripts(PositionScripts):
    """Statements that take any number of positions, as arrays, and archive what they replace.

    Arguments:
        table, schema, journal: as `PostgresCursorStore` takes them.
    """

    def __init__(self, table: str, schema: str | None, journal: Journal | None) -> None:
        super().__init__("postgresql", named(table, schema), journal)
        cursors, replaced, clock = self._cursors, self._replaced, CLOCKS["postgresql"]
        self._insert_new = f"""
            INSERT INTO {cursors} (feed_id, partition_id, feed_cursor, status, revision, saved_at,
                feed_url, consumer, filters)
            SELECT {_FEED}, new.partition_id, new.feed_cursor, new.status, new.revision, {clock},
                $7::text, $8::text, $9::text
            FROM {_NEW} ORDER BY new.partition_id
            ON CONFLICT DO NOTHING RETURNING partition_id"""
        self._update_one = f"""
            UPDATE {cursors} SET feed_cursor = $3::text, status = $4::text,
                revision = $5::bigint, saved_at = {clock}
            WHERE feed_id = {_FEED} AND partition_id = $2::integer AND revision = $6::bigint
            RETURNING partition_id"""
        archived = f""", archived AS (
                INSERT INTO {replaced} (feed_id, replaced_at, partition_id, revision, feed_cursor,
                    status, saved_at)
                SELECT old.feed_id, clock.at, old.partition_id, old.revision, old.feed_cursor,
                    old.status, old.saved_at
                FROM old, clock)"""
        before = f"""
            WITH clock AS MATERIALIZED (SELECT {clock} AS at), old AS (
                SELECT one.* FROM {cursors} AS one JOIN {_NEW} USING (partition_id)
                WHERE one.feed_id = {_FEED} AND one.revision = new.replaces
                ORDER BY one.partition_id FOR UPDATE OF one{{skip}}
            ){archived if journal is not None else ""}"""
        update = f"""{before}
            UPDATE {cursors} AS one SET feed_cursor = new.feed_cursor, status = new.status,
                revision = new.revision, saved_at = clock.at
            FROM old, clock, {_NEW}
            WHERE one.feed_id = {_FEED} AND one.partition_id = old.partition_id
                AND new.partition_id = old.partition_id
            RETURNING one.partition_id"""
        self._update_all = update.format(skip="")
        self._update_unlocked = update.format(skip=" SKIP LOCKED")
        self._delete_old = f"""{before.format(skip="")}
            DELETE FROM {cursors} AS one USING old, clock
            WHERE one.feed_id = {_FEED} AND one.partition_id = old.partition_id
            RETURNING one.partition_id"""

    def _begin_change(self, feed: FeedKey) -> Script[Query]:
        # The statements take the time themselves.
        if self._journal is not None and self._journal.keep is not None:
            yield from self._prune(feed, (yield from self._time()))
        return self._clock

    def _update(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        at: Query,  # noqa: ARG002 - see `_begin_change`
    ) -> Script[None]:
        skip = feed in self.lock_waits
        if len(positions) == 1 and self._journal is None and not skip:
            ((partition, new),) = positions.items()
            row = (feed.id, partition, new.cursor, new.status, new.revision, new.replaces)
            changed = yield Query(self._update_one, row)
        else:
            sql = self._update_unlocked if skip else self._update_all
            changed = yield Query(sql, _arrays(feed, positions))
        if len(changed) != len(positions):
            raise RefusedError

    def _insert(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        at: Query,  # noqa: ARG002 - see `_begin_change`
    ) -> Script[None]:
        key = (feed.url, feed.name, orjson.dumps(feed.filters).decode())
        inserted = yield Query(self._insert_new, (*_arrays(feed, positions), *key))
        if len(inserted) != len(positions):
            raise RefusedError

    def _delete(self, feed: FeedKey, stored: Mapping[int, Position]) -> Script[None]:
        if not stored:
            return
        yield from self._begin_change(feed)
        gone = {p: replace(found, replaces=found.revision) for p, found in stored.items()}
        deleted = yield Query(self._delete_old, _arrays(feed, gone))
        if len(deleted) != len(stored):
            raise RefusedError


def _arrays(
    feed: FeedKey, positions: Mapping[int, Position]
) -> tuple[str, list[int], list[str], list[str], list[int], list[int | None]]:
    rows = sorted(positions.items())
    return (
        feed.id,
        [partition for partition, _ in rows],
        [new.cursor for _, new in rows],
        [new.status for _, new in rows],
        [new.revision for _, new in rows],
        [new.replaces for _, new in rows],
    )
