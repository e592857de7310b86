"""An application with its effects in SQLite that can't handle some events."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from typing import Any

from feedapi_client import Batch, FeedConsumer, Retry, SQLiteCursorStore
from feedapi_client.model import FeedKey, make_event
from feedapi_client.quarantine import (
    QuarantinedEvent,
    QuarantineStore,
    list_events,
    quarantine_beside,
)
from feedapi_client.quarantine.record import quarantined
from feedapi_client.testing import Publisher


class PoisonError(Exception):
    """Raised by the handler for an event that it can't handle."""


class Ledger:
    """The effects: one row for each handled event, without a key that would hide duplicates."""

    def __init__(self, publisher: Publisher, store: SQLiteCursorStore) -> None:
        self.publisher, self.store = publisher, store
        self.calls: list[list[int]] = []
        with self.transaction() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (n INTEGER NOT NULL)")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.store.path)) as connection, connection:
            yield connection

    def rows(self) -> list[int]:
        with self.transaction() as connection:
            return [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY rowid")]

    async def kept(self) -> list[QuarantinedEvent]:
        return await kept(quarantine_beside(self.store))

    async def cursor(self) -> str:
        (feed,) = await self.store.feeds()
        return (await self.store.load(feed))[0].cursor

    async def run(self, handle: Any, on_failure: Any = "quarantine") -> None:
        await run(self.publisher, self.store, handle, on_failure)

    def write(self, connection: sqlite3.Connection, batch: Batch, poison: Collection[int]) -> None:
        self.calls.append(numbers(batch))
        for n in numbers(batch):
            if n in poison:
                raise PoisonError(f"can't handle {n}")
            connection.execute("INSERT INTO effects VALUES (?)", (n,))

    def handler(self, poison: Collection[int]) -> Any:
        """Return a handler that commits the cursor in its own transaction."""

        async def handle(batch: Batch) -> None:
            with self.transaction() as connection:
                self.write(connection, batch, poison)
                await batch.commit(transaction=connection)

        return handle


def retry(attempts: int | None, **more: Any) -> Retry:
    return Retry(attempts=attempts, base_delay=0.001, max_delay=0.001, **more)


def numbers(batch: Batch) -> list[int]:
    return [event.json()["n"] for event in batch.events]


async def run(publisher: Publisher, store: Any, handle: Any, on_failure: Any) -> None:
    """Consume to the end of the feed."""
    assert publisher.url is not None
    async with FeedConsumer(publisher.url, store=store, follow=False) as consumer:
        await consumer.run(handle, on_failure=on_failure)


async def kept(store: QuarantineStore) -> list[QuarantinedEvent]:
    return [event async for event in list_events(store)]


FEED = FeedKey("https://service/feed", "mine", {"event-types": "a;b"})
RAW = '{"text":"\u2028 \\u0000 \\ud800 ä"}'.encode()


def record(
    feed: FeedKey = FEED, partition: int = 3, index: int = 0, error: Exception | None = None
) -> QuarantinedEvent:
    event = make_event(partition, RAW, {"h": "\x00"})
    error = error or ValueError("bad\x00 \ud800")
    return quarantined(feed, event, "c" * 10_000, index, error)
