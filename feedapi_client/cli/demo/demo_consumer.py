"""The consumer of the demo: applies events, and crashes on request.

Run as ``python -m feedapi_client.cli.demo.demo_consumer URL DATABASE NAME`` it is one instance of
several. That ends with code 0 after SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from feedapi_client.cli.demo.proof import Step
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import LeaseLostError
from feedapi_client.model import Batch
from feedapi_client.options import Limits, RetryPolicy, Share
from feedapi_client.status import ConsumerStatus
from feedapi_client.stores.sqlite import SQLiteCursorStore

_MAX_ENTRIES = 1000
# Small batches and short pauses, so that many batches come within a few seconds.
_LIMITS = Limits(
    poll_interval=0.02,
    max_poll_interval=0.1,
    settle_time=1.0,
    discovery_interval=0.25,
    max_batch_bytes=8 * 1024,
)
_RETRY = RetryPolicy(base_delay=0.02, max_delay=0.2)


class EventLog:
    """The latest entries, each with the seconds since the start. `on_entry` is called with each."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, str]] = deque(maxlen=_MAX_ENTRIES)
        self.on_entry: Callable[[float, str], None] | None = None
        self._start = time.monotonic()

    def restart_clock(self) -> None:
        """Count the seconds from now."""
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def add(self, text: str) -> None:
        """Add an entry."""
        elapsed = self.elapsed
        self.entries.append((elapsed, text))
        if self.on_entry is not None:
            self.on_entry(elapsed, text)

    @contextmanager
    def with_warnings(self, feed: str) -> Iterator[None]:
        """Add the library's warnings about the feed, instead of logging them."""
        logger = logging.getLogger("feedapi_client")
        handler, propagate = _WarningHandler(self, feed), logger.propagate
        logger.propagate = False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate


class _WarningHandler(logging.Handler):
    def __init__(self, log: EventLog, feed: str) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._prefix = f"feed {feed}"

    def emit(self, record: logging.LogRecord) -> None:
        # There is one feed: its URL on each line would say nothing.
        self._log.add(record.getMessage().removeprefix(self._prefix).lstrip(":, "))


class Payload(msgspec.Struct):
    """The payload of an event: event number `n` of an entity."""

    entity: str
    n: int


class DemoEffects:
    """A table in the SQLite file that holds the cursors too."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=OFF")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS effects (row INTEGER PRIMARY KEY AUTOINCREMENT, "
            "entity TEXT NOT NULL, n INTEGER NOT NULL)"
        )

    def add(self, batch: Batch) -> None:
        """Insert a row for each event, in the transaction that is open."""
        payloads = [event.decode(Payload) for event in batch.events]
        self.connection.executemany(
            "INSERT INTO effects (entity, n) VALUES (?, ?)",
            [(payload.entity, payload.n) for payload in payloads],
        )

    def count(self) -> int:
        """Return how many events were handled."""
        return int(self.connection.execute("SELECT count(*) FROM effects").fetchone()[0])

    def steps(self) -> list[Step]:
        """Return the events in the order in which they were handled."""
        return list(self.connection.execute("SELECT entity, n FROM effects ORDER BY row"))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class Crash(Exception):  # noqa: N818 - it stands for a crash, not for an error
    """The consumer crashes."""


class DemoConsumer:
    """A consumer that keeps its effects and its cursors in one transaction.

    With `sabotage` the cursor is saved outside of it: before the effects (``cursor-first``) or
    after them (``cursor-last``).
    """

    def __init__(self, log: EventLog, *, sabotage: str | None, share: Share | None = None) -> None:
        self.applied = 0
        self.crashes = 0
        self.status: ConsumerStatus | None = None
        """The latest snapshot, for a view that draws in a thread of its own."""
        self._log = log
        self._sabotage = sabotage
        self._share = share
        self._crashes_requested = 0
        self._consumer: FeedConsumer | None = None
        self._stopped = False

    def crash(self) -> None:
        """Crash at the next batch that has events."""
        self._crashes_requested += 1

    def stop(self) -> None:
        """End the run that follows the feed, after the batch in flight."""
        self._stopped = True
        if self._consumer is not None:
            self._consumer.stop()

    def take_status(self) -> None:
        """Take a snapshot of the consumer."""
        if self._consumer is not None:
            self.status = self._consumer.status()

    async def run(
        self, url: str, store: SQLiteCursorStore, effects: DemoEffects, *, follow: bool
    ) -> bool:
        """Consume until the end, `stop` or a crash. Returns whether it was a crash.

        Raises `FeedError` where the consumer does.
        """
        try:
            async with FeedConsumer(
                url,
                store=store,
                name="demo",
                follow=follow,
                share=self._share,
                limits=_LIMITS,
                retry=_RETRY,
            ) as consumer:
                self._consumer = consumer
                if self._stopped and follow:
                    return False
                async for batch in consumer.batches():
                    try:
                        await self._handle(batch, effects)
                    except LeaseLostError:
                        continue  # rolled back: the instance that has the lease delivers it again
        except Crash:
            self.crashes += 1
            self._log.add(
                f"crash {self.crashes}: the consumer died in the middle of a batch, "
                "another one starts from the store"
            )
            return True
        finally:
            self.take_status()
            self._consumer = None
        return False

    async def _handle(self, batch: Batch, effects: DemoEffects) -> None:
        crash = self._crashes_requested > 0 and len(batch.events) > 0
        if crash:
            self._crashes_requested -= 1
        if self._sabotage is None:
            await self._handle_in_transaction(batch, effects, crash)
        else:
            await self._handle_without_transaction(batch, effects, crash)
        self.applied += len(batch.events)

    async def _handle_in_transaction(self, batch: Batch, effects: DemoEffects, crash: bool) -> None:
        connection = effects.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            effects.add(batch)
            if crash and self.crashes % 2 == 0:
                raise Crash
            await batch.commit(transaction=connection)
            if crash:
                raise Crash
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    async def _handle_without_transaction(
        self, batch: Batch, effects: DemoEffects, crash: bool
    ) -> None:
        """How not to do it: a crash between effects and cursor loses or repeats events."""
        if self._sabotage == "cursor-first":
            await batch.commit()
        else:
            effects.add(batch)
        if crash:
            raise Crash
        if self._sabotage == "cursor-first":
            effects.add(batch)
        else:
            await batch.commit()


async def _run_instance(url: str, path: Path, name: str) -> None:
    """Consume until SIGTERM. Raises `FeedError` where the consumer does."""
    share = Share(instance=name, lease_seconds=1.5, rebalance_seconds=0.2)
    consumer = DemoConsumer(EventLog(), sabotage=None, share=share)

    async def stop(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                consumer.stop()

    effects = DemoEffects(path)
    try:
        async with SQLiteCursorStore(path) as store, anyio.create_task_group() as tasks:
            await tasks.start(stop)
            await consumer.run(url, store, effects, follow=True)
            tasks.cancel_scope.cancel()
    finally:
        effects.close()


if __name__ == "__main__":
    logging.getLogger("feedapi_client").setLevel(logging.ERROR)  # what is lost is part of the demo
    anyio.run(_run_instance, sys.argv[1], Path(sys.argv[2]), sys.argv[3])
