"""``feedapi relay``: publish a feed to a Liftbridge stream.

Also ``python -m feedapi_client.liftbridge.command``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NoReturn

import httpx

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import FeedError
from feedapi_client.http.trust import trusted
from feedapi_client.http.urls import FeedURL
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.command_options import (
    DEFAULT_NATS,
    GROUPS,
    check_api_options,
    environment,
    make_api,
    stream_options,
)
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.relay import Key, Relay
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.liftbridge.stream_store import StreamCursorStore
from feedapi_client.lineage.missing_edges import parse_lineage
from feedapi_client.model import Event
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.sqlite import SQLiteCursorStore

_BATCH_BYTES = 512 * 1024
# A commit waits for the stream, exactly once: it has to outlast the election of a new leader.
_COMMIT_SECONDS = 120.0
_PROGRESS_INTERVAL = 0.5
EXAMPLES = (
    "https://service/myfeed --stream myfeed --store cursors.db",
    "https://service/myfeed --stream myfeed --key order.id --partitions 8 --store cursors.db",
    "https://service/myfeed --stream myfeed --api broker:9292 --create --exactly-once batch",
)
"""Arguments of the command, for its help."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line on one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"feedapi relay: {_one_line(message)} (feedapi relay --help says more)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = _Parser(
        prog="feedapi relay",
        description="Publish the events of a feed to a Liftbridge stream, "
        "and commit cursors when the events are acked.",
        epilog="\n".join(["Examples:", *(f"  feedapi relay {each}" for each in EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("url", help="the feed; its query is sent with every request")
    made.add_argument("--quiet", "-q", action="store_true", help="no progress on stderr")
    made.add_argument(
        "--monitor",
        metavar="HOST:PORT",
        help="serve probes, metrics and a status page there (extra monitor)",
    )
    for title, options in GROUPS:
        group = made.add_argument_group(title)
        for name, settings in options:
            group.add_argument(name, **settings)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: it ended without an error. 1: the feed or the broker failed. 2: wrong arguments. 128 plus the
    signal's number after a signal. An error is one line on stderr.
    """
    options = parser().parse_args(argv)
    # An error that ends the relay is told below, in one line.
    log = logging.getLogger("feedapi_client.runtime.handlers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return asyncio.run(RelayCommand(options).run())
    except (ValueError, FeedError) as error:
        sys.stderr.write(f"feedapi relay: {_one_line(str(error))}\n")
        return 2 if isinstance(error, ValueError) else 1
    finally:
        log.setLevel(level)


class RelayCommand:
    """One execution of the command. Raises ValueError for options that do not fit together."""

    def __init__(self, options: argparse.Namespace) -> None:
        _check(options)
        _check_url(options.url)
        self.options = options
        self.stream = Stream(options.stream, options.subject, options.partitions)
        self.fetch = FetchOptions(
            filters=_filters(options.filter),
            event_types=options.event_type,
            skip_event_types=options.skip_event_type,
        )
        self.lineage = _lineage(options.lineage)
        self.servers = (
            [environment(options.nats_env)] if options.nats_env else options.nats or [DEFAULT_NATS]
        )
        self.headers = {"Authorization": environment(options.auth_env)} if options.auth_env else {}
        self.trusted = _trusting(options.ca_file)
        self.signal = 0

    async def run(self) -> int:
        """Relay until the end, a signal or an error, and return the exit code."""
        options = self.options
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(self._publisher())
            api = await self._api(stack)
            store = await self._store(stack, publisher, api)
            http = None
            if self.headers or self.trusted is not None:
                http = await stack.enter_async_context(
                    httpx.AsyncClient(headers=self.headers, verify=self.trusted or True)
                )
            consumer = await stack.enter_async_context(
                FeedConsumer(
                    options.url,
                    store=store,
                    name=options.name,
                    start=options.start,
                    follow=not options.no_follow,
                    v1_partitions=options.v1_partitions,
                    lineage=self.lineage,
                    fetch=self.fetch,
                    limits=Limits(max_batch_bytes=_BATCH_BYTES, commit_timeout=_COMMIT_SECONDS),
                    http=http,
                )
            )
            key = _key(options.key) if options.key else None
            policy = AckPolicy[options.ack.upper()]
            relay = Relay(consumer, publisher, self.stream, key=key, ack_policy=policy, api=api)
            self._stop_on_signals(consumer)
            await self._serve_monitor(stack, consumer)
            await self._run_with_progress(relay, consumer, publisher)
        return 128 + self.signal if self.signal else 0

    async def _serve_monitor(self, stack: AsyncExitStack, consumer: FeedConsumer) -> None:
        if self.options.monitor is None:
            return
        try:
            from feedapi_client.monitor import serve
            from feedapi_client.monitor.address import parse_address
        except ImportError as missing:
            raise ValueError(str(missing)) from None
        try:
            host, port = parse_address(self.options.monitor)
            server = await stack.enter_async_context(serve(consumer, host=host, port=port))
        except (ValueError, OSError) as error:
            raise ValueError(f"--monitor {error}") from None
        sys.stderr.write(f"feedapi relay: monitor at {server.url}\n")

    def _publisher(self) -> LiftbridgePublisher:
        options = self.options
        return LiftbridgePublisher(
            self.servers,
            ack_timeout=options.ack_timeout,
            max_in_flight=options.max_in_flight,
            options={"user_credentials": options.nats_creds} if options.nats_creds else None,
        )

    async def _api(self, stack: AsyncExitStack) -> LiftbridgeApi | None:
        """Open the gRPC API where it is given, and create the stream if that is asked for."""
        options = self.options
        if not options.api:
            return None
        api = await stack.enter_async_context(make_api(options))
        if options.create:
            await api.create_stream(
                self.stream,
                concurrency_control=bool(options.exactly_once),
                replication_factor=options.replicas,
                min_isr=options.min_isr,
                options=stream_options(options),
            )
        return api

    async def _store(
        self, stack: AsyncExitStack, publisher: LiftbridgePublisher, api: LiftbridgeApi | None
    ) -> CursorStore:
        options = self.options
        if options.exactly_once and api is not None:
            return StreamCursorStore(publisher, api, self.stream, format=options.exactly_once)
        return await stack.enter_async_context(SQLiteCursorStore(options.store))

    def _stop_on_signals(self, consumer: FeedConsumer) -> None:
        """Stop after the batches in flight at the first signal, and at once at the second."""

        def stop(number: int) -> None:
            if self.signal:
                os._exit(128 + number)
            self.signal = number
            consumer.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            # Not possible on Windows, and outside the main thread.
            with suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, stop, number)

    async def _run_with_progress(
        self, relay: Relay, consumer: FeedConsumer, publisher: LiftbridgePublisher
    ) -> None:
        shown = sys.stderr.isatty() and not self.options.quiet
        task = asyncio.create_task(_show_progress(relay, consumer, publisher)) if shown else None
        try:
            await relay.run()
        finally:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not self.options.quiet:
            done = relay.progress
            sys.stderr.write(
                f"{done.events:,} events in {done.batches:,} batches to stream {self.stream.name}, "
                f"{done.retries} retries\n"
            )


async def _show_progress(
    relay: Relay, consumer: FeedConsumer, publisher: LiftbridgePublisher
) -> None:
    """Update a line with events, rate, messages in flight, and the states of partitions."""
    before, at = 0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            now, events = time.monotonic(), relay.progress.events
            states = Counter(
                partition.state.value for partition in consumer.status().partitions.values()
            )
            parts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            sys.stderr.write(
                f"\r\x1b[K{events:,} events acked, {(events - before) / (now - at):,.0f}/s, "
                f"{publisher.in_flight:,} in flight; {parts}"
            )
            sys.stderr.flush()
            before, at = events, now
    finally:
        sys.stderr.write("\r\x1b[K")


def _check(options: argparse.Namespace) -> None:
    if options.exactly_once and not options.api:
        raise ValueError("--exactly-once reads the stream back: it needs --api HOST:PORT")
    if options.exactly_once and options.store:
        raise ValueError("--exactly-once keeps the cursors in the stream: it goes without --store")
    if not options.exactly_once and not options.store:
        raise ValueError(
            "say where the cursors are kept: --store FILE, or --exactly-once for in the stream"
        )
    check_api_options(options)


def _check_url(url: str) -> None:
    """Raise ValueError for a URL that no feed can have."""
    try:
        FeedURL.parse(url)
    except FeedError as error:
        raise ValueError(error.message) from None
    except ValueError as error:
        # Only its type: the reason may quote a part of a password.
        raise ValueError(f"the feed's URL can't be read ({type(error).__name__})") from None


def _trusting(ca_file: str | None) -> ssl.SSLContext | None:
    """Return what trusts the certificates of a file; None without one."""
    if ca_file is None:
        return None
    try:
        return trusted(ca_file)
    except ValueError as error:
        raise ValueError(f"--ca-file: {error}") from None


def _one_line(text: str) -> str:
    """Return the text without line ends and other characters that a terminal would act upon."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in " ".join(text.split())
    )


def _key(path: str) -> Key:
    names = path.split(".")

    def key(event: Event) -> bytes | None:
        value: Any = event.json()
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value is None else str(value).encode()

    return key


def _filters(texts: Sequence[str]) -> dict[str, str]:
    filters = {
        name: value
        for name, equals, value in (text.partition("=") for text in texts)
        if name and equals
    }
    if len(filters) < len(texts):
        raise ValueError("--filter takes NAME=VALUE, each NAME once")
    return filters


def _lineage(texts: Sequence[str]) -> dict[int, int]:
    try:
        return parse_lineage(",".join(texts)) if texts else {}
    except ValueError as error:
        raise ValueError(f"--lineage {error}") from None


if __name__ == "__main__":
    sys.exit(main())
