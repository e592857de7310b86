"""The SQL statements of `SQLiteCursorStore`, and in which order a transaction executes them.

What happens in a transaction is written once, as a *script*: a generator that yields statements
and receives the rows found. `feedapi_client.stores.sqlite_connection` runs a script on each kind
of connection.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    check_predecessor,
    stored_position,
    with_next_revisions,
)
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    now,
    reconstruct,
)
from feedapi_client.stores.moving import moved_positions

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
_LOAD_ONE = f"{_LOAD} AND partition_id = ?"
_SAVE = """
INSERT INTO feedapi_cursors (
    feed_id, partition_id, feed_cursor, status, revision, saved_at, feed_url, consumer, filters
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (feed_id, partition_id) DO UPDATE SET
    feed_cursor = excluded.feed_cursor,
    status = excluded.status,
    revision = excluded.revision,
    saved_at = excluded.saved_at
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
WHERE feed_id = ?1 AND replaced_at > ?2 AND saved_at <= ?2
UNION ALL
SELECT partition_id, feed_cursor, status, revision, saved_at FROM feedapi_cursors
WHERE feed_id = ?1 AND saved_at <= ?2
"""
# The `LaterRow`s: the earliest saves of each partition after a time.
_LATER = """
SELECT partition_id, MIN(saved_at), MIN(CASE WHEN revision = 1 THEN saved_at END) FROM (
    SELECT partition_id, saved_at, revision FROM feedapi_cursors_journal
    WHERE feed_id = ?1 AND saved_at > ?2
    UNION ALL
    SELECT partition_id, saved_at, revision FROM feedapi_cursors
    WHERE feed_id = ?1 AND saved_at > ?2
) GROUP BY partition_id
"""

T = TypeVar("T")


class Query(NamedTuple):
    """A statement and its parameters."""

    sql: str
    parameters: Sequence[Any] = ()


class Change(NamedTuple):
    """A statement and the rows to execute it for."""

    sql: str
    rows: list[tuple[Any, ...]]


Script = Generator[Query | Change, list[Any], T]


class CursorScripts:
    """Makes the scripts of a store. Each has to run within one transaction."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._pruner = Pruner(journal)

    def create_tables(self) -> Script[None]:
        """Create the tables that do not exist yet."""
        yield Query(_CREATE_TABLE)
        if self._journal is not None:
            yield Query(_CREATE_JOURNAL)

    def load(self, feed: FeedKey) -> Script[list[Any]]:
        """Return partition, cursor, status and revision of all positions."""
        return (yield Query(_LOAD, (feed.id,)))

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

    def _write(
        self, feed: FeedKey, positions: Mapping[int, Position], stored: Iterable[int]
    ) -> Script[None]:
        """Save the positions; of `stored` partitions they replace those that are there."""
        at = now()
        replaced = set(stored)
        yield from self._archive(feed, [p for p in positions if p in replaced], at)
        key = (feed.url, feed.name, orjson.dumps(feed.filters).decode())
        rows = [
            (feed.id, partition, new.cursor, new.status, new.revision, at, *key)
            for partition, new in positions.items()
        ]
        yield Change(_SAVE, rows)

    def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        """Save the positions, whatever is stored; return them as saved."""
        stored = yield from self._revisions(feed, positions)
        replaced = with_next_revisions(positions, stored)
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
            yield from self.delete(old, None)
            yield from self._write(new, moved[new], set(stored) & set(positions))
        return moved

    def delete(self, feed: FeedKey, partitions: set[int] | None) -> Script[None]:
        """Delete the positions of the partitions, or of all."""
        rows = yield Query(_LOAD, (feed.id,))
        to_delete = [row[0] for row in rows if partitions is None or row[0] in partitions]
        yield from self._archive(feed, to_delete, now())
        yield Change(_DELETE, [(feed.id, partition) for partition in to_delete])

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
        """Return the positions of a time, see `JournalledStore.positions_at`."""
        at = check_reach(feed, self._journal, when)
        covering = yield Query(_COVERING, (feed.id, at))
        later = yield Query(_LATER, (feed.id, at))
        return reconstruct(feed, when, covering, later)

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        """Make the positions of a time the current ones; return them as saved."""
        target = yield from self.positions_at(feed, to)
        check_rewind(feed, to, target)
        rows = yield Query(_LOAD, (feed.id,))
        yield from self.delete(feed, {row[0] for row in rows} - target.keys())
        return (yield from self.replace(feed, target))

    def _positions(self, feed: FeedKey) -> Script[dict[int, Position]]:
        rows = yield Query(_LOAD, (feed.id,))
        return {row[0]: stored_position(feed, *row) for row in rows}

    def _revisions(self, feed: FeedKey, partitions: Iterable[int]) -> Script[dict[int, int]]:
        wanted = set(partitions)
        if len(wanted) == 1:
            rows = yield Query(_LOAD_ONE, (feed.id, *wanted))
        else:
            rows = yield Query(_LOAD, (feed.id,))
        return {row[0]: row[3] for row in rows if row[0] in wanted}

    def _archive(self, feed: FeedKey, partitions: Iterable[int], at: int) -> Script[None]:
        if self._journal is None:
            return
        if rows := [(at, feed.id, partition) for partition in partitions]:
            yield Change(_ARCHIVE, rows)
        if (before := self._pruner.due(feed, at)) is not None:
            yield Change(_PRUNE, [(feed.id, before)])
