"""One instance that shares a feed: ``python -m tests.sharing.worker URL DATABASE [OPTIONS]``.

SIGTERM stops it gracefully. It ends with code 0 then.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.abc

from feedapi_client import (
    Batch,
    CursorStore,
    Event,
    FeedConsumer,
    FeedKey,
    FencedError,
    Limits,
    Position,
    Share,
)
from feedapi_client.quarantine import Retry
from feedapi_client.stores.base import in_place_of
from feedapi_client.stores.redis import RedisCursorStore
from tests.crash.application import Row, application_class
from tests.sharing.sql_application import SQLApplication
from tests.sharing.waits import Waits

SHARE = Share(lease_seconds=1.5, rebalance_seconds=0.2, handover_seconds=20.0)
_RETRY = Retry(attempts=None, base_delay=0.05, max_delay=0.5)
"""What a handler does about a database that is gone."""
_LIMITS = Limits(
    poll_interval=0.01,
    max_poll_interval=0.1,
    max_batch_bytes=500,
    discovery_interval=2.0,
    settle_time=0.5,  # the publisher does not say where a closed partition ends
)
_PAUSE_SECONDS = 0.1
"""So that a batch is in flight at most moments, before and behind its commit."""
_PAUSE_SECONDS_SQLITE = 0.01
"""A transaction in SQLite holds the file."""
_SLOW_SHARE = 0.05
_SLOW_TIMES = 20
_KEYS_AT_ONCE = 4
"""Handlers by key: as many as the connections that the application has to spare."""


class Target:
    """Where events go: a table with the cursors, or a Redis list beside them."""

    def __init__(self, database: str, *, transaction: bool) -> None:
        self._pause = _PAUSE_SECONDS
        self._transaction = transaction
        self._redis: Any = None
        self._application: Any = None
        if database.startswith(("redis:", "unix:")):
            import redis.asyncio

            self._redis = redis.asyncio.Redis.from_url(database)
            self.store: CursorStore = RedisCursorStore(self._redis)
        else:
            if "://" not in database:
                self._pause = _PAUSE_SECONDS_SQLITE
            self._application = application_of(database)
            self.store = self._application.store

    async def handle(self, batch: Batch) -> None:
        """Write the events of a batch; with transactions commit it in the same one."""
        events = [event.json() for event in batch.events]
        rows = [Row(batch.partition, e["entity"], e["n"], os.getpid()) for e in events]
        await anyio.sleep(random.uniform(0, self._pause))
        if self._redis is not None:
            if rows:
                texts = [f"{row.partition} {row.n} {row.entity}" for row in rows]
                await self._redis.rpush("effects", *texts)
            return
        async with self._application.transaction() as transaction:
            if rows:
                await self._application.write(transaction, rows)
            await anyio.sleep(random.uniform(0, self._pause))
            if self._transaction:
                await batch.commit(transaction=transaction)
                await anyio.sleep(random.uniform(0, self._pause))

    async def handle_event(self, event: Event) -> None:
        """Write one event, and remember in the same transaction that it is done."""
        payload = event.json()
        row = Row(event.partition, payload["entity"], payload["n"], os.getpid())
        # Some take long, so that much is done ahead of the cursor.
        longest = self._pause * (_SLOW_TIMES if random.random() < _SLOW_SHARE else 1)
        await anyio.sleep(random.uniform(0, longest))
        async with self._application.transaction() as transaction:
            await self._application.write(transaction, [row])
            await anyio.sleep(random.uniform(0, self._pause / 4))
            await event.done(transaction=transaction)
            await anyio.sleep(random.uniform(0, self._pause / 4))

    async def aclose(self) -> None:
        """Close connections."""
        if self._redis is not None:
            await self._redis.aclose()
        else:
            await self._application.aclose()


def application_of(database: str) -> Any:
    """Return the application for the URL or the file of a database."""
    if database.startswith(("postgresql+", "mysql+")):
        return SQLApplication(database)
    return application_class(database)(database)


def unfenced(store: Any) -> None:
    """Let the store save whatever is stored: what must not happen. Nothing else is changed."""
    fenced = store.save

    async def save(
        feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        while True:
            unfenced = in_place_of(await store.load(feed), positions)
            with suppress(FencedError):  # advanced since the load
                await fenced(feed, unfenced, transaction=transaction)
                return

    store.save = save


def show(consumer: FeedConsumer) -> None:
    """Log where each partition stands."""
    for partition, found in consumer.status().partitions.items():
        logging.info("%d: %s at %s, %s", partition, found.state.value, found.cursor, found)
    logging.info("%s", consumer.health())


async def work(args: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    target = Target(args.database, transaction=not args.without_transaction)
    if args.without_fencing:
        unfenced(target.store)
    waits = Waits(args.waits, target.store)
    share = replace(SHARE, lease_seconds=args.lease)
    consumer = FeedConsumer(args.url, store=target.store, share=share, limits=_LIMITS)

    stopping = anyio.Event()

    async def stop(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
            task_status.started()
            async for each in signals:
                if each == signal.SIGUSR1:
                    show(consumer)
                    continue
                stopping.set()
                consumer.stop()

    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop)
            tasks.start_soon(waits.run)
            async with consumer:
                if args.by_key and not stopping.is_set():
                    await consumer.run_by_key(
                        target.handle_event,
                        key=lambda event: event.json()["entity"],
                        event_id=lambda event: f"{event.json()['entity']} {event.json()['n']}",
                        max_concurrency=_KEYS_AT_ONCE,
                        on_failure=_RETRY,
                    )
                elif not stopping.is_set():
                    await consumer.run(target.handle, on_failure=_RETRY)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await target.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("database")
    parser.add_argument("--lease", type=float, default=SHARE.lease_seconds)
    parser.add_argument("--waits", help="directory for the longest waits of each process")
    parser.add_argument("--without-fencing", action="store_true")
    parser.add_argument("--without-transaction", action="store_true")
    parser.add_argument("--by-key", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    anyio.run(work, args)


if __name__ == "__main__":
    main()
