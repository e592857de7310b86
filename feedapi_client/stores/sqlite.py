"""Cursors in a SQLite file, with the standard library only."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import orjson
from anyio.lowlevel import RunVar

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import Closable, check_predecessor, following, stored_position
from feedapi_client.stores.journal import (
    Journal,
    Pruner,
    check_reach,
    check_rewind,
    now,
    reconstruct,
)

T = TypeVar("T")

# The same tables as SQLAlchemyCursorStore makes: both stores can work on one file.
_TABLE = """CREATE TABLE IF NOT EXISTS feedapi_cursors (
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
_JOURNAL = """CREATE TABLE IF NOT EXISTS feedapi_cursors_journal (
    feed_id CHAR(64) NOT NULL,
    replaced_at BIGINT NOT NULL,
    partition_id INTEGER NOT NULL,
    revision BIGINT NOT NULL,
    feed_cursor TEXT NOT NULL,
    status VARCHAR(16) NOT NULL,
    saved_at BIGINT NOT NULL,
    PRIMARY KEY (feed_id, replaced_at, partition_id, revision)
)"""
_LOAD = "SELECT partition_id, feed_cursor, status, revision FROM feedapi_cursors WHERE feed_id = ?"
_SAVE = """INSERT INTO feedapi_cursors (feed_id, partition_id, feed_cursor, status, revision, saved_at, feed_url, consumer, filters)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (feed_id, partition_id) DO UPDATE SET
    feed_cursor = excluded.feed_cursor, status = excluded.status, revision = excluded.revision, saved_at = excluded.saved_at"""
_DELETE = "DELETE FROM feedapi_cursors WHERE feed_id = ? AND partition_id = ?"
_FEEDS = "SELECT DISTINCT feed_url, consumer, filters FROM feedapi_cursors"
_ARCHIVE = """INSERT INTO feedapi_cursors_journal (feed_id, replaced_at, partition_id, revision, feed_cursor, status, saved_at)
    SELECT feed_id, ?, partition_id, revision, feed_cursor, status, saved_at FROM feedapi_cursors WHERE feed_id = ? AND partition_id = ?"""
_PRUNE = "DELETE FROM feedapi_cursors_journal WHERE feed_id = ? AND replaced_at < ?"
_COVERING = """SELECT partition_id, feed_cursor, status, revision, saved_at FROM feedapi_cursors_journal
    WHERE feed_id = ?1 AND replaced_at > ?2 AND saved_at <= ?2
    UNION ALL SELECT partition_id, feed_cursor, status, revision, saved_at FROM feedapi_cursors WHERE feed_id = ?1 AND saved_at <= ?2"""
_LATER = """SELECT partition_id, MIN(saved_at), MIN(CASE WHEN revision = 1 THEN saved_at END) FROM (
        SELECT partition_id, saved_at, revision FROM feedapi_cursors_journal WHERE feed_id = ?1 AND saved_at > ?2
        UNION ALL SELECT partition_id, saved_at, revision FROM feedapi_cursors WHERE feed_id = ?1 AND saved_at > ?2
    ) GROUP BY partition_id"""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_OPEN_PAUSE = 0.02


class _Query(NamedTuple):
    """A statement and its parameters."""

    sql: str
    parameters: Sequence[Any] = ()


class _Change(NamedTuple):
    """A statement and the rows to run it for."""

    sql: str
    rows: list[tuple[Any, ...]]


# What is done within a transaction is written once, as a generator of statements that is sent the rows found; a driver for each kind of connection runs it.
_Script = Generator[_Query | _Change, list[Any], T]


class SQLiteCursorStore(Closable):
    """Keeps positions in the SQLite file `path`, which is made on first use (its directory must exist).

    Runs on asyncio and trio; the file may be shared by several processes. `busy_timeout` (seconds) is how long a save waits for another writer. With a
    `journal` the store remembers replaced positions.

    Exactly once: let the application keep its effects in the same file and pass its own connection as ``transaction``: a `sqlite3.Connection`, or an
    `aiosqlite.Connection`. The save then happens on that connection, for the former synchronously in the calling thread, inside the transaction that is
    open on it (or that is opened, where the connection does so by itself), and is committed or rolled back by the caller. Don't hold a write
    transaction open across awaits that lead to other saves: SQLite has one writer at a time.

    A file that is damaged, not SQLite or not accessible is a `StoreError` at the first use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 30.0,
        journal: Journal | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._busy_timeout = busy_timeout
        self._journal = journal
        self._pruner = Pruner(journal)
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[[], SQLiteCursorStore] | None = None
        self._lock = threading.Lock()
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar("feedapi_sqlite_limiter")

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        rows = await self._read(feed, _LOAD, (feed.id,))
        return {row[0]: stored_position(feed, *row) for row in rows}

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. `transaction` is the caller's `sqlite3.Connection` or `aiosqlite.Connection` to the same file."""
        if transaction is None:
            if positions:
                await self._write(feed, self._save_script(feed, positions))
        else:
            await self._save_within(feed, positions, transaction)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        rows = await self._read(None, _FEEDS)
        return sorted(
            (FeedKey(url, name, orjson.loads(filters)) for url, name, filters in rows), key=str
        )

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        await self._write(
            feed, self._delete_script(feed, None if partitions is None else set(partitions))
        )

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        return await self._write(feed, self._replace_script(feed, positions))

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        return await self._write(feed, self._history_script(feed, when))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        return await self._write(feed, self._rewind_script(feed, to))

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    # What happens within a transaction

    def _save_script(self, feed: FeedKey, positions: Mapping[int, Position]) -> _Script[None]:
        stored = yield from self._revisions(feed, positions)
        for partition, position in sorted(positions.items()):
            check_predecessor(feed, partition, position, stored.get(partition))
        at = now()
        yield from self._archive(feed, [p for p in positions if p in stored], at)
        key = (feed.url, feed.name, orjson.dumps(feed.filters).decode())
        yield _Change(
            _SAVE,
            [
                (feed.id, p, new.cursor, new.status, new.revision, at, *key)
                for p, new in positions.items()
            ],
        )

    def _replace_script(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> _Script[dict[int, Position]]:
        stored = yield from self._revisions(feed, positions)
        replaced = following(positions, stored)
        yield from self._save_script(feed, replaced)
        return replaced

    def _revisions(self, feed: FeedKey, partitions: Iterable[int]) -> _Script[dict[int, int]]:
        wanted = set(partitions)
        one = len(wanted) == 1
        rows = (
            yield _Query(_LOAD + " AND partition_id = ?", (feed.id, *wanted))
            if one
            else _Query(_LOAD, (feed.id,))
        )
        return {row[0]: row[3] for row in rows if row[0] in wanted}

    def _archive(self, feed: FeedKey, partitions: Iterable[int], at: int) -> _Script[None]:
        if self._journal is None:
            return
        if rows := [(at, feed.id, partition) for partition in partitions]:
            yield _Change(_ARCHIVE, rows)
        if (limit := self._pruner.due(feed, at)) is not None:
            yield _Change(_PRUNE, [(feed.id, limit)])

    def _delete_script(self, feed: FeedKey, partitions: set[int] | None) -> _Script[None]:
        rows = yield _Query(_LOAD, (feed.id,))
        doomed = [row[0] for row in rows if partitions is None or row[0] in partitions]
        yield from self._archive(feed, doomed, now())
        yield _Change(_DELETE, [(feed.id, partition) for partition in doomed])

    def _history_script(self, feed: FeedKey, when: datetime) -> _Script[dict[int, Position]]:
        at = check_reach(feed, self._journal, when)
        covering = yield _Query(_COVERING, (feed.id, at))
        later = yield _Query(_LATER, (feed.id, at))
        return reconstruct(feed, when, covering, later)

    def _rewind_script(self, feed: FeedKey, to: datetime) -> _Script[dict[int, Position]]:
        target = yield from self._history_script(feed, to)
        check_rewind(feed, to, target)
        rows = yield _Query(_LOAD, (feed.id,))
        yield from self._delete_script(feed, {row[0] for row in rows} - target.keys())
        return (yield from self._replace_script(feed, target))

    # The store's own connection, used by one worker thread at a time

    async def _read(
        self, feed: FeedKey | None, sql: str, parameters: Sequence[Any] = ()
    ) -> list[Any]:
        return await self._in_thread(
            feed, lambda connection: connection.execute(sql, parameters).fetchall()
        )

    async def _write(self, feed: FeedKey, script: _Script[T]) -> T:
        return await self._in_thread(feed, lambda connection: _transact(connection, script))

    async def _in_thread(
        self, feed: FeedKey | None, function: Callable[[sqlite3.Connection], T]
    ) -> T:
        # A cancelled task gives up its place in the queue, but a call that has begun is finished.
        return await anyio.to_thread.run_sync(self._locked, feed, function, limiter=self._queue())

    def _queue(self) -> anyio.CapacityLimiter:
        try:
            return self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(1)
            self._limiter.set(limiter)
            return limiter

    def _locked(self, feed: FeedKey | None, function: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._open()
                    # Whoever forgets to close the store shall not see a ResourceWarning at a random moment.
                    self._finalizer = weakref.finalize(self, self._connection.close)
                return function(self._connection)
            except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as error:
                raise self._failure(feed, error) from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            deadline = time.monotonic() + self._busy_timeout
            while not _prepare(connection, self._tables(), last_try=time.monotonic() >= deadline):
                time.sleep(_OPEN_PAUSE)
        except BaseException:
            connection.close()
            raise
        return connection

    def _tables(self) -> list[str]:
        return [_TABLE] if self._journal is None else [_TABLE, _JOURNAL]

    def _close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = self._finalizer = None

    # The caller's connection

    async def _save_within(
        self, feed: FeedKey, positions: Mapping[int, Position], transaction: Any
    ) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        script = self._guest_script(feed, positions, transaction)
        aiosqlite = sys.modules.get("aiosqlite")
        try:
            if isinstance(transaction, sqlite3.Connection):
                _drive(transaction, script)
            elif aiosqlite is not None and isinstance(transaction, aiosqlite.Connection):
                with anyio.CancelScope(shield=True):
                    await _drive_async(transaction, script)
            else:
                kind = type(transaction).__name__
                raise StoreError(
                    f"transaction must be a sqlite3.Connection or an aiosqlite.Connection, not a {kind}",
                    feed=feed.url,
                )
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as error:
            raise self._failure(feed, error) from error

    def _guest_script(
        self, feed: FeedKey, positions: Mapping[int, Position], connection: Any
    ) -> _Script[None]:
        databases = yield _Query("PRAGMA database_list")
        self._check_file(feed, next(row[2] for row in databases if row[1] == "main"))
        if not connection.in_transaction:
            if (
                connection.isolation_level is None
                or getattr(connection, "autocommit", False) is True
            ):
                raise StoreError(
                    "no transaction is open on the connection, which is in autocommit mode: BEGIN one first",
                    feed=feed.url,
                )
            yield _Query("BEGIN")
        if self._connection is None:
            yield from _tables_script(self._tables())
        if not positions:
            return
        yield _Query("SAVEPOINT feedapi_save")
        try:
            yield from self._save_script(feed, positions)
        except Exception:
            # A failure such as a full disk has already rolled back everything, the savepoint included.
            if connection.in_transaction:
                yield _Query("ROLLBACK TO feedapi_save")
                yield _Query("RELEASE feedapi_save")
            raise
        yield _Query("RELEASE feedapi_save")

    def _check_file(self, feed: FeedKey, file: str) -> None:
        if not file or os.path.realpath(file) != os.path.realpath(self.path):
            raise StoreError(
                f"the transaction is on the database {file or 'in memory'}, but the cursors are kept in {self.path}: use one file for both",
                feed=feed.url,
            )

    def _failure(self, feed: FeedKey | None, error: Exception) -> StoreError:
        hint = ""
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            hint = ". Commit in the thread that made the connection, or make it with check_same_thread=False"
        elif getattr(error, "sqlite_errorcode", None) in _BUSY:
            hint = ". Another writer holds the file: keep write transactions short"
        return StoreError(
            f"the cursor database {self.path} failed: {error}{hint}",
            feed=feed.url if feed else None,
        )

    def __repr__(self) -> str:
        return (
            f"<SQLiteCursorStore {self.path!r}, {'closed' if self._connection is None else 'open'}>"
        )


def _prepare(connection: sqlite3.Connection, tables: list[str], *, last_try: bool) -> bool:
    """Switch to WAL and make the tables; False when another process is just doing the same."""
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        _transact(connection, _tables_script(tables))
    except sqlite3.OperationalError as error:
        if last_try or error.sqlite_errorcode not in _BUSY:
            raise
        return False
    return True


def _tables_script(tables: list[str]) -> _Script[None]:
    for statement in tables:
        yield _Query(statement)


def _transact(connection: sqlite3.Connection, script: _Script[T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = _drive(connection, script)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return result


def _drive(connection: sqlite3.Connection, script: _Script[T]) -> T:
    try:
        step = next(script)
        while True:
            try:
                rows = _run(connection, step)
            except Exception as error:  # noqa: BLE001 - the script cleans up after whatever went wrong, and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def _run(connection: sqlite3.Connection, step: _Query | _Change) -> list[Any]:
    cursor = (
        connection.execute(*step) if isinstance(step, _Query) else connection.executemany(*step)
    )
    try:
        return cursor.fetchall()
    finally:
        cursor.close()


async def _drive_async(connection: Any, script: _Script[T]) -> T:
    try:
        step = next(script)
        while True:
            try:
                cursor = await (
                    connection.execute(*step)
                    if isinstance(step, _Query)
                    else connection.executemany(*step)
                )
                rows = list(await cursor.fetchall())
                await cursor.close()
            except Exception as error:  # noqa: BLE001 - as above
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result
