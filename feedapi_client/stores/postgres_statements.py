"""The SQL statements of `PostgresCursorStore`, and in which order a transaction executes them.

What happens in a transaction is written once, as a script. `feedapi_client.stores.postgres_drivers`
runs a script on each kind of connection. Parameters are `$1`, `$2` in every driver.

Each statement takes any number of positions, as arrays, and locks rows in the order of the
partitions: two consumers that commit several at a time don't deadlock.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_predecessor, stored_position, with_next_revisions
from feedapi_client.stores.done_statements import DoneScripts
from feedapi_client.stores.journal import Journal, Pruner, check_reach, check_rewind, reconstruct
from feedapi_client.stores.moving import moved_positions
from feedapi_client.stores.save_attempts import IDLE_PARTS, RefusedError
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.stored_format import FORMAT_TABLE, check_format

# now() is the time at which the transaction began.
NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
"""The database's clock, in microseconds since 1970 UTC."""
FEED = "$1::char(64)"
"""The parameter of `FeedKey.id`. As a text it would find no index."""
_SAVEPOINT = "SAVEPOINT feedapi_save"
_UNDO = "ROLLBACK TO SAVEPOINT feedapi_save"
_KEEP = "RELEASE SAVEPOINT feedapi_save"
_NEW = """unnest($2::integer[], $3::text[], $4::text[], $5::bigint[])
    AS new (partition_id, feed_cursor, status, revision)"""


