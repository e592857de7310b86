"""Publisher and relay beside bare nats-py loops, and the envelope codec, in one run: ``python -m tests.benchmarks.bench_liftbridge``.

Two bare loops with the same payloads: one publishes them and does nothing else, one also has them acked and counts the acks, as a publisher that loses
nothing has to. Client, NATS server and broker share the machine's cores; the CPU column is the client process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial

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
from feedapi_client.liftbridge.envelope import decode_message
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer
from tests.benchmarks.fast_broker import fast_broker
from tests.benchmarks.static_feed import payload, static_feed

STREAM = "bench"
QUIET = "bench.quiet"
HEADERS = {"feedapi-partition": b"0", "feedapi-cursor": b"00000000000000000100"}

Loop = Callable[[], Awaitable[int]]


async def bare(url: str, payloads: list[bytes]) -> int:
    """nats-py and nothing else: fire and forget, and one flush at the end."""
    client = await nats.connect(url)
    for value in payloads:
        await client.publish(QUIET, value)
    await client.flush()
    await client.close()
    return len(payloads)


async def bare_acked(url: str, payloads: list[bytes], window: int) -> int:
    """nats-py, envelopes made beforehand, acks counted, at most `window` in flight."""
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
    start = time.perf_counter(), time.process_time()
    for i, envelope in enumerate(envelopes):
        while i - acked >= window:
            progress.clear()
            await progress.wait()
        await client.publish(STREAM, envelope)
    while acked < len(payloads):
        progress.clear()
        await progress.wait()
    bare_acked.spent = time.perf_counter() - start[0], time.process_time() - start[1]  # type: ignore[attr-defined]
    await client.close()
    return len(payloads)


async def publisher_acked(url: str, payloads: list[bytes], window: int) -> int:
    async with LiftbridgePublisher(url, max_in_flight=window, ack_timeout=60) as publisher:
        await publisher.publish_many(STREAM, payloads, headers=HEADERS)
    return len(payloads)


async def relay_acked(url: str, feed: str, window: int) -> int:
    async with (
        LiftbridgePublisher(url, max_in_flight=window, ack_timeout=60) as publisher,
        FeedConsumer(feed, follow=False) as consumer,
    ):
        return (await Relay(consumer, publisher, STREAM).run()).events


async def relay_once(url: str, feed: str, format: str) -> int:
    """Exactly once, against the stand-in: its own speed is the limit for single events."""
    async with LiftbridgeBroker(url, grpc=True) as broker:
        await broker.create_stream("once", concurrency_control=True)
        async with (
            LiftbridgePublisher(url, ack_timeout=60, max_message_bytes=None) as publisher,
            LiftbridgeApi(broker.address) as api,
        ):
            store = StreamCursorStore(publisher, api, Stream("once"), format=format)
            async with FeedConsumer(feed, follow=False, store=store) as consumer:
                return (await Relay(consumer, publisher).run()).events


class Measured:
    """Rates and CPU time for an event, a round at a time."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    async def round(self, name: str, loop: Loop) -> None:
        bare_acked.spent = None  # type: ignore[attr-defined]
        wall, cpu = time.perf_counter(), time.process_time()
        events = await loop()
        spent = bare_acked.spent or (time.perf_counter() - wall, time.process_time() - cpu)  # type: ignore[attr-defined]
        self.rates.setdefault(name, []).append(events / spent[0])
        self.cpu.setdefault(name, []).append(spent[1] / events * 1e6)

    def table(self, bases: list[str]) -> Table:
        table = Table(
            "loop",
            "events/s",
            "client CPU, us/event",
            *(f"of {base}" for base in bases),
            title="acked publishing over NATS, medians",
        )
        for name, rates in self.rates.items():
            rate = statistics.median(rates)
            ratios = [f"{rate / statistics.median(self.rates[base]):.2f}" for base in bases]
            table.add_row(name, f"{rate:,.0f}", f"{statistics.median(self.cpu[name]):.2f}", *ratios)
        return table


async def throughput(events: int, rounds: int, window: int) -> Measured:
    payloads = [payload(number) for number in range(events)]
    measured = Measured()
    with (
        NatsServer() as server,
        fast_broker(server.url, STREAM),
        static_feed(events=events) as feed,
    ):
        for _ in range(rounds):
            await measured.round("bare publish", lambda: bare(server.url, payloads))
            await measured.round(
                "bare publish, acked", lambda: bare_acked(server.url, payloads, window)
            )
            await measured.round(
                "LiftbridgePublisher", lambda: publisher_acked(server.url, payloads, window)
            )
            await measured.round(
                "Relay, at least once", lambda: relay_acked(server.url, feed, window)
            )
        for format in ("batch", "events"):
            await measured.round(
                f"Relay, exactly once, {format} (broker in the same process)",
                partial(relay_once, server.url, feed, format),
            )
    return measured


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
    measured = asyncio.run(throughput(options.events, options.rounds, options.window))
    console.print(measured.table(["bare publish", "bare publish, acked"]))


if __name__ == "__main__":
    main()
