"""Publisher and relay beside bare nats-py loops: ``python -m tests.benchmarks.bench_liftbridge``.

With ``--real`` the real broker acks, instead of a fast stand-in in a process of its own. With
``--go PROGRAM`` go-liftbridge's PublishAsync is measured there, too; the program is built with
``go build -o PROGRAM .`` in ``tests/benchmarks/go_liftbridge``.

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

from feedapi_client import FeedConsumer, Limits
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgeGrpcPublisher,
    LiftbridgePublisher,
    Message,
    Relay,
    Stream,
    StreamCursorStore,
    encode,
)
from feedapi_client.liftbridge import publisher as publisher_module
from feedapi_client.liftbridge.envelope import decode_message
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.benchmarks.fast_broker import fast_broker
from tests.benchmarks.static_feed import payload, static_feed

PARTITIONS = 4
"""Of the feed. A relay waits for the acks of a batch before the partition's next one, and meanwhile
it publishes those of the others."""
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
        static_feed(events=events // PARTITIONS, partitions=PARTITIONS) as feed,
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


async def grpc_acked(address: str, payloads: list[bytes], window: int) -> Measurement:
    watch = Stopwatch()
    async with LiftbridgeGrpcPublisher(address, max_in_flight=window, ack_timeout=60) as publisher:
        await publisher.publish_many(STREAM, payloads, headers=HEADERS)
    return watch.stop(len(payloads))


async def go_acked(program: str, address: str, payloads: list[bytes], window: int) -> Measurement:
    """Let go-liftbridge publish as many messages of the same size. Its CPU time is not measured."""
    size = len(payloads[0])
    arguments = [program, address, STREAM, str(len(payloads)), str(size), str(window)]
    done = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await done.communicate()
    return Measurement(len(payloads), len(payloads) / float(out), 0)


async def relay_to_ledger(url: str, address: str, feed: str, format: str) -> Measurement:
    """Relay exactly once to a new stream of the real broker."""
    name = f"ledger-{time.time_ns()}"
    async with (
        LiftbridgePublisher(url, ack_timeout=60) as publisher,
        LiftbridgeApi(address) as api,
    ):
        await api.create_stream(name, concurrency_control=True)
        watch = Stopwatch()
        store = StreamCursorStore(publisher, api, name, format=format)
        limits = Limits(max_batch_bytes=500_000)
        async with FeedConsumer(feed, follow=False, store=store, limits=limits) as consumer:
            progress = await Relay(consumer, publisher).run()
        return watch.stop(progress.events)


async def real_throughput(events: int, rounds: int, window: int, program: str | None) -> Results:
    """The same loops against the real broker."""
    payloads = [payload(number) for number in range(events)]
    results = Results()
    with (
        NatsServer() as server,
        LiftbridgeServer(server.url) as broker,
        static_feed(events=events // PARTITIONS, partitions=PARTITIONS) as feed,
    ):
        async with LiftbridgeApi(broker.address) as api:
            await api.create_stream(STREAM)
        for _ in range(rounds):
            results.add("bare publish, acked", await bare_acked(server.url, payloads, window))
            published = await publisher_acked(server.url, payloads, window)
            results.add("LiftbridgePublisher", published)
            relayed = await relay_at_least_once(server.url, feed, window)
            results.add("Relay, at least once", relayed)
            for format in ("batch", "events"):
                relayed = await relay_to_ledger(server.url, broker.address, feed, format)
                results.add(f"Relay, exactly once, {format}", relayed)
            through_grpc = await grpc_acked(broker.address, payloads, window)
            results.add("LiftbridgeGrpcPublisher", through_grpc)
            if program is not None:
                measured = await go_acked(program, broker.address, payloads, window)
                results.add("go-liftbridge, PublishAsync", measured)
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
    parser.add_argument("--real", action="store_true", help="against the real broker")
    parser.add_argument("--go", metavar="PROGRAM", help="go-liftbridge's loop; with --real")
    options = parser.parse_args()
    console = Console(width=150)
    if options.real:
        measured = real_throughput(options.events, options.rounds, options.window, options.go)
        bases = ["bare publish, acked", *(["go-liftbridge, PublishAsync"] if options.go else [])]
        console.print(asyncio.run(measured).table(bases))
        return
    console.print(codec())
    results = asyncio.run(throughput(options.events, options.rounds, options.window))
    console.print(results.table(["bare publish", "bare publish, acked"]))


if __name__ == "__main__":
    main()
