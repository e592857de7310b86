"""The quarantine in a database of Django, beside `DjangoCursorStore`."""

# ruff: noqa: S608 - the statements are made of constants

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from django.db import Error

from feedapi_client.django.cursor_store import DjangoCursorStore
from feedapi_client.django.django_database import DjangoDatabase, OwnTransaction
from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import COLUMNS, QuarantinedEvent, from_row, to_row
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.scripts import Query, Script, StatementRows, just

_TABLE = "feedapi_quarantine"
_NAMES = ", ".join(COLUMNS)
_INSERT = f"INSERT INTO {_TABLE} ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))})"
_SELECT = f"SELECT {_NAMES} FROM {_TABLE}"
_LOCK = f"SELECT id FROM {_TABLE} WHERE id = ?"
_REMOVE = f"DELETE FROM {_TABLE} WHERE id = ?"


class DjangoQuarantineStore:
    """Keeps events in a table of a database of Django, which ``manage.py migrate`` creates.

    The table is that of the other SQL stores. A `transaction` is what `DjangoCursorStore` takes.
    The admin has the events as a model. Runs on asyncio only.

    Arguments:
        using: the alias of the database.
    """

    def __init__(self, using: str | DjangoDatabase = "default") -> None:
        self.database = DjangoDatabase(using) if isinstance(using, str) else using

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`: raises if there is no table."""
        await self._run(just(Query(f"{_SELECT} WHERE 1 = 0")))

    def joins(self, cursors: CursorStore) -> bool:
        """See `QuarantineStore.joins`: True for a `DjangoCursorStore` of the same alias."""
        return isinstance(cursors, DjangoCursorStore) and cursors.using == self.database.using

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[OwnTransaction]:
        """See `QuarantineStore.begin`."""
        with self._translated():
            async with self.database.begin() as transaction:
                yield transaction

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        if events:
            rows = [to_row(event) for event in events]
            await self._run(just(StatementRows(_INSERT, rows)), transaction)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        conditions: dict[str, Any] = {"id > ?": after}
        if feed is not None:
            conditions["feed_id = ?"] = feed.id
        if partition is not None:
            conditions["partition_id = ?"] = partition
        sql = f"{_SELECT} WHERE {' AND '.join(conditions)} ORDER BY id LIMIT ?"
        rows = await self._run(just(Query(sql, (*conditions.values(), limit))))
        return [from_row(row) for row in rows]

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        rows = await self._run(just(Query(f"{_SELECT} WHERE id = ?", (id,))))
        return from_row(rows[0]) if rows else None

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """See `QuarantineStore.remove`."""
        lock = "" if self.database.vendor == "sqlite" else " FOR UPDATE"
        removed: int = await self._run(_remove(sorted(set(ids)), lock), transaction)
        return removed

    async def aclose(self) -> None:
        """Close the store's own connection. A later use opens another one."""
        await self.database.aclose()

    async def _run(self, script: Script[Any], transaction: Any = None) -> Any:
        with self._translated():
            if transaction is None:
                return await self.database.transact(script)
            return await self.database.run_within(transaction, script)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Error as error:
            # Without the cause, whose text may hold a payload (R19).
            raise StoreError(
                f"the quarantine {self.database} failed: {self.database.reason(error)}"
            ) from None

    def __repr__(self) -> str:
        return f"<DjangoQuarantineStore {self.database}>"


def _remove(ids: list[str], lock: str) -> Script[int]:
    """Delete the events that are there; return how many. Of two at once, one finds each."""
    removed = 0
    for id in ids:
        if (yield Query(f"{_LOCK}{lock}", (id,))):
            yield Query(_REMOVE, (id,))
            removed += 1
    return removed
