"""Positions in a SQL database, as scripts: for every database, of every driver.

Each runs within one transaction, and locks rows in the order of the partitions: two consumers that
save several don't deadlock. The usual save, of one position, is one UPDATE of the row with the
revision that it replaces. All other changes lock the rows, look at them, and write.
"""

# ruff: noqa: S608 - the statements are made of constants, numbers and quoted names

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    check_replaces,
    in_place_of,
    key_columns,
    stored_position,
)
from feedapi_client.stores.done import DoneScripts
from feedapi_client.stores.journal import (
    Journal,
    check_reach,
    check_rewind,
    now,
    reach,
    reconstruct,
)
from feedapi_client.stores.moving import (
    Edit,
    Stored,
    move_quarantined,
)
from feedapi_client.stores.scripts import (
    DIALECTS,
    CountedChange,
    Query,
    Script,
    feed_condition,
    in_parts,
    is_integrity_error,
    listed,
    lock_wait,
    milliseconds,
    typed,
)

IDLE_PARTS = 10
"""A transaction of the store's own may be idle so many times as long as one may wait for it."""
_CHANGED = ("feed_cursor", "status", "revision", "saved_at")
_COLUMNS = ("feed_id", "partition_id", *_CHANGED, "feed_url", "consumer", "filters")
_ARCHIVED = "partition_id, revision, feed_cursor, status, saved_at"
_PRUNES_EVERY = 100
"""The first change of a store, and each one after so many, prunes the journal of the feed."""
_INSERTED_AT_ONCE = 100
"""SQLite before 3.32 takes 999 parameters a statement, and a position has nine."""


class HeldError(Exception):
    """Another transaction holds the row, and the save may not wait in the database."""

    def __init__(self, partition: int) -> None:
        super().__init__(partition)
        self.partition = partition


