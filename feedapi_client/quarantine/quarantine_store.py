"""The protocol of quarantine stores, and what those in SQL share."""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio.lowlevel

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.scripted import Along
from feedapi_client.stores.scripts import CountedChange, Query, Script, in_parts
from feedapi_client.stores.sql_dialects import feed_condition
from feedapi_client.stores.sqlite_connection import run_script, transact
from feedapi_client.stores.tables import TABLES, create_missing

T = TypeVar("T")

QUARANTINE = "feedapi_quarantine"
PAGE_SIZE = 100
_COLUMNS = tuple(TABLES[QUARANTINE][0])


@runtime_checkable
class QuarantineStore(Protocol):
    """Keeps quarantined events until an operator drops or replays them.

    Nothing else ever deletes an event. All methods may be called concurrently, by several tasks
    and processes. They raise `StoreError`. A store of one's own takes events before the cursor is
    saved, in a transaction of its own.
    """

    async def prepare(self) -> None:
        """Get ready to take events, or raise.

        A consumer calls this before it reads, so that no event finds the store missing.
        """
        ...

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """Keep all of the events or none; with `transaction`, as part of it."""
        ...

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """Return up to `limit` events whose id is above `after`, in the order of their ids.

        `feed` and `partition` select; None: all of them.
        """
        ...

    async def get(self, id: str) -> QuarantinedEvent | None:
        """Return one event, or None."""
        ...

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """Delete events; with `transaction`, as part of it. Returns how many there were."""
        ...


@runtime_checkable
class JoiningStore(QuarantineStore, Protocol):
    """A quarantine that may be in the database of the cursors, and in their transactions."""

    def along(self, cursors: CursorStore, events: Sequence[QuarantinedEvent]) -> Any:
        """Return the `transaction` for a save of `cursors` that keeps the events with it.

        None: they are not in the same database. Otherwise the caller's transactions may hold both.
        """
        ...


async def list_events(
    store: QuarantineStore, feed: FeedKey | None = None, *, partition: int | None = None
) -> AsyncIterator[QuarantinedEvent]:
    """Yield the events in the order in which they were quarantined, of one feed or of all.

    They are read in pages. Events may be added and removed meanwhile.

    Raises:
        StoreError
    """
    after = ""
    while page := await store.page(feed, partition=partition, after=after, limit=PAGE_SIZE):
        for event in page:
            yield event
        after = page[-1].id


class ScriptedQuarantine:
    """Implements `JoiningStore` by scripts, on the connections of a cursor store's driver.

    Arguments:
        dialect: the kind of database, by SQLAlchemy's name.
        table: its name, quoted.
        where: what messages call the place.
    """

    def __init__(self, dialect: str, table: str, where: str) -> None:
        columns = ", ".join(_COLUMNS)
        places = ", ".join("?" * len(_COLUMNS))
        self._where = where
        self._of_feed = feed_condition(dialect)
        self._insert = f"INSERT INTO {table} ({columns}) VALUES ({places})"
        self._select = f"SELECT {columns} FROM {table} WHERE"
        self._delete = f"DELETE FROM {table} WHERE id IN"

    # What a subclass defines

    async def _transact(self, script: Script[T]) -> T:
        """Run a script in a transaction of the store's own."""
        raise NotImplementedError

    async def _read(self, script: Script[T]) -> T:
        """Run a script that only reads."""
        return await self._transact(script)

    async def _within(self, transaction: Any, script: Script[T]) -> T:
        """Run a script in the caller's transaction."""
        raise NotImplementedError

    def _is_beside(self, cursors: CursorStore) -> bool:  # noqa: ARG002
        """Return whether these cursors are in the same database."""
        return False

    def _reason(self, error: Exception) -> str:
        """Return the database's own message, without payloads."""
        return str(error)

    # What it makes of that

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        with self._translated():
            await self._read(self._rows("1 = 0"))

    def along(self, cursors: CursorStore, events: Sequence[QuarantinedEvent]) -> Any:
        """See `JoiningStore.along`."""
        return Along(partial(self._add, events)) if self._is_beside(cursors) else None

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        if events:
            await self._change(self._add(events), transaction)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        chosen: dict[str, Any] = {"id > ?": after}
        if feed is not None:
            chosen[self._of_feed] = feed.id
        if partition is not None:
            chosen["partition_id = ?"] = partition
        where = f"{' AND '.join(chosen)} ORDER BY id LIMIT ?"
        with self._translated():
            return await self._read(self._rows(where, *chosen.values(), limit))

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        with self._translated():
            return next(iter(await self._read(self._rows("id = ?", id))), None)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """See `QuarantineStore.remove`."""
        return await self._change(self._remove(set(ids)), transaction)

    async def _change(self, script: Script[T], transaction: Any) -> T:
        with self._translated():
            if transaction is None:
                return await self._transact(script)
            return await self._within(transaction, script)

    def _rows(self, where: str, *parameters: Any) -> Script[list[QuarantinedEvent]]:
        rows = yield Query(f"{self._select} {where}", parameters)
        return [from_row(row) for row in rows]

    def _add(self, events: Sequence[QuarantinedEvent]) -> Script[None]:
        with self._translated():  # also when it is a part of a cursor's save
            for event in events:
                yield Query(self._insert, to_row(event))

    def _remove(self, ids: set[str]) -> Script[int]:
        removed = 0
        for some in in_parts(ids):
            marks = ", ".join("?" * len(some))
            removed += yield CountedChange(f"{self._delete} ({marks})", some)
        return removed

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FeedError:
            raise
        except Exception as error:  # noqa: BLE001 - raised anew
            # Without the cause, whose text may hold the statement's parameters: payloads (R19).
            reason = self._reason(error)
            raise StoreError(f"the quarantine {self._where} failed: {reason}") from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}>"


class MemoryQuarantineStore(ScriptedQuarantine):
    """Keeps events for as long as the object lives.

    It has no transactions: a consumer that is killed may quarantine an event again.
    """

    def __init__(self) -> None:
        super().__init__("sqlite", QUARANTINE, "in memory")
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        # A store that is never closed must not end with a ResourceWarning.
        weakref.finalize(self, self._connection.close)
        run_script(self._connection, create_missing(QUARANTINE))

    async def _transact(self, script: Script[T]) -> T:
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return transact(self._connection, script)

    async def _within(self, transaction: Any, script: Script[T]) -> T:  # noqa: ARG002
        return await self._transact(script)
