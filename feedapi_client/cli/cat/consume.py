"""Consume a feed: write its events to stdout, then commit the cursors."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import anyio

from feedapi_client.cli.cat.history import positions_of
from feedapi_client.cli.cat.lines import LineFormat
from feedapi_client.cli.cat.template import TemplateFormat
from feedapi_client.cli.common import stdout
from feedapi_client.cli.common.exit_codes import SIGNALLED
from feedapi_client.cli.common.http_client import http_client
from feedapi_client.cli.common.monitoring import monitoring
from feedapi_client.cli.common.progress import Progress
from feedapi_client.cli.common.stores import open_store
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, Event, FeedKey
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.memory import MemoryCursorStore


@dataclass(frozen=True, kw_only=True)
class CatSettings:
    """What the command line asks for."""

    url: str
    start: Any
    start_given: bool
    since: datetime | None
    partitions: frozenset[int]
    follow: bool
    ordered: bool
    lineage: Mapping[int, int]
    store: str | None
    name: str
    journal: bool
    lines: LineFormat | TemplateFormat
    limit: int | None
    fetch: FetchOptions
    v1_partitions: int | None
    headers: dict[str, str]
    ca_file: str | None
    give_up_after: float
    monitor: str | None
    quiet: bool


async def print_events(settings: CatSettings) -> int:
    """Print the events of a feed, and return the exit code.

    Raises `FeedError`, `CommandError`, and OSError when stdout can't be written. A reader of stdout
    that goes away is a regular end.
    """
    printer = EventPrinter(settings)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(printer.watch_signals, tasks.cancel_scope)
            tasks.start_soon(stdout.watch_reader)
            tasks.start_soon(printer.progress.watch_states)
            await printer.run()
            tasks.cancel_scope.cancel()
    except* stdout.OutputClosedError:
        pass
    finally:
        printer.progress.stop()
    return printer.exit_code


class EventPrinter:
    """Prints the events of one feed to stdout."""

    def __init__(self, settings: CatSettings) -> None:
        self.settings = settings
        self.progress = Progress(quiet=settings.quiet, beside_output=True)
        self.exit_code = 0
        self._remaining = settings.limit
        self._consumer: FeedConsumer | None = None

    async def run(self) -> None:
        """Print until the end of the feed, the limit or a signal.

        A batch is committed after all its events were written and flushed.
        """
        headers, ca_file = self.settings.headers, self.settings.ca_file
        async with self._store() as store, http_client(headers, Limits(), ca_file) as http:
            consumer = self._new_consumer(store, http)
            await self._note_stored_cursors(consumer)
            async with monitoring(self.settings.monitor, consumer), consumer:
                self._consumer = consumer
                self.progress.start(consumer)
                if self.exit_code:  # a signal came before the consumer was open
                    return
                async for batch in consumer.batches():
                    events, complete = self._within_limit(batch)
                    await stdout.write(self.settings.lines.format(batch, events))
                    self.progress.add(len(events))
                    if not complete:
                        return
                    await batch.commit()
                    if self._remaining == 0:
                        return

    async def watch_signals(self, scope: anyio.CancelScope) -> None:
        """End on SIGINT or SIGTERM, after the batch in flight; on the second signal at once.

        Before the consumer is open, a signal cancels `scope`.
        """
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self.exit_code:
                    self.progress.stop()
                    # Not sys.exit(): the thread that writes to stdout may be blocked for good.
                    os._exit(SIGNALLED + number)
                self.exit_code = SIGNALLED + number
                if self._consumer is None:
                    scope.cancel()
                else:
                    self._consumer.stop()

    def _within_limit(self, batch: Batch) -> tuple[Sequence[Event], bool]:
        """Return the events of the batch that `--limit` allows, and whether these are all.

        With a store these are all events up to the next cursor: it could not move otherwise.
        """
        if self._remaining is None:
            return batch.events, True
        if self.settings.store is not None:
            self._remaining = max(0, self._remaining - len(batch.events))
            return batch.events, True
        events = batch.events[: self._remaining]
        self._remaining -= len(events)
        return events, len(events) == len(batch.events)

    def _limits(self) -> Limits:
        # With a limit each checkpoint is a batch of its own, so that the run ends at the first one.
        return Limits() if self.settings.limit is None else Limits(max_batch_bytes=1)

    def _new_consumer(self, store: CursorStore, http: Any) -> FeedConsumer:
        settings = self.settings
        return FeedConsumer(
            settings.url,
            store=store,
            name=settings.name,
            start=settings.start,
            ordered=settings.ordered,
            lineage=settings.lineage,
            follow=settings.follow,
            partitions=settings.partitions or None,
            v1_partitions=settings.v1_partitions,
            fetch=settings.fetch,
            retry=RetryPolicy(give_up_after=settings.give_up_after),
            limits=self._limits(),
            http=http,
        )

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[CursorStore]:
        if self.settings.store is None:
            yield MemoryCursorStore()
            return
        if self.settings.since is not None:
            yield await positions_of(self.settings.store, self._key(), self.settings.since)
            return
        journal = Journal() if self.settings.journal else None
        async with open_store(self.settings.store, create=True, journal=journal) as store:
            yield store

    def _key(self) -> FeedKey:
        return FeedKey(self.settings.url, self.settings.name, self.settings.fetch.selection())

    async def _note_stored_cursors(self, consumer: FeedConsumer) -> None:
        """Say on stderr that stored cursors come before ``--from``."""
        if not self.settings.start_given or self.settings.store is None:
            return
        stored = await consumer.store.load(consumer.key)
        if stored.keys() & self.settings.partitions or (stored and not self.settings.partitions):
            print(
                f"feedapi: goes on from the stored cursors of {self.settings.name!r}: "
                "--from does not apply ('feedapi cursors reset' forgets them)",
                file=sys.stderr,
            )
