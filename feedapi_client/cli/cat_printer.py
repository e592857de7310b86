"""Consume a feed: write its events to stdout, then commit the cursors."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio

from feedapi_client.cli import stdout
from feedapi_client.cli.cat import Cat, start_of
from feedapi_client.cli.databases import open_store
from feedapi_client.cli.exit_codes import SIGNALLED
from feedapi_client.cli.feed_options import edges
from feedapi_client.cli.monitoring import monitoring
from feedapi_client.cli.reporting import say
from feedapi_client.cli.terminal import ProgressLine
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, Event
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.memory import MemoryCursorStore


async def print_events(options: Cat) -> int:
    """Print the events of a feed, and return the exit code.

    Raises `FeedError`, `CommandError`, and OSError when stdout can't be written. A reader of stdout
    that goes away is a regular end.
    """
    printer = EventPrinter(options)
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

    def __init__(self, options: Cat) -> None:
        self.options = options
        self.progress = ProgressLine(quiet=options.quiet, beside_output=True)
        self.exit_code = 0
        self._lines = options.lines()
        self._fetch = options.fetch()
        self._start: Literal["first", "last"] | dict[int, str] | None = start_of(
            options.start, options.partitions
        )
        self._lineage = edges(options.lineage)
        self._remaining = options.limit
        self._consumer: FeedConsumer | None = None

    async def run(self) -> None:
        """Print until the end of the feed, the limit or a signal.

        A batch is committed after all its events were written and flushed.
        """
        async with self._store() as store, self.options.connection.client() as http:
            consumer = self._new_consumer(store, http)
            await self._note_stored_cursors(consumer)
            async with monitoring(self.options.monitor, consumer), consumer:
                self._consumer = consumer
                self.progress.start(consumer)
                if self.exit_code:  # a signal came before the consumer was open
                    return
                async for batch in consumer.batches():
                    events, complete = self._within_limit(batch)
                    await stdout.write(self._lines.format(batch, events))
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
        if self.options.store is not None:
            self._remaining = max(0, self._remaining - len(batch.events))
            return batch.events, True
        events = batch.events[: self._remaining]
        self._remaining -= len(events)
        return events, len(events) == len(batch.events)

    def _limits(self) -> Limits:
        # With a limit each checkpoint is a batch of its own, so that the run ends at the first one.
        return Limits() if self.options.limit is None else Limits(max_batch_bytes=1)

    def _new_consumer(self, store: CursorStore, http: Any) -> FeedConsumer:
        options = self.options
        return FeedConsumer(
            options.url,
            store=store,
            name=options.name,
            feed_name=options.feed_name,
            start=self._start,
            ordered=not options.unordered,
            lineage=self._lineage,
            follow=options.follow,
            partitions=options.partitions or None,
            v1_partitions=options.v1_partitions,
            fetch=self._fetch,
            retry=RetryPolicy(give_up_after=options.patience()),
            limits=self._limits(),
            http=http,
        )

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[CursorStore]:
        if self.options.store is None:
            yield MemoryCursorStore()
            return
        async with open_store(self.options.store, create=True) as store:
            yield store

    async def _note_stored_cursors(self, consumer: FeedConsumer) -> None:
        """Say on stderr that stored cursors come before ``--from``."""
        if self.options.start is None or self.options.store is None:
            return
        stored, chosen = await consumer.store.load(consumer.key), self.options.partitions
        if stored.keys() & set(chosen or ()) or (stored and not chosen):
            say(
                f"goes on from the stored cursors of {self.options.name!r}: "
                "--from does not apply ('feedapi cursors reset' forgets them)"
            )
