"""What ``feedapi cat`` does: consume, write, commit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from feedapi_client.cli.cat.chosen_partitions import NarrowConsumer
from feedapi_client.cli.cat.progress import Progress
from feedapi_client.cli.common.http_client import http_client
from feedapi_client.cli.common.stdout import Lines, OutputClosedError, Stdout
from feedapi_client.cli.common.stores import open_store
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, Event
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.memory import MemoryCursorStore


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for."""

    url: str
    start: Any
    start_given: bool
    partitions: frozenset[int]
    follow: bool
    ordered: bool
    store: str | None
    name: str
    journal: bool
    raw: bool
    checkpoints: bool
    limit: int | None
    fetch: FetchOptions
    v1_partitions: int | None
    headers: dict[str, str]
    give_up_after: float
    quiet: bool


async def read(job: Job) -> int:
    """Do it; returns the exit code. Raises `FeedError`, `CommandError`, OSError."""
    reader = Reader(job)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.watch_signals, tasks.cancel_scope)
            tasks.start_soon(reader.out.watch)
            await reader.consume()
            tasks.cancel_scope.cancel()
    except* OutputClosedError:
        pass  # the reader had enough
    finally:
        reader.progress.stop()
    return reader.code


class Reader:
    """One run. `code` is the exit code."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.out = Stdout()
        self.lines = Lines(raw=job.raw, checkpoints=job.checkpoints)
        self.progress = Progress(quiet=job.quiet)
        self.code = 0
        self.left = job.limit
        self.consumer: FeedConsumer | None = None

    async def consume(self) -> None:
        """From the first batch to the last one."""
        async with self._store() as store, http_client(self.job.headers, Limits()) as http:
            consumer = self._consumer(store, http)
            await self._note_stored(consumer)
            async with consumer:
                self.consumer = consumer
                self.progress.start(consumer)
                if self.code:
                    return
                async for batch in consumer.batches():
                    events, whole = self._wanted(batch)
                    await self.out.write(self.lines.of(batch, events))
                    self.progress.add(len(events))
                    if not whole:
                        return
                    await batch.commit()
                    if self.left == 0:
                        return

    def _wanted(self, batch: Batch) -> tuple[Sequence[Event], bool]:
        """What of the batch is below the limit, and whether that is all of it."""
        if self.left is None:
            return batch.events, True
        events = batch.events[: self.left]
        self.left -= len(events)
        return events, len(events) == len(batch.events)

    def _consumer(self, store: CursorStore, http: Any) -> FeedConsumer:
        job = self.job
        settings: dict[str, Any] = {
            "store": store,
            "name": job.name,
            "start": job.start,
            "ordered": job.ordered,
            "follow": job.follow,
            "v1_partitions": job.v1_partitions,
            "fetch": job.fetch,
            "retry": RetryPolicy(give_up_after=job.give_up_after),
            "http": http,
        }
        return (
            NarrowConsumer(job.url, chosen=job.partitions, **settings)
            if job.partitions
            else FeedConsumer(job.url, **settings)
        )

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[CursorStore]:
        if self.job.store is None:
            yield MemoryCursorStore()
            return
        async with open_store(
            self.job.store, create=True, journal=Journal() if self.job.journal else None
        ) as store:
            yield store

    async def _note_stored(self, consumer: FeedConsumer) -> None:
        if not self.job.start_given or self.job.store is None:
            return
        stored = await consumer.store.load(consumer.key)
        if stored.keys() & self.job.partitions or (stored and not self.job.partitions):
            text = f"goes on from the stored cursors of {self.job.name!r}: --from does not apply ('feedapi cursors reset' forgets them)"
            print(f"feedapi: {text}", file=sys.stderr)

    async def watch_signals(self, scope: anyio.CancelScope) -> None:
        """SIGINT and SIGTERM end the iteration after the batch in hand; the second one ends the process."""
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self.code:
                    self.progress.stop()
                    os._exit(128 + number)
                self.code = 128 + number
                if self.consumer is None:
                    scope.cancel()
                else:
                    self.consumer.stop()
