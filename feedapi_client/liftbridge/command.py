"""``feedapi relay``: a feed onto a Liftbridge stream. Also ``python -m feedapi_client.liftbridge.command``."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import FeedError
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.relay import Key, Relay
from feedapi_client.liftbridge.stream_store import StreamCursorStore
from feedapi_client.liftbridge.streams import Stream
from feedapi_client.model import Event
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.sqlite import SQLiteCursorStore

_BATCH_BYTES = 512 * 1024
_REFRESH_SECONDS = 0.5


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="feedapi relay",
        description="Publish the events of a feed to a Liftbridge stream, and commit what is acked.",
    )
    add = made.add_argument
    add("url", help="the feed; its query is sent with every request")
    add(
        "--nats",
        action="append",
        metavar="URL",
        help="a NATS server, repeatable (default nats://127.0.0.1:4222)",
    )
    add(
        "--nats-env",
        metavar="NAME",
        help="environment variable with the NATS URL, where it holds a password",
    )
    add("--nats-creds", metavar="FILE", help="NATS credentials file")
    add("--stream", required=True, help="the stream")
    add("--subject", default="", help="the stream's NATS subject (default: its name)")
    add(
        "--partitions", type=int, default=1, metavar="N", help="the stream's partitions (default 1)"
    )
    add(
        "--api",
        action="append",
        metavar="HOST:PORT",
        help="a broker's gRPC API, repeatable; for --create and --exactly-once",
    )
    add("--create", action="store_true", help="create the stream if it is missing")
    add("--key", metavar="FIELD", help="the message's key: a field of the payload, nested by dots")
    add(
        "--exactly-once",
        choices=["batch", "events"],
        metavar="batch|events",
        help="keep the cursors in the stream: a message for a batch, or for an event",
    )
    add("--store", metavar="FILE", help="SQLite file for the cursors, at least once")
    add("--name", default="default", help="whose cursors they are")
    add(
        "--from",
        dest="start",
        choices=["first", "last"],
        default="first",
        help="where a new name begins (default first)",
    )
    add("--no-follow", action="store_true", help="end at the end of the feed")
    add(
        "--ack",
        choices=["leader", "all"],
        default="all",
        help="ack when the leader, or all in-sync replicas, have it (default all)",
    )
    add(
        "--ack-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="deadline for each ack (default 10)",
    )
    add(
        "--max-in-flight",
        type=int,
        default=8192,
        metavar="N",
        help="messages that wait for their ack at a time (default 8192)",
    )
    add(
        "--filter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="only events that the feed's filter selects, repeatable",
    )
    add(
        "--event-type",
        action="append",
        default=[],
        metavar="TYPE",
        help="only events of the type, repeatable",
    )
    add(
        "--skip-event-type",
        action="append",
        default=[],
        metavar="TYPE",
        help="no events of the type, repeatable",
    )
    add(
        "--v1-partitions",
        type=int,
        metavar="N",
        help="the number of partitions of a ZeroEventHub (v1) feed",
    )
    add(
        "--auth-env",
        metavar="NAME",
        help="environment variable with the value of the Authorization header",
    )
    add("--quiet", "-q", action="store_true", help="no progress on stderr")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 0 when it ended well, 1 when the feed or the broker failed, 2 for wrong arguments, 128 and the signal's number after one.

    One line on stderr says why.
    """
    options = parser().parse_args(argv)
    try:
        command = Command(options)
        return asyncio.run(command.run())
    except (ValueError, FeedError) as error:
        sys.stderr.write(f"feedapi relay: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, ValueError) else 1


class Command:
    """One run. Raises ValueError for options that do not go together."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.exactly_once and not options.api:
            raise ValueError("--exactly-once reads the stream back: it needs --api HOST:PORT")
        if options.exactly_once and options.store:
            raise ValueError(
                "--exactly-once keeps the cursors in the stream: it goes without --store"
            )
        if not options.exactly_once and not options.store:
            raise ValueError(
                "--store FILE says where the cursors are kept (or --exactly-once, in the stream)"
            )
        if options.create and not options.api:
            raise ValueError("--create needs --api HOST:PORT")
        self.options = options
        self.stream = Stream(options.stream, options.subject, options.partitions)
        self.fetch = FetchOptions(
            filters=_pairs(options.filter),
            event_types=options.event_type,
            skip_event_types=options.skip_event_type,
        )
        self.servers = (
            [_environment(options.nats_env)]
            if options.nats_env
            else options.nats or ["nats://127.0.0.1:4222"]
        )
        self.headers = {"Authorization": _environment(options.auth_env)} if options.auth_env else {}
        self.signalled = 0

    async def run(self) -> int:
        """Relay until the end, a signal or an error; returns the exit code."""
        options = self.options
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(self._publisher())
            store = await self._store(stack, publisher)
            http = (
                await stack.enter_async_context(httpx.AsyncClient(headers=self.headers))
                if self.headers
                else None
            )
            limits = Limits(max_batch_bytes=_BATCH_BYTES)
            consumer = await stack.enter_async_context(
                FeedConsumer(
                    options.url,
                    store=store,
                    name=options.name,
                    start=options.start,
                    follow=not options.no_follow,
                    v1_partitions=options.v1_partitions,
                    fetch=self.fetch,
                    limits=limits,
                    http=http,
                )
            )
            relay = Relay(
                consumer, publisher, self.stream, key=_key(options.key) if options.key else None
            )
            self._stop_at_signals(consumer)
            await self._watched(relay, consumer, publisher)
        return 128 + self.signalled if self.signalled else 0

    def _publisher(self) -> LiftbridgePublisher:
        options = self.options
        return LiftbridgePublisher(
            self.servers,
            ack_policy=AckPolicy[options.ack.upper()],
            ack_timeout=options.ack_timeout,
            max_in_flight=options.max_in_flight,
            options={"user_credentials": options.nats_creds} if options.nats_creds else None,
        )

    async def _store(self, stack: AsyncExitStack, publisher: LiftbridgePublisher) -> CursorStore:
        options = self.options
        if options.api:
            api = await stack.enter_async_context(LiftbridgeApi(options.api))
            if options.create:
                await api.create_stream(self.stream, concurrency_control=bool(options.exactly_once))
            if options.exactly_once:
                return StreamCursorStore(publisher, api, self.stream, format=options.exactly_once)
        return await stack.enter_async_context(SQLiteCursorStore(options.store))

    def _stop_at_signals(self, consumer: FeedConsumer) -> None:
        """The first signal ends the relay after the batches in hand, the second one at once."""

        def stop(number: int) -> None:
            if self.signalled:
                os._exit(128 + number)
            self.signalled = number
            consumer.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(
                NotImplementedError, RuntimeError, ValueError
            ):  # another system, or not the main thread
                asyncio.get_running_loop().add_signal_handler(number, stop, number)

    async def _watched(
        self, relay: Relay, consumer: FeedConsumer, publisher: LiftbridgePublisher
    ) -> None:
        shown = sys.stderr.isatty() and not self.options.quiet
        watching = asyncio.create_task(_watch(relay, consumer, publisher)) if shown else None
        try:
            await relay.run()
        finally:
            if watching is not None:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
        if not self.options.quiet:
            done = relay.progress
            sys.stderr.write(
                f"{done.events:,} events in {done.batches:,} batches to stream {self.stream.name}, {done.retries} retries\n"
            )


async def _watch(relay: Relay, consumer: FeedConsumer, publisher: LiftbridgePublisher) -> None:
    """A line that is written over: events, rate, messages in flight, and the states of the feed's partitions."""
    before, at = 0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            now, events = time.monotonic(), relay.progress.events
            states = Counter(
                partition.state.partition(" for ")[0]
                for partition in consumer.status().partitions.values()
            )
            parts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            sys.stderr.write(
                f"\r\x1b[K{events:,} events acked, {(events - before) / (now - at):,.0f}/s, {publisher.in_flight:,} in flight; {parts}"
            )
            sys.stderr.flush()
            before, at = events, now
    finally:
        sys.stderr.write("\r\x1b[K")


def _key(path: str) -> Key:
    names = path.split(".")

    def key(event: Event) -> bytes | None:
        value: Any = event.json()
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value is None else str(value).encode()

    return key


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = {
        name: value
        for name, equals, value in (text.partition("=") for text in texts)
        if name and equals
    }
    if len(pairs) < len(texts):
        raise ValueError("--filter takes NAME=VALUE, each NAME once")
    return pairs


def _environment(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"the environment variable {variable} is not set")
    return value


if __name__ == "__main__":
    sys.exit(main())
