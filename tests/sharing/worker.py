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
from typing import Any

import anyio
import anyio.abc

from feedapi_client import (
    Batch,
    CursorStore,
    FeedConsumer,
    FeedKey,
    FencedError,
    Limits,
    Position,
    Share,
)
from feedapi_client.stores.base import with_next_revisions
from feedapi_client.stores.redis import RedisCursorStore
from tests.crash.application import Row, application_class

SHARE = Share(lease_seconds=1.5, rebalance_seconds=0.2, handover_seconds=20.0)
_LIMITS = Limits(
    poll_interval=0.01, max_poll_interval=0.1, max_batch_bytes=500, discovery_interval=2.0
)
_PAUSE_SECONDS = 0.1
"""So that a batch is in flight at most moments, before and behind its commit."""
_PAUSE_SECONDS_SQLITE = 0.01
"""A transaction in SQLite holds the file."""


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
            if not database.startswith("postgresql:"):
                self._pause = _PAUSE_SECONDS_SQLITE
            self._application = application_class(database)(database)
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

    async def aclose(self) -> None:
        """Close connections."""
        if self._redis is not None:
            await self._redis.aclose()
        else:
            await self._application.aclose()


def unfenced(store: Any) -> None:
    """Let the store save whatever is stored: what must not happen. Nothing else is changed."""
    fenced = store.save

    async def save(
        feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        while True:
            revisions = {p: found.revision for p, found in (await store.load(feed)).items()}
            unfenced = with_next_revisions(positions, revisions)
            with suppress(FencedError):  # advanced since the load
                return await fenced(feed, unfenced, transaction=transaction)

    store.save = save


async def work(args: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    target = Target(args.database, transaction=not args.without_transaction)
    if args.without_fencing:
        unfenced(target.store)
    consumer = FeedConsumer(args.url, store=target.store, share=SHARE, limits=_LIMITS)

    stopping = anyio.Event()

    async def stop(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                stopping.set()
                consumer.stop()

    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop)
            async with consumer:
                if not stopping.is_set():
                    await consumer.run(target.handle)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await target.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("database")
    parser.add_argument("--without-fencing", action="store_true")
    parser.add_argument("--without-transaction", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    anyio.run(work, args)


if __name__ == "__main__":
    main()