class PositionScripts:
    """`named` returns the name of a table, quoted, for what is appended to that of positions."""

    def __init__(
        self,
        dialect: str,
        named: Callable[[str], str],
        journal: Journal | None = None,
        quarantine: str = "feedapi_quarantine",
    ) -> None:
        self.lock_waits: dict[FeedKey, float] = {}
        self.done = DoneScripts(dialect, named("_done"), named(""))
        self._name = dialect
        self._dialect = DIALECTS[dialect]
        self._cursors = cursors = named("")
        self._replaced = named("_journal")
        self._quarantine = quarantine
        self._journal = journal
        self._archived: Counter[str] = Counter()
        # SQLite's clock is the machine's, and has milliseconds only.
        self._now = now if dialect == "sqlite" else None
        self._clock = "?" if self._now else self._dialect.clock
        self._number = typed(dialect, "BIGINT")
        self._feed = feed_condition(dialect)
        one = f"{self._feed} AND partition_id = ? AND revision = ?"
        self._update = (
            f"UPDATE {cursors} SET feed_cursor = ?, status = ?, revision = ?, "
            f"saved_at = {self._clock} WHERE {one}"
        )
        free = f"SELECT 1 FROM {cursors} WHERE {one} FOR UPDATE SKIP LOCKED"
        self._update_free = f"{self._update} AND EXISTS ({free})"
        self._replace_found = self._dialect.replacing(("feed_id", "partition_id"), _CHANGED)

    def feeds(self) -> Script[list[Any]]:
        select = f"SELECT DISTINCT feed_url, consumer, filters FROM {self._cursors}"
        rows: list[Any] = yield Query(select)
        return rows

    def load(self, feed: FeedKey, lock: str = "") -> Script[dict[int, Position]]:
        rows = yield from self._rows(feed, "feed_cursor, status, revision", lock)
        return {row[0]: stored_position(feed, *row) for row in rows}

    def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        within: bool,
    ) -> Script[None]:
        """`within`: the caller's transaction, which keeps nothing of a save that is refused."""
        first = any(new.replaces is None for new in positions.values())
        single = len(positions) == 1 and self._journal is None and not first
        # The UPDATE of one row changes it or does not, without an error. Where it has company an
        # error of another statement would leave it, unless that ends the transaction.
        alone = single and (self._dialect.ends or not any(passed.values()))
        save = self._save(feed, positions, passed, single=single)
        if not within:
            yield from self.bound_waits(feed)
        if first or (within and not alone):
            save = self._in_savepoint(feed, positions, save)
        yield from save

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        yield from self._lock_file()
        yield from self.load(feed, self._dialect.lock)
        target = yield from self.positions_at(feed, to)
        check_rewind(feed, to, target)
        rewound = yield from self.change(
            [feed], lambda stored: {feed: in_place_of(stored[feed], target)}, forgets=None
        )
        return rewound[feed]

    def change(
        self,
        feeds: Iterable[FeedKey],
        edit: Edit,
        *,
        forgets: Collection[int] | None = (),
        moves: Mapping[FeedKey, FeedKey] | None = None,
    ) -> Script[Stored]:
        """See `Administered._change`."""
        yield from self._lock_file()
        stored: Stored = {}
        for feed in sorted(feeds, key=lambda each: each.id):
            stored[feed] = yield from self.load(feed, self._dialect.lock)
        wanted = edit(stored)
        at = yield from self._time()
        for feed, positions in wanted.items():
            found = stored[feed]
            yield from self._delete(feed, found.keys() - positions.keys(), at)
            new = {p: one for p, one in positions.items() if one != found.get(p)}
            yield from self._write(feed, new, found, at)
            yield from self.done.delete(feed, forgets)
        pairs = [(old, new) for old, new in (moves or {}).items() if new in wanted]
        for pair in pairs:
            yield from self.done.move(*pair)
        if pairs:
            yield from move_quarantined(self._quarantine, self._name, pairs)
        return wanted

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
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

    def bound_waits(self, feed: FeedKey) -> Script[None]:
        """PostgreSQL ends a transaction that was idle so long: its process is paused, or gone."""
        if self._name == "postgresql" and (bound := self.lock_waits.get(feed)) is not None:
            idle = milliseconds(IDLE_PARTS * bound)
            yield Query(
                f"SELECT set_config('lock_timeout', '{milliseconds(bound)}', true), "
                f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
            )

    # Saving

    def _save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        single: bool,
    ) -> Script[None]:
        if not (single and (yield from self._update_one(feed, positions))):
            later = {p: new for p, new in positions.items() if new.replaces is not None}
            at = yield from self._look(feed, later)
            yield from self._write(feed, positions, later, at)
        yield from self.done.forget(feed, passed)

    def _update_one(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[bool]:
        passes = self._dialect.lock != "" and feed in self.lock_waits
        if passes and not self._dialect.skips:
            return False
        ((partition, new),) = positions.items()
        at = (self._now(),) if self._now else ()
        its = (feed.id, partition, new.replaces)
        values = (new.cursor, new.status, new.revision, *at, *its, *its * passes)
        update = self._update_free if passes else self._update
        return bool((yield CountedChange(update, values)) == 1)

    def _look(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[int]:
        """Lock the rows of these positions, check that they can be replaced; return the time."""
        if not positions:
            return (yield from self._time())
        lock, passes = self._dialect.lock, self._dialect.lock != "" and feed in self.lock_waits
        yield from self._lock_file()
        clock = "0" if self._now else self._clock
        rows = yield from self._rows(
            feed, f"revision, {clock}", lock + " SKIP LOCKED" * passes, positions
        )
        stored = {row[0]: row[1] for row in rows}
        held: set[int] = set()
        if passes and (missing := positions.keys() - stored.keys()):
            held = {row[0] for row in (yield from self._rows(feed, "revision", "", missing))}
        for partition, position in sorted(positions.items()):
            if partition not in held:
                check_replaces(feed, partition, position.replaces, stored.get(partition))
        if held:
            raise HeldError(min(held))
        return self._now() if self._now else max((int(row[2]) for row in rows), default=0)

    def _in_savepoint(
        self, feed: FeedKey, positions: Mapping[int, Position], script: Script[None]
    ) -> Script[None]:
        """Leave nothing of a script after an error, and look why a key is taken."""
        yield from self._lock_file()
        yield Query("SAVEPOINT feedapi_save")
        try:
            yield from script
        except Exception as error:
            undone = False
            with suppress(Exception):  # a deadlock or a full disk has rolled back everything
                yield Query("ROLLBACK TO SAVEPOINT feedapi_save")
                yield Query("RELEASE SAVEPOINT feedapi_save")
                undone = True
            if undone and is_integrity_error(error):
                yield from self._look(feed, positions)
            raise
        yield Query("RELEASE SAVEPOINT feedapi_save")

    # The statements that change positions

    def _write(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        there: Collection[int],
        at: int,
    ) -> Script[None]:
        """Those that are `there` are locked, and replaced."""
        yield from self._archive(feed, [p for p in positions if p in there], at)
        found = {p: new for p, new in positions.items() if p in there}
        yield from self._insert(feed, found, at, self._replace_found)
        if first := {p: new for p, new in positions.items() if p not in there}:
            # An equal key that another transaction has inserted can't be passed by.
            insert, bound = self._insert(feed, first, at), self.lock_waits.get(feed)
            yield from insert if bound is None else self._bounded_lock_waits(insert, bound)
            yield from self._note_first(feed, first)

    def _insert(
        self, feed: FeedKey, positions: Mapping[int, Position], at: int, found: str = ""
    ) -> Script[None]:
        saved_at, time = self._saved_at(at)
        row = f"(?, ?, ?, ?, ?, {saved_at}, ?, ?, ?)"
        key = key_columns(feed)
        for some in in_parts(positions, _INSERTED_AT_ONCE):
            values: list[Any] = []
            for partition in some:
                new = positions[partition]
                values += (feed.id, partition, new.cursor, new.status, new.revision, *time, *key)
            rows = ", ".join([row] * len(some))
            yield Query(
                f"INSERT INTO {self._cursors} ({', '.join(_COLUMNS)}) VALUES {rows} {found}", values
            )

    def _delete(self, feed: FeedKey, partitions: Collection[int], at: int) -> Script[None]:
        yield from self._archive(feed, partitions, at)
        for some in in_parts(partitions):
            delete = f"DELETE FROM {self._cursors} WHERE {self._feed}"
            yield Query(f"{delete} AND partition_id IN ({listed(some)})", (feed.id,))

    def _archive(self, feed: FeedKey, partitions: Collection[int], at: int) -> Script[None]:
        if self._journal is None:
            return
        if self._journal.keep is not None and self._archived[feed.id] % _PRUNES_EVERY == 0:
            before = f"replaced_at < {reach(self._journal, at)}"
            yield Query(f"DELETE FROM {self._replaced} WHERE {self._feed} AND {before}", (feed.id,))
        self._archived[feed.id] += 1
        for some in in_parts(partitions):
            yield from self._copy(feed, some, f"feed_id, {self._number}, {_ARCHIVED}", at)

    def _note_first(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Note in the journal that nothing was stored before, as a row of revision 0."""
        if self._journal is not None:
            for some in in_parts(positions):
                nothing = "feed_id, saved_at, partition_id, 0, '', 'open', saved_at"
                yield from self._copy(feed, some, nothing)

    def _copy(self, feed: FeedKey, some: list[int], columns: str, *values: int) -> Script[None]:
        yield Query(
            f"INSERT INTO {self._replaced} (feed_id, replaced_at, {_ARCHIVED}) "
            f"SELECT {columns} FROM {self._cursors} "
            f"WHERE {self._feed} AND partition_id IN ({listed(some)})",
            (*values, feed.id),
        )

    def _rows(
        self, feed: FeedKey, columns: str, lock: str, partitions: Iterable[int] | None = None
    ) -> Script[list[Any]]:
        select = f"SELECT partition_id, {columns} FROM {self._cursors} WHERE {self._feed}"
        parts = [""]
        if partitions is not None:
            parts = [f" AND partition_id IN ({listed(some)})" for some in in_parts(partitions)]
        rows: list[Any] = []
        for part in parts:
            rows += yield Query(f"{select}{part} ORDER BY partition_id{lock}", (feed.id,))
        return rows

    # Time

    def _saved_at(self, at: int) -> tuple[str, tuple[int, ...]]:
        """With a journal that of the look: the end of one position is the beginning of the next."""
        if self._journal is not None:
            return self._number, (at,)
        return self._clock, (self._now(),) if self._now else ()

    def _time(self) -> Script[int]:
        if self._now is not None:
            return self._now()
        if self._journal is None:
            return 0
        return int((yield Query(f"SELECT {self._clock}"))[0][0])

    # Waiting for others

    def _lock_file(self) -> Script[None]:
        """Take the lock of the one writer, where there is one, as SQLite has.

        A transaction that has read fails at once when it writes beside another writer; one that
        begins with a change waits for it. Python's driver begins none for a savepoint, whose
        release would commit.
        """
        if not self._dialect.lock:
            yield Query(f"DELETE FROM {self._cursors} WHERE 1 = 0")

    def _bounded_lock_waits(self, script: Script[None], seconds: float) -> Script[None]:
        if not self._dialect.bound:
            yield from script
            return
        before = (yield Query(f"SELECT {self._dialect.shown}"))[0][0]
        yield Query(self._dialect.bound.format(lock_wait(self._name, seconds)))
        try:
            yield from script
        except Exception:
            if not self._dialect.ends:  # which restores it itself
                yield Query(self._dialect.bound.format(before))
            raise
        yield Query(self._dialect.bound.format(before))