def quoted(name: str, schema: str | None = None) -> str:
    """Return a table's name as an identifier of SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part)


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

    def create(self) -> Script[None]:
        """Create the table if it does not exist yet, and note the format if it is not noted."""
        yield Query(self._create)
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


class PositionTables:
    """The tables of positions and of their journal, and the statements on them.

    Arguments:
        table, schema: as `PostgresCursorStore` takes them.
    """

    def __init__(self, table: str, schema: str | None, *, journal: bool) -> None:
        self.name = table
        self.cursors = cursors = quoted(table, schema)
        self.journal = replaced = quoted(f"{table}_journal", schema)
        self.done = quoted(f"{table}_done", schema)
        # The same tables as SQLAlchemyCursorStore creates: the stores can work on one database.
        self.create = (
            f"""CREATE TABLE IF NOT EXISTS {cursors} (
                feed_id CHAR(64) NOT NULL,
                partition_id INTEGER NOT NULL,
                feed_cursor TEXT NOT NULL,
                status VARCHAR(16) NOT NULL,
                revision BIGINT NOT NULL,
                saved_at BIGINT NOT NULL,
                feed_url TEXT NOT NULL,
                consumer TEXT NOT NULL,
                filters TEXT NOT NULL,
                PRIMARY KEY (feed_id, partition_id)
            )""",
            f"""CREATE TABLE IF NOT EXISTS {replaced} (
                feed_id CHAR(64) NOT NULL,
                replaced_at BIGINT NOT NULL,
                partition_id INTEGER NOT NULL,
                revision BIGINT NOT NULL,
                feed_cursor TEXT NOT NULL,
                status VARCHAR(16) NOT NULL,
                saved_at BIGINT NOT NULL,
                PRIMARY KEY (feed_id, replaced_at, partition_id, revision)
            )""",
        )[: 2 if journal else 1]
        self.feeds = f"SELECT DISTINCT feed_url, consumer, filters FROM {cursors}"
        self.load = (
            f"SELECT partition_id, feed_cursor, status, revision FROM {cursors} "
            f"WHERE feed_id = {FEED}"
        )
        self.load_some = f"{self.load} AND partition_id = ANY($2::integer[])"
        self.insert = f"""
            INSERT INTO {cursors} (feed_id, partition_id, feed_cursor, status, revision, saved_at,
                feed_url, consumer, filters)
            SELECT {FEED}, new.partition_id, new.feed_cursor, new.status, new.revision, {NOW},
                $6::text, $7::text, $8::text
            FROM {_NEW} ORDER BY new.partition_id
            ON CONFLICT DO NOTHING RETURNING partition_id"""
        self.update_one = f"""
            UPDATE {cursors} SET feed_cursor = $3::text, status = $4::text,
                revision = $5::bigint, saved_at = {NOW}
            WHERE feed_id = {FEED} AND partition_id = $2::integer AND revision = $5::bigint - 1
            RETURNING partition_id"""
        archived = f""", archived AS (
                INSERT INTO {replaced} (feed_id, replaced_at, partition_id, revision, feed_cursor,
                    status, saved_at)
                SELECT old.feed_id, clock.at, old.partition_id, old.revision, old.feed_cursor,
                    old.status, old.saved_at
                FROM old, clock)"""
        before = f"""
            WITH clock AS MATERIALIZED (SELECT {NOW} AS at), old AS (
                SELECT one.* FROM {cursors} AS one JOIN {_NEW} USING (partition_id)
                WHERE one.feed_id = {FEED} AND one.revision = new.revision - 1
                ORDER BY one.partition_id FOR UPDATE OF one{{skip}}
            ){archived if journal else ""}"""
        update = f"""{before}
            UPDATE {cursors} AS one SET feed_cursor = new.feed_cursor, status = new.status,
                revision = new.revision, saved_at = clock.at
            FROM old, clock, {_NEW}
            WHERE one.feed_id = {FEED} AND one.partition_id = old.partition_id
                AND new.partition_id = old.partition_id
            RETURNING one.partition_id"""
        self.update = update.format(skip="")
        self.update_unlocked = update.format(skip=" SKIP LOCKED")
        self.delete = f"""{before.format(skip="")}
            DELETE FROM {cursors} AS one USING old, clock
            WHERE one.feed_id = {FEED} AND one.partition_id = old.partition_id
            RETURNING one.partition_id"""
        self.prune = f"DELETE FROM {replaced} WHERE feed_id = {FEED} AND replaced_at < $2::bigint"
        # The `CoveringRow`s of the journal module: positions that were the current ones at a time.
        self.covering = f"""
            SELECT partition_id, feed_cursor, status, revision, saved_at FROM {replaced}
            WHERE feed_id = {FEED} AND replaced_at > $2::bigint AND saved_at <= $2::bigint
            UNION ALL
            SELECT partition_id, feed_cursor, status, revision, saved_at FROM {cursors}
            WHERE feed_id = {FEED} AND saved_at <= $2::bigint"""
        # The `LaterRow`s: the earliest saves of each partition after a time.
        self.later = f"""
            SELECT partition_id, MIN(saved_at), MIN(saved_at) FILTER (WHERE revision = 1) FROM (
                SELECT partition_id, saved_at, revision FROM {replaced}
                WHERE feed_id = {FEED} AND saved_at > $2::bigint
                UNION ALL
                SELECT partition_id, saved_at, revision FROM {cursors}
                WHERE feed_id = {FEED} AND saved_at > $2::bigint
            ) AS later GROUP BY partition_id"""


class PostgresScripts:
    """Makes the scripts of a store. Each has to run within one transaction.

    Arguments:
        tables: the statements.
        journal: keep a history of positions.
    """

    def __init__(self, tables: PositionTables, journal: Journal | None) -> None:
        self.lock_waits: dict[FeedKey, float] = {}
        """How long a save may wait for another's row lock, see `LockingStore`."""
        self._tables = tables
        self._journal = journal
        self._pruner = Pruner(journal)
        self.done = DoneScripts(
            tables.done, tables.cursors, postgres=True, lock=" FOR UPDATE", share=" FOR SHARE"
        )

    def bound_waits(self, feed: FeedKey) -> Script[None]:
        """See `Scripts.bound_waits`."""
        if (bound := self.lock_waits.get(feed)) is not None:
            yield from _bound_transaction(bound, IDLE_PARTS * bound)

    def feeds(self) -> Script[list[tuple[str, str, str]]]:
        """Return URL, consumer's name and filters (JSON) of every feed."""
        return (yield Query(self._tables.feeds))

    def load(self, feed: FeedKey) -> Script[dict[int, Position]]:
        """Return all positions."""
        return (yield from self._positions(feed, ""))

    def save_alone(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save in a transaction of the store's own.

        Raises:
            RefusedError: a stored revision is not the expected one. Roll back.
        """
        yield from self.bound_waits(feed)
        yield from self._write(feed, positions)

    def save_within(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save in the caller's transaction, which keeps nothing of it after an error.

        Raises:
            RefusedError: a stored revision is not the expected one.
        """
        # The UPDATE of one row changes it or does not, without an error for which PostgreSQL would
        # end the transaction. Everything else needs a savepoint.
        if len(positions) == 1 and next(iter(positions.values())).revision > 1:
            yield from self._write(feed, positions)
            return
        yield Query(_SAVEPOINT)
        try:
            yield from self._write(feed, positions)
        except Exception:
            yield Query(_UNDO)
            yield Query(_KEEP)
            raise
        yield Query(_KEEP)

    def find_conflict(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[int | None]:
        """Raise the `FencedError` of the first position that is refused, if one is found.

        Returns a partition whose row another transaction holds, if the save may not wait for it.
        """
        # A locking read sees what others committed, also where a transaction otherwise sees its
        # own snapshot. It locks no other partition: two consumers that commit several partitions
        # at a time would deadlock over those.
        passes = feed in self.lock_waits
        lock = " FOR UPDATE SKIP LOCKED" if passes else " FOR UPDATE"
        stored = yield from self._positions(feed, lock, positions)
        held: set[int] = set()
        if passes and (missing := positions.keys() - stored.keys()):
            held |= (yield from self._positions(feed, "", missing)).keys()
        for partition, position in sorted(positions.items()):
            if partition not in held:
                found = stored.get(partition)
                revision = None if found is None else found.revision
                check_predecessor(feed, partition, position, revision)
        return min(held, default=None)

    def delete(self, feed: FeedKey, partitions: set[int] | None) -> Script[None]:
        """Delete the positions of the partitions, or of all."""
        stored = yield from self._positions(feed, " FOR UPDATE")
        yield from self._delete(
            feed, {p: found for p, found in stored.items() if partitions is None or p in partitions}
        )
        yield from self.done.delete(feed, partitions)

    def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        """Save the positions, whatever is stored; return them as saved."""
        stored = yield from self._positions(feed, " FOR UPDATE")
        yield from self.done.delete(feed, positions)
        return (yield from self._replace(feed, positions, stored))

    def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool
    ) -> Script[dict[FeedKey, dict[int, Position]]]:
        """Move the positions of each key to another one; return them as saved."""
        moved: dict[FeedKey, dict[int, Position]] = {}
        for old, new in keys.items():
            if not (positions := (yield from self._positions(old, " FOR UPDATE"))):
                continue
            stored = yield from self._positions(new, " FOR UPDATE")
            moved[new] = moved_positions(new, positions, stored, overwrite=overwrite)
            yield from self._delete(new, stored)
            yield from self._delete(old, positions)
            yield from self._insert(new, moved[new])
            yield from self.done.move(old, new)
        return moved

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
        """Return the positions of a time, see `JournalledStore.positions_at`."""
        at = check_reach(feed, self._journal, when, (yield from _time()))
        covering = yield Query(self._tables.covering, (feed.id, at))
        later = yield Query(self._tables.later, (feed.id, at))
        return reconstruct(feed, when, covering, later)

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        """Make the positions of a time the current ones; return them as saved."""
        stored = yield from self._positions(feed, " FOR UPDATE")
        target = yield from self.positions_at(feed, to)
        check_rewind(feed, to, target)
        yield from self._delete(feed, {p: f for p, f in stored.items() if p not in target})
        yield from self.done.delete(feed, None)
        return (yield from self._replace(feed, target, stored))

    def _positions(
        self, feed: FeedKey, lock: str, partitions: Iterable[int] | None = None
    ) -> Script[dict[int, Position]]:
        order = f"ORDER BY partition_id{lock}"
        if partitions is None:
            rows = yield Query(f"{self._tables.load} {order}", (feed.id,))
        else:
            rows = yield Query(f"{self._tables.load_some} {order}", (feed.id, list(partitions)))
        return {row[0]: stored_position(feed, *row) for row in rows}

    def _write(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save the positions if the stored revisions are the expected ones."""
        yield from self._prune(feed)
        later = {p: new for p, new in positions.items() if new.revision > 1}
        if later:
            yield from self._update(feed, later)
        if len(later) < len(positions):
            first = {p: new for p, new in positions.items() if new.revision <= 1}
            if (bound := self.lock_waits.get(feed)) is None:
                yield from self._insert(feed, first)
            else:
                # An equal key that another transaction has inserted can't be passed by.
                yield from _bounded_lock_waits(self._insert(feed, first), bound)

    def _update(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        skip = feed in self.lock_waits
        if len(positions) == 1 and self._journal is None and not skip:
            ((partition, new),) = positions.items()
            row = (feed.id, partition, new.cursor, new.status, new.revision)
            changed = yield Query(self._tables.update_one, row)
        else:
            sql = self._tables.update_unlocked if skip else self._tables.update
            changed = yield Query(sql, _arrays(feed, positions))
        if len(changed) != len(positions):
            raise RefusedError

    def _insert(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        key = (feed.url, feed.name, orjson.dumps(feed.filters).decode())
        inserted = yield Query(self._tables.insert, (*_arrays(feed, positions), *key))
        if len(inserted) != len(positions):
            raise RefusedError

    def _delete(self, feed: FeedKey, stored: Mapping[int, Position]) -> Script[None]:
        if not stored:
            return
        yield from self._prune(feed)
        following = {p: Position(f.cursor, f.status, f.revision + 1) for p, f in stored.items()}
        deleted = yield Query(self._tables.delete, _arrays(feed, following))
        if len(deleted) != len(stored):
            raise RefusedError

    def _replace(
        self, feed: FeedKey, positions: Mapping[int, Position], stored: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        revisions = {partition: found.revision for partition, found in stored.items()}
        replaced = with_next_revisions(positions, revisions)
        yield from self._write(feed, replaced)
        return replaced

    def _prune(self, feed: FeedKey) -> Script[None]:
        if self._journal is None or self._journal.keep is None:
            return
        if (before := self._pruner.due(feed, (yield from _time()))) is not None:
            yield Query(self._tables.prune, (feed.id, before))


def _arrays(
    feed: FeedKey, positions: Mapping[int, Position]
) -> tuple[str, list[int], list[str], list[str], list[int]]:
    rows = sorted(positions.items())
    return (
        feed.id,
        [partition for partition, _ in rows],
        [new.cursor for _, new in rows],
        [new.status for _, new in rows],
        [new.revision for _, new in rows],
    )


def _time() -> Script[int]:
    rows = yield Query(f"SELECT {NOW}")
    return int(rows[0][0])


def _bound_transaction(locks: float, idle: float) -> Script[None]:
    """Bound how long this transaction waits for row locks, and how long it holds its own.

    PostgreSQL ends one that has been idle for so many seconds: its process is paused, or its
    machine is gone.
    """
    yield Query(
        "SELECT set_config('lock_timeout', $1::text, true), "
        "set_config('idle_in_transaction_session_timeout', $2::text, true)",
        (milliseconds(locks), milliseconds(idle)),
    )


def _bounded_lock_waits(script: Script[None], seconds: float) -> Script[None]:
    """Bound the wait for row locks within a savepoint, and restore what was set.

    After an error PostgreSQL restores that itself.
    """
    rows = yield Query("SELECT current_setting('lock_timeout')")
    yield _set_lock_timeout(milliseconds(seconds))
    yield from script
    yield _set_lock_timeout(rows[0][0])


def _set_lock_timeout(value: str) -> Query:
    return Query("SELECT set_config('lock_timeout', $1::text, true)", (value,))


def milliseconds(seconds: float) -> str:
    """Return a length of time as PostgreSQL's settings take it."""
    return f"{max(1, round(seconds * 1000))}ms"
