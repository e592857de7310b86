"""The quarantine and the events in it that a command of ``feedapi quarantine`` works on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from feedapi_client import quarantine
from feedapi_client.cli.common.databases import (
    check_sqlite_file,
    is_redis_url,
    is_url,
    open_database,
    resolve_store,
)
from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.feed_choice import FeedChoice
from feedapi_client.quarantine import QuarantinedEvent, QuarantineStore, SQLiteQuarantineStore

_TABLE = "feedapi_quarantine"
_CONTENT = "quarantined events"


@dataclass(frozen=True, slots=True)
class Selection:
    """A quarantine, and which of its events are meant."""

    store: str
    choice: FeedChoice
    partition: int | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[QuarantineStore]:
        """Open the quarantine, which has to exist, and close it at the end of the block.

        Raises `CommandError` and `StoreError`.
        """
        spec = resolve_store(self.store)
        if is_redis_url(spec):
            raise CommandError("--store: Redis holds no quarantine")
        if is_url(spec):
            async with open_database(spec, _TABLE, _CONTENT) as found:
                from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore

                yield SQLAlchemyQuarantineStore(found.engine, table=found.name, schema=found.schema)
        else:
            check_sqlite_file(Path(spec), _TABLE, _CONTENT)
            yield SQLiteQuarantineStore(spec)

    async def events(self, store: QuarantineStore) -> list[QuarantinedEvent]:
        """Return the chosen events, in the order in which they were quarantined."""
        events = quarantine.list_events(store, partition=self.partition)
        return [event async for event in events if self.choice.matches(event.feed)]


async def load_events(selection: Selection) -> list[QuarantinedEvent]:
    """Open the quarantine and return the chosen events."""
    async with selection.open() as store:
        return await selection.events(store)
