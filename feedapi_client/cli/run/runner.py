"""Run the application's handler until the end of the feed, a signal or an error."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.exit_codes import FENCED, HANDLER_FAILED, SIGNALLED, USAGE
from feedapi_client.cli.common.handlers import (
    Handler,
    import_handler,
    open_handler,
    reimport_handler,
)
from feedapi_client.cli.common.http_client import http_client
from feedapi_client.cli.common.monitoring import monitoring
from feedapi_client.cli.common.stores import open_store
from feedapi_client.cli.run.options import OnFailure
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import FeedError, FencedError
from feedapi_client.model import Batch
from feedapi_client.options import FetchOptions, Limits, Share
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.stores.base import CursorStore


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the command line asks for."""

    url: str
    handler: str
    store: str
    name: str
    on_failure: OnFailure
    attempts: int | None
    share: bool
    monitor: str | None
    grace: float
    max_concurrency: int
    start: Literal["first", "last"]
    follow: bool
    park: bool
    fetch: FetchOptions
    v1_partitions: int | None
    lineage: Mapping[int, int]
    headers: dict[str, str]
    ca_file: str | None

    def policy(self) -> Literal["raise"] | Retry:
        """Return what `FeedConsumer.run` takes as ``on_failure``."""
        match self.on_failure:
            case OnFailure.RETRY:
                return Retry(attempts=self.attempts)
            case OnFailure.QUARANTINE:
                return Retry(attempts=self.attempts, then=Quarantine())
        return "raise"


async def run_handler(settings: RunSettings) -> int:
    """Run the handler, and return the exit code.

    Raises `CommandError`, and `FeedError` of the feed and the store.
    """
    return await Runner(settings).run()


class Runner:
    """One execution of the command.

    One consumer and one process. With ``--share`` several processes of one name each have a
    `Runner` of their own, and divide the partitions.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._consumer: FeedConsumer | None = None
        self._signal = 0
        self._next: Callable[..., Any] | None = None
        """The handler that a reload has imported, and that comes next."""
        self._handler_error: Exception | None = None

    async def run(self) -> int:
        """Consume, and return the exit code."""
        try:
            self._next = import_handler(self.settings.handler)
        except CommandError as error:
            return _fail(str(error), USAGE)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_signals, tasks.cancel_scope)
                await self._consume()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            return self._exit_code(_first(group))
        cut_short = self._consumer is not None and self._consumer.cut_short
        return SIGNALLED + self._signal if cut_short and self._signal else 0

    def _exit_code(self, error: BaseException) -> int:
        """Report an error and return its exit code, or raise it for the command to report."""
        if isinstance(error, FencedError):
            return _fail(str(error), FENCED)
        if error is not self._handler_error or isinstance(error, FeedError):
            raise error from None
        # Without its text: that may hold a payload.
        return _fail(f"the handler failed with {type(error).__qualname__}", HANDLER_FAILED)

    async def _consume(self) -> None:
        settings = self.settings
        async with (
            open_store(settings.store, create=True) as store,
            http_client(settings.headers, Limits(), settings.ca_file) as http,
        ):
            consumer = self._new_consumer(store, http)
            async with monitoring(settings.monitor, consumer), consumer:
                self._consumer = consumer
                while self._next is not None and not self._signal:
                    function, self._next = self._next, None
                    async with open_handler(settings.handler, function) as handle:
                        await consumer.run(
                            self._noting(handle),
                            on_failure=settings.policy(),
                            max_concurrency=settings.max_concurrency,
                        )

    def _noting(self, handle: Handler) -> Handler:
        """Return the handler with a note of its last error, to tell it from errors of the feed."""

        async def noting(batch: Batch) -> None:
            try:
                await handle(batch)
            except Exception as error:
                self._handler_error = error
                raise

        return noting

    def _new_consumer(self, store: CursorStore, http: Any) -> FeedConsumer:
        settings = self.settings
        return FeedConsumer(
            settings.url,
            store=store,
            name=settings.name,
            start=settings.start,
            follow=settings.follow,
            fetch=settings.fetch,
            v1_partitions=settings.v1_partitions,
            lineage=settings.lineage,
            share=Share() if settings.share else None,
            on_error="park" if settings.park else "raise",
            http=http,
        )

    # ------------------------------------------------------------------ signals

    async def _watch_signals(self, scope: anyio.CancelScope) -> None:
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return
        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with anyio.open_signal_receiver(*watched) as signals:
            async for number in signals:
                if number is signal.SIGHUP:
                    self._reload()
                else:
                    self._end(number, scope)

    def _end(self, number: signal.Signals, scope: anyio.CancelScope) -> None:
        if self._consumer is None:
            self._signal = number
            scope.cancel()  # nothing is in flight yet
        elif not self._signal:
            self._signal = number
            grace = self.settings.grace
            _say(f"{number.name}: ends after what is in flight, in at most {grace:g} s")
            self._consumer.stop(grace=grace)
        elif not self._consumer.cut_short:
            self._consumer.stop(grace=0)
        else:
            os._exit(SIGNALLED + number)

    def _reload(self) -> None:
        try:
            self._next = reimport_handler(self.settings.handler)
        except CommandError as error:
            _say(f"not reloaded: {error}")
            return
        _say("the handler is reloaded")
        if self._consumer is not None:
            self._consumer.stop(grace=self.settings.grace)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _say(text: str) -> None:
    print(f"feedapi: {shown_line(text)}", file=sys.stderr, flush=True)


def _fail(text: str, code: int) -> int:
    _say(text)
    return code
