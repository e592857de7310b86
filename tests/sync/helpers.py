"""What the tests of the synchronous consumer share."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from feedapi_client import Event, FeedKey, Position, SyncFeedConsumer
from feedapi_client.stores.threads import in_callers_thread
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RETRY, SAFETY_LIMIT, RecordingStore, Transaction, limits


def consume(
    publisher: Publisher, *, limit: Mapping[str, Any] | None = None, **options: Any
) -> SyncFeedConsumer:
    """A consumer that polls and retries fast."""
    assert publisher.url is not None
    return SyncFeedConsumer(
        publisher.url, **{"limits": limits(**(limit or {})), "retry": RETRY, **options}
    )


def wait_until(condition: Callable[[], object]) -> None:
    """Wait, in a thread, until a condition holds."""
    deadline = time.monotonic() + SAFETY_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def wait_for_ctrl_c() -> NoReturn:
    """Wait in the main thread. CPython may miss a signal that comes just before one long wait."""
    while True:
        time.sleep(0.05)


def ns(events: Iterable[Event]) -> list[int]:
    return [event.json()["n"] for event in events]


def write(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    connection.executemany("INSERT INTO effects VALUES (?)", [(n,) for n in ns(events)])


def effects(path: str) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [n for (n,) in connection.execute("SELECT n FROM effects ORDER BY rowid")]
    finally:
        connection.close()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class ThreadedStore(RecordingStore):
    """Its transactions are synchronous: `step` runs where their thread is."""

    def __init__(self) -> None:
        super().__init__()
        self.step: Callable[[], object] = lambda: None
        self.threads: list[int] = []

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Transaction | None = None,
    ) -> None:
        if transaction is not None:
            await in_callers_thread(self._in_transaction)
        await super().save(feed, positions, transaction=transaction)

    def _in_transaction(self) -> None:
        self.threads.append(threading.get_ident())
        self.step()
