"""The SQL statements of `SQLiteCursorStore`, and in which order a transaction executes them.

What happens in a transaction is written once, as a script.
`feedapi_client.stores.sqlite_connection` runs a script on each kind of connection.

The statements are plain SQL, which MySQL understands, too: `feedapi_client.django` runs them there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    check_predecessor,
    stored_position,
    with_next_revisions,
)
from feedapi_client.stores.done_statements import TABLE, DoneScripts
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    now,
    reconstruct,
)
from feedapi_client.stores.moving import moved_positions
from feedapi_client.stores.scripts import Query, Script, StatementRows
from feedapi_client.stores.stored_format import STORE_FORMAT, note_format

# The same tables as SQLAlchemyCursorStore creates: both stores can work on one file.
_CREATE_TABLE = """
CREATE TABLE IF NOT EXISTS feedapi_cursors (
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
)
"""
_CREATE_JOURNAL = """
CREATE TABLE IF NOT EXISTS feedapi_cursors_journal (
    feed_id CHAR(64) NOT NULL,
    replaced_at BIGINT NOT NULL,
    partition_id INTEGER NOT NULL,
    revision BIGINT NOT NULL,
    feed_cursor TEXT NOT NULL,
    status VARCHAR(16) NOT NULL,
    saved_at BIGINT NOT NULL,
    PRIMARY KEY (feed_id, replaced_at, partition_id, revision)
)
"""
_LOAD = "SELECT partition_id, feed_cursor, status, revision FROM feedapi_cursors WHERE feed_id = ?"
_INSERT = """
INSERT INTO feedapi_cursors (
    feed_id, partition_id, feed_cursor, status, revision, saved_at, feed_url, consumer, filters
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_UPDATE = """
UPDATE feedapi_cursors SET feed_cursor = ?, status = ?, revision = ?, saved_at = ?
WHERE feed_id = ? AND partition_id = ?
"""
_DELETE = "DELETE FROM feedapi_cursors WHERE feed_id = ? AND partition_id = ?"
_FEEDS = "SELECT DISTINCT feed_url, consumer, filters FROM feedapi_cursors"
_ARCHIVE = """
INSERT INTO feedapi_cursors_journal (
    feed_id, replaced_at, partition_id, revision, feed_cursor, status, saved_at
)
SELECT feed_id, ?, partition_id, revision, feed_cursor, status, saved_at
FROM feedapi_cursors WHERE feed_id = ? AND partition_id = ?
"""
_PRUNE = "DELETE FROM feedapi_cursors_journal WHERE feed_id = ? AND replaced_at < ?"
# The `CoveringRow`s of the journal module: positions that were the current ones at a time.
_COVERING = """
SELECT partition_id, feed_cursor, status, revision, saved_at FROM feedapi_cursors_journal
WHERE feed_id = ? AND replaced_at > ? AND saved_at <= ?
UNION ALL
SELECT partition_id, feed_cursor, status, revision, saved_at FROM feedapi_cursors
WHERE feed_id = ? AND saved_at <= ?
"""
# The `LaterRow`s: the earliest saves of each partition after a time.
_LATER = """
SELECT partition_id, MIN(saved_at), MIN(CASE WHEN revision = 1 THEN saved_at END) FROM (
    SELECT partition_id, saved_at, revision FROM feedapi_cursors_journal
    WHERE feed_id = ? AND saved_at > ?
    UNION ALL
    SELECT partition_id, saved_at, revision FROM feedapi_cursors
    WHERE feed_id = ? AND saved_at > ?
) AS later GROUP BY partition_id
"""


_MAX_NAMED = 500
"""The number of partitions that a statement names. For more it takes all of the feed."""


class CursorScripts:
    """Makes the scripts of a store. Each has to run within one transaction.

    Arguments:
        journal: keep a history of positions.
        lock: ends a SELECT of rows that are about to be changed, where a transaction does not lock
            the whole database.
        share: ends a SELECT of rows that nobody else may change until the transaction ends.
        clock: the SELECT of the database's time, in microseconds since 1970 UTC; by default the
            machine's is taken.
    """

    def __init__(
        self,
        journal: Journal | None,
        *,
        lock: str = "",
        share: str = "",
        clock: str | None = None,
    ) -> None:
        self._journal = journal
        self._pruner = Pruner(journal)
        # In the order of the partitions: two consumers that save several don't deadlock.
        self._lock = f" ORDER BY partition_id {lock}" if lock else ""
        self._clock = clock
        self.done = DoneScripts(
            TABLE, "feedapi_cursors", lock=lock and f" {lock}", share=share and f" {share}"
        )

    def create_tables(self) -> Script[None]:
        """Create the tables that do not exist yet.

        Raises:
            StoreError: a newer version of this package wrote them.
        """
        yield from note_format("feedapi_cursors", STORE_FORMAT)
        yield Query(_CREATE_TABLE)
        yield Query(self.done.create)
        if self._journal is not None:
            yield Query(_CREATE_JOURNAL)

    def load(self, feed: FeedKey) -> Script[dict[int, Position]]:
        """Return all positions."""
        rows = yield Query(_LOAD, (feed.id,))
        return {row[0]: stored_position(feed, *row) for row in rows}

    def feeds(self) -> Script[list[Any]]:
        """Return URL, consumer's name and filters (JSON) of every feed."""
        return (yield Query(_FEEDS))

    def save(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save the positions if the stored revisions are the expected ones.

        Raises:
            FencedError: one of them is not. Nothing was changed.
        """
        stored = yield from self._revisions(feed, positions)
        for partition, position in sorted(positions.items()):
            check_predecessor(feed, partition, position, stored.get(partition))
        yield from self._write(feed, positions, stored)

    def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
    ) -> Script[None]:
        """Do as `save`, and forget what is done before these positions."""
        yield from self.save(feed, positions)
        yield from self.done.forget(feed, passed)

    def _write(
        self, feed: FeedKey, positions: Mapping[int, Position], stored: Iterable[int]
    ) -> Script[None]:
        """Save the positions; of `stored` partitions they replace those that are there."""
        at = yield from self._time()
        replaced = set(stored)
        ordered = sorted(positions.items())
        yield from self._archive(feed, [p for p, _ in ordered if p in replaced], at)
        key = (feed.url, feed.name, orjson.dumps(feed.filters).decode())
        updated = [
            (new.cursor, new.status, new.revision, at, feed.id, partition)
            for partition, new in ordered
            if partition in replaced
        ]
        inserted = [
            (feed.id, partition, new.cursor, new.status, new.revision, at, *key)
            for partition, new in ordered
            if partition not in replaced
        ]
        if updated:
            yield StatementRows(_UPDATE, updated)
        if inserted:
            yield StatementRows(_INSERT, inserted)

    def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        """Save the positions, whatever is stored; return them as saved."""
        stored = yield from self._revisions(feed, positions)
        replaced = with_next_revisions(positions, stored)
        yield from self.done.delete(feed, positions)
        yield from self.save(feed, replaced)
        return replaced

    def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool
    ) -> Script[dict[FeedKey, dict[int, Position]]]:
        """Move the positions of each key to another one; return them as saved."""
        moved: dict[FeedKey, dict[int, Position]] = {}
        for old, new in keys.items():
            if not (positions := (yield from self._positions(old))):
                continue
            stored = yield from self._positions(new)
            moved[new] = moved_positions(new, positions, stored, overwrite=overwrite)
            yield from self.delete(new, set(stored) - set(positions))
            yield from self.done.move(old, new)
            yield from self.delete(old, None)
            yield from self._write(new, moved[new], set(stored) & set(positions))
        return moved

    def delete(self, feed: FeedKey, partitions: set[int] | None) -> Script[None]:
        """Delete the positions of the partitions, or of all."""
        stored = yield from self._positions(feed)
        to_delete = [p for p in stored if partitions is None or p in partitions]
        if to_delete:
            yield from self._archive(feed, to_delete, (yield from self._time()))
            yield StatementRows(_DELETE, [(feed.id, partition) for partition in to_delete])
        yield from self.done.delete(feed, partitions)

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
        """Return the positions of a time, see `JournalledStore.positions_at`."""
        at = check_reach(feed, self._journal, when, (yield from self._time()))
        covering = yield Query(_COVERING, (feed.id, at, at, feed.id, at))
        later = yield Query(_LATER, (feed.id, at, feed.id, at))
        return reconstruct(feed, when, covering, later)

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        """Make the positions of a time the current ones; return them as saved."""
        target = yield from self.positions_at(feed, to)
        check_rewind(feed, to, target)
        stored = yield from self._positions(feed)
        yield from self.delete(feed, stored.keys() - target.keys())
        yield from self.done.delete(feed, None)
        return (yield from self.replace(feed, target))

    def _positions(self, feed: FeedKey) -> Script[dict[int, Position]]:
        rows = yield Query(f"{_LOAD}{self._lock}", (feed.id,))
        return {row[0]: stored_position(feed, *row) for row in rows}

    def _revisions(self, feed: FeedKey, partitions: Iterable[int]) -> Script[dict[int, int]]:
        wanted = sorted(set(partitions))
        if not wanted:
            return {}
        load = _LOAD
        if len(wanted) <= _MAX_NAMED:
            load += f" AND partition_id IN ({', '.join(map(str, map(int, wanted)))})"
        rows = yield Query(f"{load}{self._lock}", (feed.id,))
        return {row[0]: row[3] for row in rows}

    def _time(self) -> Script[int]:
        if self._clock is None:
            return now()
        rows = yield Query(self._clock)
        return int(rows[0][0])

    def _archive(self, feed: FeedKey, partitions: Iterable[int], at: int) -> Script[None]:
        if self._journal is None:
            return
        if rows := [(at, feed.id, partition) for partition in partitions]:
            yield StatementRows(_ARCHIVE, rows)
        if (before := self._pruner.due(feed, at)) is not None:
            yield StatementRows(_PRUNE, [(feed.id, before)])
