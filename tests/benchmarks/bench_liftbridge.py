"""Publisher and relay beside bare nats-py loops: ``python -m tests.benchmarks.bench_liftbridge``.

With ``--real`` the real broker acks, instead of a process that does nothing else. With
``--go`` go-liftbridge's PublishAsync is measured there, too; its program in
``tests/benchmarks/go_liftbridge`` is built first. Seven rounds of all of that:
``python -m tests.benchmarks.bench_liftbridge --real --go``.

All loops send the same payloads, in turns, and each round begins with another loop. The table has
medians, and the lowest and the highest figure of a round. One bare loop only publishes. The other
one waits for an ack of each message, as a publisher that loses nothing has to; it is the base of
the ratios. Neither bare loop decodes its acks; the others do.
Publisher and relay are measured with the fast path and with documented calls of nats-py only.
Client, NATS server and broker share the cores of the machine; the CPU time is the client's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import nats
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from feedapi_client import FeedConsumer, Limits
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Message,
    Relay,
    StreamCursorStore,
    encode,
)
from feedapi_client.liftbridge import message_publisher as publisher_module
from feedapi_client.liftbridge.envelope import decode_message
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import components
from tests.benchmarks.fast_broker import fast_broker
from tests.benchmarks.static_feed import payload, static_feed

PARTITIONS = 4
"""Of the feed. A relay waits for the acks of a batch before the partition's next one, and meanwhile
it publishes those of the others."""
STREAM = "bench"
GO = "go-liftbridge, PublishAsync"
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


async def documented_calls(loop: Callable[[], Awaitable[Measurement]]) -> Measurement:
    """Run a loop without the fast path."""
    with patch.object(publisher_module, "install_fast_path", lambda *_: None):
        return await loop()


Loop = Callable[[], Awaitable[Measurement]]


class Results:
    """The measurements of all rounds."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    async def measure(self, loops: Mapping[str, Loop], rounds: int) -> None:
        """Run all loops in each round. Each round begins with another one."""
        for number in range(rounds):
            names = list(loops)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                measured = await loops[name]()
                self.rates.setdefault(name, []).append(measured.events / measured.wall)
                self._cpu.setdefault(name, []).append(measured.cpu / measured.events * 1e6)

    def table(self, loops: Iterable[str], bases: list[str]) -> Table:
        rounds = len(self.rates[bases[0]])
        table = Table(
            "loop",
            "events/s",
            "from, to",
            "client CPU, us/event",
            *(f"of {base} (from, to)" for base in bases),
            title=f"acked publishing over NATS, medians of {rounds} rounds in turns",
        )
        for name in loops:
            rates = self.rates[name]
            table.add_row(
                name,
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}, {max(rates):,.0f}",
                f"{statistics.median(self._cpu[name]):.2f}",
                *(self._ratio(rates, self.rates[base]) for base in bases),
            )
        return table

    @staticmethod
    def _ratio(ours: list[float], theirs: list[float]) -> str:
        """Return the ratio of the medians, and the lowest and the highest one of a round."""
        each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        return f"{ratio:.2f} ({min(each):.2f}, {max(each):.2f})"


async def throughput(events: int, rounds: int, window: int) -> Table:
    payloads = [payload(number) for number in range(events)]
    with (
        NatsServer() as server,
        fast_broker(server.url, STREAM),
        static_feed(events=events // PARTITIONS, partitions=PARTITIONS) as feed,
    ):
        publish = partial(publisher_acked, server.url, payloads, window)
        relay = partial(relay_at_least_once, server.url, feed, window)
        loops: dict[str, Loop] = {
            "bare publish": partial(bare, server.url, payloads),
            "bare publish, acked": partial(bare_acked, server.url, payloads, window),
            "LiftbridgePublisher": publish,
            "LiftbridgePublisher, documented calls": partial(documented_calls, publish),
            "Relay, at least once": relay,
            "Relay, at least once, documented calls": partial(documented_calls, relay),
        }
        results = Results()
        await results.measure(loops, rounds)
    return results.table(loops, ["bare publish", "bare publish, acked"])


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


async def real_throughput(events: int, rounds: int, window: int, program: str | None) -> Table:
    """The same loops against the real broker."""
    payloads = [payload(number) for number in range(events)]
    with (
        NatsServer() as server,
        LiftbridgeServer(server.url) as broker,
        static_feed(events=events // PARTITIONS, partitions=PARTITIONS) as feed,
    ):
        async with LiftbridgeApi(broker.address) as api:
            await api.create_stream(STREAM)
        loops: dict[str, Loop] = {
            "bare publish, acked": partial(bare_acked, server.url, payloads, window),
            "LiftbridgePublisher": partial(publisher_acked, server.url, payloads, window),
            "Relay, at least once": partial(relay_at_least_once, server.url, feed, window),
        }
        for format in ("batch", "events"):
            loops[f"Relay, exactly once, {format}"] = partial(
                relay_to_ledger, server.url, broker.address, feed, format
            )
        if program is not None:
            loops[GO] = partial(go_acked, program, broker.address, payloads, window)
        results = Results()
        await results.measure(loops, rounds)
    return results.table(loops, ["bare publish, acked", *([GO] if program else [])])


@contextmanager
def go_program() -> Iterator[str]:
    """Build go-liftbridge's loop."""
    go = components.available("go")
    if go is None:
        raise SystemExit("--go needs Go")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "publish"))
        environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
        source = Path(__file__).parent / "go_liftbridge"
        subprocess.run([go, "build", "-o", program, "."], cwd=source, env=environment, check=True)
        yield program


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window", type=int, default=8192, help="messages in flight")
    parser.add_argument("--real", action="store_true", help="against the real broker")
    parser.add_argument("--go", action="store_true", help="go-liftbridge's loop; with --real")
    options = parser.parse_args()
    console = Console(width=180)
    if not options.real:
        console.print(codec())
        console.print(asyncio.run(throughput(options.events, options.rounds, options.window)))
        return
    components.require("liftbridge")
    with go_program() if options.go else nullcontext() as program:
        console.print(
            asyncio.run(real_throughput(options.events, options.rounds, options.window, program))
        )


if __name__ == "__main__":
    main()
