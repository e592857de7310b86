"""Where quarantined events are kept: the protocol, and the stores in a SQL database."""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.moving import move_quarantined
from feedapi_client.stores.scripted import Along, Database, ScriptedStore
from feedapi_client.stores.scripts import CountedChange, Query, Script, feed_condition, in_parts
from feedapi_client.stores.sqlite import MemoryCursorStore, MemoryDatabase, SQLiteDatabase
from feedapi_client.stores.tables import QUARANTINE, TABLES

if TYPE_CHECKING:
    import sqlalchemy as sa

    from feedapi_client.stores.sql import Engine

T = TypeVar("T")

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
        """Get ready to take events, or raise, before a consumer reads any."""
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


async def list_events(
    store: QuarantineStore, feed: FeedKey | None = None, *, partition: int | None = None
) -> AsyncIterator[QuarantinedEvent]:
    """Yield the events in the order in which they were quarantined, of one feed or of all.

    They are read in pages. Events may be added and removed meanwhile.
    """
    after = ""
    while page := await store.page(feed, partition=partition, after=after, limit=PAGE_SIZE):
        for event in page:
            yield event
        after = page[-1].id


class ScriptedQuarantine:
    """A `transaction` is what a cursor store of that database takes."""

    def __init__(self, database: Database, table: str = QUARANTINE) -> None:
        self.database = database
        self._name, self._tables = database.quoted(table), {QUARANTINE: table}
        database.need(self._tables)

    async def prepare(self) -> None:
        await self._read(self._rows("1 = 0"))
        await self._answer(lambda: self.database.check(self._tables), shield=False)

    def along(self, cursors: CursorStore, events: Sequence[QuarantinedEvent]) -> Any:
        # The `transaction` for a save of `cursors` that keeps the events with it, if it can.
        there = cursors.database.place if isinstance(cursors, ScriptedStore) else None
        return Along(partial(self._add, events)) if there == self.database.place else None

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
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
        chosen: dict[str, Any] = {"id > ?": after}
        if feed is not None:
            chosen[feed_condition(self.database.dialect)] = feed.id
        if partition is not None:
            chosen["partition_id = ?"] = partition
        where = f"{' AND '.join(chosen)} ORDER BY id LIMIT ?"
        return await self._read(self._rows(where, *chosen.values(), limit))

    async def get(self, id: str) -> QuarantinedEvent | None:
        return next(iter(await self._read(self._rows("id = ?", id))), None)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        return await self._change(self._remove(set(ids)), transaction)

    async def move(self, old: FeedKey, new: FeedKey) -> None:
        """A move of cursors in the same database does so by itself."""
        move = move_quarantined(self._name, self.database.dialect, [(old, new)])
        await self._change(move, None)

    async def aclose(self) -> None:
        await self.database.aclose()

    async def _change(self, script: Script[T], transaction: Any) -> T:
        within, database = partial(self.database.within, transaction), self.database
        run = database.transact if transaction is None else within
        return await self._answer(lambda: run(script))

    async def _read(self, script: Script[T]) -> T:
        return await self._answer(lambda: self.database.read(script), shield=False)

    async def _answer(self, call: Callable[[], Awaitable[T]], *, shield: bool = True) -> T:
        # Without the cause, whose text may hold the statement's parameters: payloads (R19).
        answer = self.database.answer
        return await answer("the quarantine", None, call, shield=shield, chained=False)

    # Scripts

    def _rows(self, where: str, *parameters: Any) -> Script[list[QuarantinedEvent]]:
        select = f"SELECT {', '.join(_COLUMNS)} FROM {self._name} WHERE {where}"
        return list(map(from_row, (yield Query(select, parameters))))

    def _add(self, events: Sequence[QuarantinedEvent]) -> Script[None]:
        marks = ", ".join("?" * len(_COLUMNS))
        insert = f"INSERT INTO {self._name} ({', '.join(_COLUMNS)}) VALUES ({marks})"
        try:
            for event in events:
                yield Query(insert, to_row(event))
        except FeedError:
            raise
        except Exception as error:  # noqa: BLE001 - as a part of a cursor's save, too
            raise self.database.failure("the quarantine", None, error) from None

    def _remove(self, ids: set[str]) -> Script[int]:
        removed = 0
        for some in in_parts(ids):
            marks = ", ".join("?" * len(some))
            delete = f"DELETE FROM {self._name} WHERE id IN ({marks})"
            removed += yield CountedChange(delete, some)
        return removed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.database.name}>"


class MemoryQuarantineStore(ScriptedQuarantine):
    """Keeps events for as long as the object lives, or the cursors in the same memory.

    It has no transactions: a consumer that is killed may quarantine an event again.
    """

    def __init__(self, cursors: MemoryCursorStore | None = None) -> None:
        super().__init__(MemoryDatabase() if cursors is None else cursors.database)


class SQLiteQuarantineStore(ScriptedQuarantine):
    """Keeps events in a SQLite file, created on first use. Runs on asyncio and trio.

    A `transaction`, `path` and `busy_timeout` are as `SQLiteCursorStore` takes them.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 30.0) -> None:
        self.path = os.fspath(path)
        super().__init__(SQLiteDatabase(self.path, busy_timeout))


class OperatedQuarantine(ScriptedQuarantine):
    async def create_tables(self) -> None:
        """Create the table if it does not exist yet. Raises `StoreError`."""
        await self._answer(lambda: self.database.create(self._tables), shield=False)


class SQLAlchemyQuarantineStore(OperatedQuarantine):
    """Keeps events in a table of the application's database. Needs the extra ``sql``.

    The table is created by `create_tables`, or by the application's own migrations: with
    `metadata` it is part of it, as `table`. A `transaction` and the arguments are as
    `SQLAlchemyCursorStore` takes them. Runs on asyncio only.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        table: str = "feedapi_quarantine",
        schema: str | None = None,
        metadata: sa.MetaData | None = None,
    ) -> None:
        from feedapi_client.stores.sql import SQLDatabase

        database = SQLDatabase(engine, metadata, schema, QUARANTINE, table)
        super().__init__(database, table)
        self.engine = engine
        self.table = database.table
        self.format_table = database.format_table


class PostgresQuarantineStore(OperatedQuarantine):
    """Keeps events in a table of the application's PostgreSQL database, without SQLAlchemy.

    The table is that of `SQLAlchemyQuarantineStore`. A `transaction` and the arguments are as
    `PostgresCursorStore` takes them; `pool` may be its `database`, of the same schema. What it
    opens for a DSN `aclose` closes.
    """

    def __init__(
        self, pool: Any, *, table: str = "feedapi_quarantine", schema: str | None = None
    ) -> None:
        from feedapi_client.stores.postgres import PostgresDatabase

        own = not isinstance(pool, PostgresDatabase)
        super().__init__(PostgresDatabase(pool, schema) if own else pool, table)


def quarantine_beside(cursors: CursorStore) -> QuarantineStore:
    """Return the quarantine in the file, database or memory that holds the cursors.

    Raises `StoreError` for a store without one.
    """
    if isinstance(cursors, ScriptedStore):
        return ScriptedQuarantine(cursors.database)
    raise StoreError(
        f"{type(cursors).__name__} has no quarantine: say where quarantined events go, "
        "on_failure=Quarantine(to=...)"
    )
