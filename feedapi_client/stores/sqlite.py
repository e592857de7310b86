"""Cursors in a SQLite file, with the standard library only.

Here are threads and transactions; the statements are in
`feedapi_client.stores.sqlite_statements`.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    check_storable,
    stored_key,
)
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.done import Claim, DoneEvent
from feedapi_client.stores.journal import Journal, microseconds
from feedapi_client.stores.moving import check_moves
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.sqlite_connection import (
    SQLiteFile,
    run_script,
    run_script_on_aiosqlite,
    transact,
)
from feedapi_client.stores.sqlite_leases import SQLiteLeases, create_lease_tables
from feedapi_client.stores.sqlite_statements import CursorScripts

T = TypeVar("T")


class SQLiteCursorStore(SQLiteLeases, Closable):
    """Keeps positions in a SQLite file.

    Runs on asyncio and trio. Several processes may share the file. It keeps leases, too
    (`LeaseStore`).

    Exactly once: let the application keep its effects in the same file and pass its own connection
    as ``transaction``: a `sqlite3.Connection` or an `aiosqlite.Connection`. The save then happens
    on that connection, and the caller commits it or rolls it back. It is part of the open
    transaction; without one it opens one, if the connection is in the mode to do so. On a
    `sqlite3.Connection` it happens synchronously in the calling thread, also with
    `SyncFeedConsumer`: see `feedapi_client.stores.caller_thread`. Don't hold a write
    transaction open across awaits that lead to other saves: SQLite has one writer at a time.

    A file that is damaged, not SQLite or not accessible raises `StoreError` at the first use.

    Arguments:
        path: the file, created on first use; its directory must exist.
        busy_timeout: maximum time that a save waits for another writer, in seconds.
        journal: keep a history of positions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 30.0,
        journal: Journal | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._scripts = CursorScripts(journal)
        self._file = SQLiteFile(self.path, busy_timeout, self._scripts.create_tables)
        super().__init__(SQLiteFile(self.path, busy_timeout, create_lease_tables))

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        return await self._read(feed, self._scripts.load(feed))

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`.

        `transaction` is a `sqlite3.Connection` or an `aiosqlite.Connection` to the same file.
        """
        await self.save_passing(feed, positions, {}, transaction=transaction)

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
        done = self._scripts.done
        number = await self._write(feed, done.claim(feed, partitions, revision))
        return Claim(number, await self._write(feed, done.load(feed, partitions, revision)))

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`. `transaction` as in `save`."""
        script = self._scripts.done.done(feed, event)
        if transaction is not None:
            await self._run_within(feed, script, transaction)
        else:
            await self._write(feed, script)

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        return await self._read(feed, self._scripts.done.is_done(feed, event))

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`. `transaction` as in `save`."""
        check_storable(feed, positions)
        if transaction is not None:
            script = self._scripts.save_passing(feed, positions, passed) if positions else None
            await self._run_within(feed, script, transaction)
        elif positions:
            await self._write(feed, self._scripts.save_passing(feed, positions, passed))

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        rows = await self._read(None, self._scripts.feeds())
        return sorted((stored_key(*row) for row in rows), key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)
        await self._write(feed, self._scripts.delete(feed, wanted))

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        check_storable(feed, positions)
        return await self._write(feed, self._scripts.replace(feed, positions))

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)
        return await self._write(None, self._scripts.move(keys, overwrite=overwrite))

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        return await self._write(feed, self._scripts.positions_at(feed, when))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)
        return await self._write(feed, self._scripts.rewind(feed, to))

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        await self._file.aclose()
        await self._lease_file.aclose()

    async def _read(self, feed: FeedKey | None, script: Script[T]) -> T:
        return await self._file.run(feed, lambda connection: run_script(connection, script))

    async def _write(self, feed: FeedKey | None, script: Script[T]) -> T:
        return await self._file.run(feed, lambda connection: transact(connection, script))

    # The caller's connection

    async def _run_within(self, feed: FeedKey, work: Script[None] | None, transaction: Any) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        script = self._in_transaction(feed, work, transaction)
        aiosqlite = sys.modules.get("aiosqlite")
        try:
            if isinstance(transaction, sqlite3.Connection):
                await in_callers_thread(partial(run_script, transaction, script))
            elif aiosqlite is not None and isinstance(transaction, aiosqlite.Connection):
                with anyio.CancelScope(shield=True):
                    await run_script_on_aiosqlite(transaction, script)
            else:
                kind = type(transaction).__name__
                raise StoreError(
                    "transaction must be a sqlite3.Connection or an aiosqlite.Connection, "
                    f"not a {kind}",
                    feed=feed.url,
                )
        except FeedError:
            raise
        except Exception as error:
            raise self._file.failure(feed, error) from error

    def _in_transaction(
        self, feed: FeedKey, work: Script[None] | None, connection: Any
    ) -> Script[None]:
        databases = yield Query("PRAGMA database_list")
        self._check_file(feed, next(row[2] for row in databases if row[1] == "main"))
        if not connection.in_transaction:
            if (
                connection.isolation_level is None
                or getattr(connection, "autocommit", False) is True
            ):
                raise StoreError(
                    "no transaction is open on the connection, which is in autocommit mode: "
                    "BEGIN one first",
                    feed=feed.url,
                )
            # A transaction that has read fails at once when it writes beside another
            # writer; this one waits for it.
            yield Query("BEGIN IMMEDIATE")
        if not self._file.is_open:
            yield from self._scripts.create_tables()
        if work is None:
            return
        yield Query("SAVEPOINT feedapi_save")
        try:
            yield from work
        except Exception:
            # A failure such as a full disk has already rolled back everything, also the savepoint.
            if connection.in_transaction:
                yield Query("ROLLBACK TO feedapi_save")
                yield Query("RELEASE feedapi_save")
            raise
        yield Query("RELEASE feedapi_save")

    def _check_file(self, feed: FeedKey, file: str) -> None:
        if not file or os.path.realpath(file) != os.path.realpath(self.path):
            raise StoreError(
                f"the transaction is on the database {file or 'in memory'}, "
                f"but the cursors are kept in {self.path}: use one file for both",
                feed=feed.url,
            )

    def __repr__(self) -> str:
        state = "open" if self._file.is_open else "closed"
        return f"<SQLiteCursorStore {self.path!r}, {state}>"
