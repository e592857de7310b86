"""Publisher and relay beside bare nats-py loops: ``python -m tests.benchmarks.bench_liftbridge``.

All loops send the same payloads in one run. One bare loop only publishes. The other one waits for
an ack of each message, as a publisher that loses nothing has to; it is the base of the ratios.
Publisher and relay are measured with the fast path and with documented calls of nats-py only.
Client, NATS server and broker share the cores of the machine; the CPU time is the client's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import nats
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Message,
    Relay,
    Stream,
    StreamCursorStore,
    encode,
)
from feedapi_client.liftbridge import publisher as publisher_module
from feedapi_client.liftbridge.envelope import decode_message
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer
from tests.benchmarks.fast_broker import fast_broker
from tests.benchmarks.static_feed import payload, static_feed

STREAM = "bench"
SUBJECT_WITHOUT_ACKS = "bench.quiet"
HEADERS = {"feedapi-partition": b"0", "feedapi-cursor": b"00000000000000000100"}


@dataclass(frozen=True)
class Measurement:
    """Events of one round, and the seconds and CPU seconds of the client that they took."""

    events: int
    wall: float
    cpu: float


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def stop(self, events: int) -> Measurement:
        wall, cpu = self._start
        return Measurement(events, time.perf_counter() - wall, time.process_time() - cpu)


async def bare(url: str, payloads: list[bytes]) -> Measurement:
    """Publish with nats-py, without acks, and flush at the end."""
    watch = Stopwatch()
    client = await nats.connect(url)
    for value in payloads:
        await client.publish(SUBJECT_WITHOUT_ACKS, value)
    await client.flush()
    await client.close()
    return watch.stop(len(payloads))


async def bare_acked(url: str, payloads: list[bytes], window: int) -> Measurement:
    """Publish with nats-py, envelopes encoded before, acks counted, at most `window` in flight."""
    client = await nats.connect(url)
    inbox = client.new_inbox()
    envelopes = [
        encode(
            Message(offset=-1, value=value, headers=HEADERS, ackInbox=inbox, correlationId=f"{i:x}")
        )
        for i, value in enumerate(payloads)
    ]
    acked = 0
    progress = asyncio.Event()

    async def count(message: Msg) -> None:
        nonlocal acked
        acked += 1
        if acked % (window // 4) == 0 or acked == len(payloads):
            progress.set()

    await client.subscribe(inbox, cb=count)
    await client.flush()
    watch = Stopwatch()
    for i, envelope in enumerate(envelopes):
        while i - acked >= window:
            progress.clear()
            await progress.wait()
        await client.publish(STREAM, envelope)
    while acked < len(payloads):
        progress.clear()
        await progress.wait()
    measured = watch.stop(len(payloads))
    await client.close()
    return measured


async def publisher_acked(url: str, payloads: list[bytes], window: int) -> Measurement:
    watch = Stopwatch()
    async with LiftbridgePublisher(url, max_in_flight=window, ack_timeout=60) as publisher:
        await publisher.publish_many(STREAM, payloads, headers=HEADERS)
    return watch.stop(len(payloads))


async def relay_at_least_once(url: str, feed: str, window: int) -> Measurement:
    watch = Stopwatch()
    async with (
        LiftbridgePublisher(url, max_in_flight=window, ack_timeout=60) as publisher,
        FeedConsumer(feed, follow=False) as consumer,
    ):
        progress = await Relay(consumer, publisher, STREAM).run()
    return watch.stop(progress.events)


async def relay_exactly_once(url: str, feed: str, format: str) -> Measurement:
    """Relay exactly once. The simulated broker is the limit of single events."""
    watch = Stopwatch()
    async with LiftbridgeBroker(url, grpc=True) as broker:
        await broker.create_stream("once", concurrency_control=True)
        async with (
            LiftbridgePublisher(url, ack_timeout=60, max_message_bytes=None) as publisher,
            LiftbridgeApi(broker.address) as api,
        ):
            store = StreamCursorStore(publisher, api, Stream("once"), format=format)
            async with FeedConsumer(feed, follow=False, store=store) as consumer:
                progress = await Relay(consumer, publisher).run()
    return watch.stop(progress.events)


async def documented_calls(loop: Callable[[], Awaitable[Measurement]]) -> Measurement:
    """Run a loop without the fast path."""
    with patch.object(publisher_module, "install_fast_path", lambda *_: None):
        return await loop()


class Results:
    """The measurements of all rounds."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    def add(self, name: str, measured: Measurement) -> None:
        self._rates.setdefault(name, []).append(measured.events / measured.wall)
        self._cpu.setdefault(name, []).append(measured.cpu / measured.events * 1e6)

    def table(self, bases: list[str]) -> Table:
        table = Table(
            "loop",
            "events/s",
            "client CPU, us/event",
            *(f"of {base}" for base in bases),
            title="acked publishing over NATS, medians",
        )
        for name, rates in self._rates.items():
            rate = statistics.median(rates)
            ratios = [f"{rate / statistics.median(self._rates[base]):.2f}" for base in bases]
            cpu = statistics.median(self._cpu[name])
            table.add_row(name, f"{rate:,.0f}", f"{cpu:.2f}", *ratios)
        return table


async def throughput(events: int, rounds: int, window: int) -> Results:
    payloads = [payload(number) for number in range(events)]
    results = Results()
    with (
        NatsServer() as server,
        fast_broker(server.url, STREAM),
        static_feed(events=events) as feed,
    ):
        publish = partial(publisher_acked, server.url, payloads, window)
        relay = partial(relay_at_least_once, server.url, feed, window)
        for _ in range(rounds):
            results.add("bare publish", await bare(server.url, payloads))
            results.add("bare publish, acked", await bare_acked(server.url, payloads, window))
            results.add("LiftbridgePublisher", await publish())
            results.add("LiftbridgePublisher, documented calls", await documented_calls(publish))
            results.add("Relay, at least once", await relay())
            results.add("Relay, at least once, documented calls", await documented_calls(relay))
        for format in ("batch", "events"):
            results.add(
                f"Relay, exactly once, {format} (broker in the same process)",
                await relay_exactly_once(server.url, feed, format),
            )
    return results


def codec(count: int = 200_000) -> Table:
    message = Message(
        offset=-1,
        value=payload(1),
        headers=HEADERS,
        ackInbox="_INBOX.abcdefgh",
        correlationId="1f3a",
    )
    data, plain = encode(message), encode(message, crc=False)
    table = Table("codec, one message of 150 bytes with two headers", "messages/s")
    for name, call in (
        ("encode", lambda: encode(message)),
        ("encode, no checksum", lambda: encode(message, crc=False)),
        ("decode", lambda: decode_message(data)),
        ("decode, no checksum", lambda: decode_message(plain)),
    ):
        start = time.perf_counter()
        for _ in range(count):
            call()
        table.add_row(name, f"{count / (time.perf_counter() - start):,.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=8192, help="messages in flight")
    options = parser.parse_args()
    console = Console(width=150)
    console.print(codec())
    results = asyncio.run(throughput(options.events, options.rounds, options.window))
    console.print(results.table(["bare publish", "bare publish, acked"]))


if __name__ == "__main__":
    main()
