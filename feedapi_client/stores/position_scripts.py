"""Positions in a SQL database, as scripts: which statements a transaction executes, in which order.

Each has to run within one transaction. They are for every database, of every driver; where one of
them has more to offer, its own class overrides the statements.

Rows are locked in the order of the partitions: two consumers that save several don't deadlock.
"""

# ruff: noqa: S608 - the statements are made of constants, numbers and quoted names

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_replaces, in_place_of, stored_position
from feedapi_client.stores.done_scripts import DoneScripts, in_parts
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    now,
    reconstruct,
)
from feedapi_client.stores.moving import moved_positions
from feedapi_client.stores.save_attempts import IDLE_PARTS, RefusedError, is_integrity_error
from feedapi_client.stores.scripts import CountedChange, Query, Script, StatementRows
from feedapi_client.stores.sql_dialects import (
    CLOCKS,
    MYSQL,
    SKIPS_LOCKED,
    feed_condition,
    listed,
    milliseconds,
    typed,
)

_ARCHIVED = "partition_id, revision, feed_cursor, status, saved_at"


class PositionScripts:
    """Makes the scripts of a store.

    Arguments:
        dialect: the kind of database, by SQLAlchemy's name.
        named: returns the name of a table, quoted: that of positions for an empty text, the others'
            for what is appended to it.
        journal: keep a history of positions.

    Attributes:
        lock_waits: how long a save of a feed may wait for another's row lock, see `LockingStore`.
        done: the scripts on the table of what is done ahead of the cursor.
    """

    def __init__(
        self, dialect: str, named: Callable[[str], str], journal: Journal | None = None
    ) -> None:
        self.lock_waits: dict[FeedKey, float] = {}
        self.done = DoneScripts(dialect, named("_done"), named(""))
        self._dialect = dialect
        self._cursors = named("")
        self._replaced = named("_journal")
        self._journal = journal
        self._pruner = Pruner(journal)
        self._feed = feed_condition(dialect)
        self._lock = " FOR UPDATE" if dialect in SKIPS_LOCKED else ""

    def create(self) -> Script[None]:
        """Create the tables that do not exist yet: the same as SQLAlchemyCursorStore creates."""
        yield Query(
            f"""CREATE TABLE IF NOT EXISTS {self._cursors} (
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
            )"""
        )
        if self._journal is not None:
            yield Query(
                f"""CREATE TABLE IF NOT EXISTS {self._replaced} (
                    feed_id CHAR(64) NOT NULL,
                    replaced_at BIGINT NOT NULL,
                    partition_id INTEGER NOT NULL,
                    revision BIGINT NOT NULL,
                    feed_cursor TEXT NOT NULL,
                    status VARCHAR(16) NOT NULL,
                    saved_at BIGINT NOT NULL,
                    PRIMARY KEY (feed_id, replaced_at, partition_id, revision)
                )"""
            )
        yield Query(self.done.create)

    def feeds(self) -> Script[list[Any]]:
        """Return URL, consumer's name and filters (JSON) of every feed."""
        select = f"SELECT DISTINCT feed_url, consumer, filters FROM {self._cursors}"
        rows: list[Any] = yield Query(select)
        return rows

    def load(self, feed: FeedKey) -> Script[dict[int, Position]]:
        """Return all positions."""
        return self._positions(feed, "")

    def save_alone(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
    ) -> Script[None]:
        """Save in a transaction of the store's own, and forget what is done before.

        Raises:
            RefusedError: a stored revision is not the expected one. Roll back.
        """
        yield from self.bound_waits(feed)
        yield from self._write(feed, positions)
        yield from self.done.forget(feed, passed)

    def save_within(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
    ) -> Script[None]:
        """Do as `save_alone` in the caller's transaction, which keeps nothing of it after an error.

        Raises:
            RefusedError: a stored revision is not the expected one.
        """
        save, undo, keep = self._savepoint(positions, passed)
        for statement in save:
            yield Query(statement)
        try:
            yield from self._write(feed, positions)
            yield from self.done.forget(feed, passed)
        except Exception as error:
            undone = False
            with suppress(Exception):  # a deadlock or a full disk has rolled back everything
                for statement in undo:
                    yield Query(statement)
                    undone = True
            if undone and is_integrity_error(error):
                raise RefusedError from error  # the transaction can go on
            raise
        for statement in keep:
            yield Query(statement)

    def _savepoint(
        self, positions: Mapping[int, Position], passed: Mapping[int, Collection[str]]
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the statements that set a savepoint, go back to it, and give it up."""
        # The UPDATE of one row changes it or does not, without an error. Where it has company an
        # error of another statement would leave it, but for PostgreSQL, which ends the transaction.
        single = len(positions) == 1 and next(iter(positions.values())).replaces is not None
        alone = self._journal is None and not any(passed.values())
        if single and (alone or self._dialect == "postgresql"):
            return (), (), ()
        release = "RELEASE SAVEPOINT feedapi_save"
        undo = ("ROLLBACK TO SAVEPOINT feedapi_save", release)
        return ("SAVEPOINT feedapi_save",), undo, (release,)

    def bound_waits(self, feed: FeedKey) -> Script[None]:
        """Bound how long this transaction of the store's own waits for rows, and holds its own.

        PostgreSQL ends one that has been idle for so many seconds: its process is paused, or its
        machine is gone. Other databases have no such limit for one transaction.
        """
        bound = self.lock_waits.get(feed)
        if bound is not None and self._dialect == "postgresql":
            idle = milliseconds(IDLE_PARTS * bound)
            yield Query(
                f"SELECT set_config('lock_timeout', '{milliseconds(bound)}', true), "
                f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
            )

    def find_conflict(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[int | None]:
        """Raise the `FencedError` of the first position that is refused, if one is found.

        Returns a partition whose row another transaction holds, if the save may not wait for it.
        """
        # A locking read sees what others committed, also where a transaction otherwise sees its
        # own snapshot. It locks no other partition: two consumers that commit several partitions
        # at a time would deadlock over those.
        passes = feed in self.lock_waits and self._dialect in SKIPS_LOCKED
        lock = f"{self._lock} SKIP LOCKED" if passes else self._lock
        stored = yield from self._positions(feed, lock, positions)
        held: set[int] = set()
        if passes and (missing := positions.keys() - stored.keys()):
            held |= (yield from self._positions(feed, "", missing)).keys()
        for partition, position in sorted(positions.items()):
            if partition not in held:
                check_replaces(feed, partition, position.replaces, stored.get(partition))
        return min(held, default=None)

    def delete(self, feed: FeedKey, partitions: set[int] | None) -> Script[None]:
        """Delete the positions of the partitions, or of all."""
        stored = yield from self._positions(feed, self._lock)
        yield from self._delete(
            feed, {p: found for p, found in stored.items() if partitions is None or p in partitions}
        )
        yield from self.done.delete(feed, partitions)

    def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        """Save the positions, whatever is stored; return them as saved."""
        stored = yield from self._positions(feed, self._lock)
        yield from self.done.delete(feed, positions)
        return (yield from self._replace(feed, positions, stored))

    def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool
    ) -> Script[dict[FeedKey, dict[int, Position]]]:
        """Move the positions of each key to another one; return them as saved."""
        moved: dict[FeedKey, dict[int, Position]] = {}
        for old, new in keys.items():
            if not (positions := (yield from self._positions(old, self._lock))):
                continue
            stored = yield from self._positions(new, self._lock)
            moved[new] = moved_positions(new, positions, stored, overwrite=overwrite)
            yield from self._delete(new, stored)
            yield from self._delete(old, positions)
            yield from self._insert(new, moved[new], self._clock)
            yield from self.done.move(old, new)
        return moved

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
        """Return the positions of a time, see `JournalledStore.positions_at`."""
        at = check_reach(feed, self._journal, when, (yield from self._time()))
        # The `CoveringRow`s of the journal module: positions that were the current ones at a time.
        covering = yield Query(
            f"""SELECT partition_id, feed_cursor, status, revision, saved_at FROM {self._replaced}
            WHERE {self._feed} AND replaced_at > {at} AND saved_at <= {at}
            UNION ALL
            SELECT partition_id, feed_cursor, status, revision, saved_at FROM {self._cursors}
            WHERE {self._feed} AND saved_at <= {at}""",
            (feed.id, feed.id),
        )
        # The `LaterRow`s: the earliest saves of each partition after a time.
        later = yield Query(
            f"""SELECT partition_id, MIN(saved_at), MIN(CASE WHEN revision <= 1 THEN saved_at END)
            FROM (
                SELECT partition_id, saved_at, revision FROM {self._replaced}
                WHERE {self._feed} AND saved_at > {at}
                UNION ALL
                SELECT partition_id, saved_at, revision FROM {self._cursors}
                WHERE {self._feed} AND saved_at > {at}
            ) AS later GROUP BY partition_id""",
            (feed.id, feed.id),
        )
        return reconstruct(feed, when, covering, later)

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        """Make the positions of a time the current ones; return them as saved."""
        stored = yield from self._positions(feed, self._lock)
        target = yield from self.positions_at(feed, to)
        check_rewind(feed, to, target)
        yield from self._delete(feed, {p: f for p, f in stored.items() if p not in target})
        yield from self.done.delete(feed, None)
        return (yield from self._replace(feed, target, stored))

    def _positions(
        self, feed: FeedKey, lock: str, partitions: Iterable[int] | None = None
    ) -> Script[dict[int, Position]]:
        load = (
            f"SELECT partition_id, feed_cursor, status, revision FROM {self._cursors} "
            f"WHERE {self._feed}"
        )
        parts = [""]
        if partitions is not None:
            parts = [f" AND partition_id IN ({listed(some)})" for some in in_parts(partitions)]
        found: dict[int, Position] = {}
        for part in parts:
            rows = yield Query(f"{load}{part} ORDER BY partition_id{lock}", (feed.id,))
            found |= {row[0]: stored_position(feed, *row) for row in rows}
        return found

    def _replace(
        self, feed: FeedKey, positions: Mapping[int, Position], stored: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        replaced = in_place_of(stored, positions)
        yield from self._write(feed, replaced)
        return replaced

    def _write(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save the positions if the stored revisions are the expected ones.

        Raises:
            RefusedError, or the driver's error of an equal key: one of them is not.
        """
        at = yield from self._begin_change(feed)
        if later := {p: new for p, new in positions.items() if new.replaces is not None}:
            yield from self._update(feed, later, at)
        if first := {p: new for p, new in positions.items() if new.replaces is None}:
            # An equal key that another transaction has inserted can't be passed by.
            insert = self._insert(feed, first, at)
            bound = self.lock_waits.get(feed)
            yield from insert if bound is None else self._bounded_lock_waits(insert, bound)
            yield from self._note_first(feed, first)

    # The statements that change positions

    def _update(self, feed: FeedKey, positions: Mapping[int, Position], at: Query) -> Script[None]:
        for some in in_parts(positions):
            chunk = {p: positions[p] for p in some}
            matching = self._matching(feed, {p: new.replaces or 0 for p, new in chunk.items()})
            passes = feed in self.lock_waits
            if self._lock and (passes or len(chunk) > 1):  # an UPDATE locks rows as they lie
                ours = Query(f"{self._feed} AND partition_id IN ({listed(chunk)})", (feed.id,))
                locked = f"SELECT partition_id, revision FROM {self._cursors} WHERE {ours.sql}"
                locked += f" ORDER BY partition_id{self._lock}{' SKIP LOCKED' * passes}"
                rows = yield Query(locked, ours.parameters)
                if {row[0]: row[1] for row in rows} != {
                    p: new.replaces for p, new in chunk.items()
                }:
                    raise RefusedError
                matching = ours
            yield from self._archive(matching, at)
            cursor = _by_partition({p: new.cursor for p, new in chunk.items()})
            status = _by_partition({p: new.status for p, new in chunk.items()})
            revision = _revisions({p: new.revision for p, new in chunk.items()})
            parts = (cursor, status, revision, at, matching)
            update = CountedChange(
                f"UPDATE {self._cursors} SET feed_cursor = {cursor.sql}, status = {status.sql}, "
                f"revision = {revision.sql}, saved_at = {at.sql} WHERE {matching.sql}",
                tuple(value for part in parts for value in part.parameters),
            )
            if (yield update) != len(chunk):
                raise RefusedError

    def _insert(self, feed: FeedKey, positions: Mapping[int, Position], at: Query) -> Script[None]:
        rest = (*at.parameters, feed.url, feed.name, orjson.dumps(feed.filters).decode())
        yield StatementRows(
            f"INSERT INTO {self._cursors} (feed_id, partition_id, feed_cursor, status, revision, "
            f"saved_at, feed_url, consumer, filters) VALUES (?, ?, ?, ?, ?, {at.sql}, ?, ?, ?)",
            [
                (feed.id, partition, new.cursor, new.status, new.revision, *rest)
                for partition, new in sorted(positions.items())
            ],
        )

    def _note_first(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Note in the journal that nothing was stored before, as a row of revision 0."""
        if self._journal is not None:
            for some in in_parts(positions):
                yield Query(
                    f"INSERT INTO {self._replaced} (feed_id, replaced_at, {_ARCHIVED}) "
                    "SELECT feed_id, saved_at, partition_id, 0, '', 'open', saved_at "
                    f"FROM {self._cursors} WHERE {self._feed} AND partition_id IN ({listed(some)})",
                    (feed.id,),
                )

    def _delete(self, feed: FeedKey, stored: Mapping[int, Position]) -> Script[None]:
        if not stored:
            return
        at = yield from self._begin_change(feed)
        for some in in_parts(stored):
            matching = self._matching(feed, {p: stored[p].revision for p in some})
            yield from self._archive(matching, at)
            delete = f"DELETE FROM {self._cursors} WHERE {matching.sql}"
            if (yield CountedChange(delete, matching.parameters)) != len(some):
                raise RefusedError

    def _archive(self, matching: Query, at: Query) -> Script[None]:
        """Copy the matching rows into the journal, if there is one."""
        if self._journal is not None:
            # Locked as the UPDATE that follows will lock them: two consumers that both had read
            # them could only deadlock.
            yield Query(
                f"INSERT INTO {self._replaced} (feed_id, replaced_at, {_ARCHIVED}) "
                f"SELECT feed_id, {at.sql}, {_ARCHIVED} FROM {self._cursors} "
                f"WHERE {matching.sql}{self._lock}",
                (*at.parameters, *matching.parameters),
            )

    def _matching(self, feed: FeedKey, revisions: Mapping[int, int]) -> Query:
        """Return the condition for the rows of these partitions that have these revisions."""
        if len(revisions) == 1:
            # The usual save has always the same text: drivers and SQLAlchemy prepare it once.
            ((partition, revision),) = revisions.items()
            condition = f"{self._feed} AND partition_id = ? AND revision = ?"
            return Query(condition, (feed.id, partition, revision))
        return Query(
            f"{self._feed} AND partition_id IN ({listed(revisions)}) "
            f"AND revision = {_revisions(revisions).sql}",
            (feed.id,),
        )

    # Time

    @property
    def _clock(self) -> Query:
        # SQLite's clock is the machine's, and has milliseconds only.
        in_statement = Query(CLOCKS[self._dialect])
        return self._number(now()) if self._dialect == "sqlite" else in_statement

    def _number(self, at: int) -> Query:
        return Query(typed(self._dialect, "BIGINT"), (at,))

    def _time(self) -> Script[int]:
        if self._dialect == "sqlite":
            return now()
        rows = yield Query(f"SELECT {self._clock.sql}")
        return int(rows[0][0])

    def _begin_change(self, feed: FeedKey) -> Script[Query]:
        """Return the time of a save, as a part of a statement.

        With a journal as a number: the end of one position is the beginning of the next.
        """
        if self._journal is None:
            return self._clock
        at = yield from self._time()
        yield from self._prune(feed, at)
        return self._number(at)

    def _prune(self, feed: FeedKey, at: int) -> Script[None]:
        if (before := self._pruner.due(feed, at)) is not None:
            prune = f"DELETE FROM {self._replaced} WHERE {self._feed} AND replaced_at < {before}"
            yield Query(prune, (feed.id,))

    # Waiting for others

    def _bounded_lock_waits(self, script: Script[None], seconds: float) -> Script[None]:
        """Bound the wait for row locks within a savepoint, and restore what was set."""
        if self._dialect == "postgresql":
            shown = "current_setting('lock_timeout')"
            change = "SELECT set_config('lock_timeout', '{}', true)"
            value = milliseconds(seconds)
        elif self._dialect in MYSQL:
            shown = "@@SESSION.innodb_lock_wait_timeout"
            change = "SET SESSION innodb_lock_wait_timeout = {}"
            value = str(max(1, round(seconds)))
        else:
            yield from script
            return
        before = (yield Query(f"SELECT {shown}"))[0][0]
        yield Query(change.format(value))
        try:
            yield from script
        except Exception:
            if self._dialect != "postgresql":  # which restores it itself
                yield Query(change.format(before))
            raise
        yield Query(change.format(before))


def _revisions(revisions: Mapping[int, int]) -> Query:
    """Return an expression for the revision that belongs to a row's partition."""
    if len(revisions) == 1:
        return Query("?", tuple(revisions.values()))
    branches = " ".join(f"WHEN {int(p)} THEN {int(r)}" for p, r in revisions.items())
    return Query(f"CASE partition_id {branches} END")


def _by_partition(values: Mapping[int, str]) -> Query:
    """Return an expression for the value that belongs to a row's partition."""
    if len(set(values.values())) == 1:
        return Query("?", tuple(values.values())[:1])
    branches = " ".join(f"WHEN {int(partition)} THEN ?" for partition in values)
    return Query(f"CASE partition_id {branches} END", tuple(values.values()))
