"""An application with its effects in SQLite that can't handle some events."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from feedapi_client import Batch, FeedConsumer
from feedapi_client.model import FeedKey, make_event
from feedapi_client.quarantine import QuarantinedEvent, QuarantineStore, list_events
from feedapi_client.quarantine.record import quarantined
from feedapi_client.testing import Publisher


class PoisonError(Exception):
    """Raised by the handler for an event that it can't handle."""


class Ledger:
    """The effects: one row for each handled event, without a key that would hide duplicates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[list[int]] = []
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (n INTEGER NOT NULL)")
            connection.commit()

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def rows(self) -> list[int]:
        with closing(self.connect()) as connection:
            return [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY rowid")]

    def write(self, connection: sqlite3.Connection, batch: Batch, poison: Collection[int]) -> None:
        self.calls.append(numbers(batch))
        for n in numbers(batch):
            if n in poison:
                raise PoisonError(f"can't handle {n}")
            connection.execute("INSERT INTO effects VALUES (?)", (n,))

    def handler(self, poison: Collection[int]) -> Any:
        """Return a handler that commits the cursor in its own transaction."""

        async def handle(batch: Batch) -> None:
            with closing(self.connect()) as connection, connection:
                self.write(connection, batch, poison)
                await batch.commit(transaction=connection)

        return handle


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
