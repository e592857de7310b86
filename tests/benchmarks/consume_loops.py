"""The loops that are timed: one feed, read to its end. Each returns how many events it read.

Run as a program it times one of them: ``python tests/benchmarks/consume_loops.py LOOP URL`` prints
events per second of wall time and of processor time. The library is what PYTHONPATH says first, so
that two versions of it can be compared.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import msgspec
import orjson
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from feedapi_client import Batch, FeedConsumer
from feedapi_client.telemetry import observe

try:  # here, so that its import, which takes half a second, is not a part of the time
    from zeroeventhub import Client, Cursor, Event

    PEER: Any = (Client, Cursor, Event)
except ImportError:
    PEER = None

Loop = Callable[[str], Coroutine[Any, Any, int]]


class Line(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    cursor: str | None = None


async def _complete_lines(client: httpx.AsyncClient, url: str, cursor: str) -> AsyncIterator[bytes]:
    """Yield the complete lines of a response as they come, chunk after chunk."""
    rest = b""
    parameters = {"token": "t", "partition": "0", "cursor": cursor}
    async with client.stream("GET", f"{url}/events", params=parameters) as response:
        async for chunk in response.aiter_bytes():
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            else:
                rest += chunk


async def bare_lines(url: str) -> int:
    """httpx and msgspec, which reads a response while it comes. No payload is taken out."""
    decoder = msgspec.json.Decoder(Line)
    cursor, count = "_first", 0
    async with httpx.AsyncClient() as client:
        while True:
            asked, before = cursor, count
            async for data in _complete_lines(client, url, cursor):
                for line in decoder.decode_lines(data):
                    if line.cursor is None:
                        count += 1
                    else:
                        cursor = line.cursor
            if (asked, before) == (cursor, count):
                return count


async def bare_raw(url: str) -> int:
    """`bare_lines`, and each payload as bytes."""
    decoder = msgspec.json.Decoder(Line)
    cursor, count = "_first", 0
    async with httpx.AsyncClient() as client:
        while True:
            asked, before = cursor, count
            async for data in _complete_lines(client, url, cursor):
                for line in decoder.decode_lines(data):
                    if line.cursor is None:
                        bytes(line.data)
                        count += 1
                    else:
                        cursor = line.cursor
            if (asked, before) == (cursor, count):
                return count


async def bare_json(url: str) -> int:
    """httpx and orjson: every line is decoded, while the response comes."""
    cursor, count = "_first", 0
    async with httpx.AsyncClient() as client:
        while True:
            before, asked = count, cursor
            async for data in _complete_lines(client, url, cursor):
                for line in data.splitlines():
                    record = orjson.loads(line)
                    if "data" in record:
                        count += 1
                    else:
                        cursor = record["cursor"]
            if count == before and cursor == asked:
                return count


async def batches_untouched(url: str) -> int:
    async with FeedConsumer(url, follow=False) as consumer:
        count = 0
        async for batch in consumer.batches():
            count += len(batch.events)
            await batch.commit()
    return count


async def _read_raw(consumer: FeedConsumer) -> int:
    count = 0
    async for batch in consumer.batches():
        for event in batch.events:
            event.raw  # noqa: B018
            count += 1
        await batch.commit()
    return count


async def batches_raw(url: str) -> int:
    async with FeedConsumer(url, follow=False) as consumer:
        return await _read_raw(consumer)


@asynccontextmanager
async def _observed(consumer: FeedConsumer, tracer: Any = None) -> AsyncIterator[None]:
    """Export metrics once a second.

    EXPORT_SECONDS is for a count of instructions, in which a second is something else.
    """
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    async def export() -> None:
        while True:
            await asyncio.sleep(float(os.environ.get("EXPORT_SECONDS", "1")))
            reader.get_metrics_data()

    exporting = asyncio.create_task(export())
    # Version 0.1.0 takes no tracer, and returns nothing that could be ended.
    traced = {} if tracer is None else {"tracer": tracer}
    with observe(consumer, provider.get_meter("bench"), **traced) or nullcontext():
        yield
    exporting.cancel()
    provider.shutdown()


async def batches_raw_observed(url: str) -> int:
    """`batches_raw` with metrics, and without a tracer."""
    async with FeedConsumer(url, follow=False) as consumer, _observed(consumer):
        return await _read_raw(consumer)


class _Nowhere(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


async def batches_raw_traced(url: str) -> int:
    """`batches_raw` with metrics and with traces, all of them sampled, exported to nowhere."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_Nowhere()))
    async with (
        FeedConsumer(url, follow=False) as consumer,
        _observed(consumer, provider.get_tracer("bench")),
    ):
        return await _read_raw(consumer)


def _monitored(consumer: FeedConsumer) -> Any:
    """Serve a monitor beside the consumer. Version 0.1.0 has none."""
    from feedapi_client.monitor import serve

    return serve(consumer, port=0)


async def batches_raw_monitored(url: str) -> int:
    """`batches_raw` beside a monitor that nobody asks."""
    consumer = FeedConsumer(url, follow=False)
    async with _monitored(consumer), consumer:
        return await _read_raw(consumer)


# Another process, as a browser and Prometheus are. It asks for each path that it is told.
_ASKING = """
import http.client, sys, urllib.parse
connection = http.client.HTTPConnection(urllib.parse.urlsplit(sys.argv[1]).netloc)
for line in sys.stdin:
    connection.request("GET", line.strip())
    response = connection.getresponse()
    assert response.status == 200 and response.read(), response.status
    print(line.strip(), flush=True)
"""
ASKED_EVERY = 10_000
"""Events. A live page asks every 2 s, far less often: this is for a count of instructions."""


async def _asked(url: str, path: str) -> int:
    consumer = FeedConsumer(url, follow=False)
    pipe = asyncio.subprocess.PIPE
    async with _monitored(consumer) as server, consumer:
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _ASKING, server.url, stdin=pipe, stdout=pipe
        )
        assert asking.stdin is not None
        assert asking.stdout is not None
        count, asked = 0, 0
        async for batch in consumer.batches():
            for event in batch.events:
                event.raw  # noqa: B018
                count += 1
            await batch.commit()
            while count >= asked + ASKED_EVERY:
                asked += ASKED_EVERY
                asking.stdin.write(f"{path}\n".encode())
                assert await asking.stdout.readline()
        asking.stdin.close()
        await asking.wait()
    return count


async def batches_raw_status(url: str) -> int:
    """`batches_raw` beside a monitor that is asked for its status, each 10,000 events."""
    return await _asked(url, "/status")


async def batches_raw_scraped(url: str) -> int:
    """`batches_raw` beside a monitor that Prometheus scrapes, each 10,000 events."""
    return await _asked(url, "/metrics")


async def _run_raw(consumer: FeedConsumer) -> int:
    count = 0

    async def handle(batch: Batch) -> None:
        nonlocal count
        for event in batch.events:
            event.raw  # noqa: B018
            count += 1

    await consumer.run(handle)
    return count


async def run_raw(url: str) -> int:
    """`batches_raw` with a handler, whose batches are committed when it returns."""
    async with FeedConsumer(url, follow=False) as consumer:
        return await _run_raw(consumer)


async def run_raw_observed(url: str) -> int:
    """`run_raw` with metrics, and without a tracer."""
    async with FeedConsumer(url, follow=False) as consumer, _observed(consumer):
        return await _run_raw(consumer)


async def run_raw_monitored(url: str) -> int:
    """`run_raw` beside a monitor that nobody asks."""
    consumer = FeedConsumer(url, follow=False)
    async with _monitored(consumer), consumer:
        return await _run_raw(consumer)


async def batches_json(url: str) -> int:
    async with FeedConsumer(url, follow=False) as consumer:
        count = 0
        async for batch in consumer.batches():
            for event in batch.events:
                event.json()
                count += 1
            await batch.commit()
    return count


async def events_json(url: str) -> int:
    async with FeedConsumer(url, follow=False) as consumer:
        count = 0
        async for event in consumer:
            event.json()
            count += 1
    return count


async def sync_batches_json(url: str) -> int:
    """`batches_json` without async. It is in a coroutine only to be called like the others."""
    from feedapi_client import SyncFeedConsumer  # not in older versions

    with SyncFeedConsumer(url, follow=False) as consumer:
        count = 0
        for batch in consumer.batches():
            for event in batch.events:
                event.json()
                count += 1
            batch.commit()
    return count


async def sync_events_json(url: str) -> int:
    """`events_json` without async."""
    from feedapi_client import SyncFeedConsumer  # not in older versions

    with SyncFeedConsumer(url, follow=False) as consumer:
        count = 0
        for event in consumer:
            event.json()
            count += 1
    return count


async def v1_json(url: str) -> int:
    async with FeedConsumer(url, follow=False, v1_partitions=1) as consumer:
        count = 0
        async for batch in consumer.batches():
            for event in batch.events:
                event.json()
                count += 1
            await batch.commit()
    return count


async def zeroeventhub(url: str) -> int:
    """The v1 client from PyPI, which decodes every payload."""
    Client, Cursor, Event = PEER  # noqa: N806
    cursor, count = Cursor(0, "_first"), 0
    async with httpx.AsyncClient() as http:
        client = Client(url, 1, http)
        while True:
            before = count
            async for item in client.fetch_events([cursor]):
                if isinstance(item, Event):
                    count += 1
                else:
                    cursor = item
            if count == before:
                return count


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        batches_untouched,
        batches_raw,
        batches_raw_observed,
        batches_raw_traced,
        batches_raw_monitored,
        batches_raw_status,
        batches_raw_scraped,
        run_raw,
        run_raw_observed,
        run_raw_monitored,
        batches_json,
        events_json,
        sync_batches_json,
        sync_events_json,
        v1_json,
    )
}
"""Those of the library, by name."""

NEWER = frozenset(
    {
        "batches_raw_traced",
        "batches_raw_monitored",
        "batches_raw_status",
        "batches_raw_scraped",
        "run_raw_monitored",
        "sync_batches_json",
        "sync_events_json",
    }
)
"""Those that version 0.1.0 can't run."""

OTHERS: dict[str, Loop] = {
    loop.__name__: loop for loop in (bare_lines, bare_raw, bare_json, zeroeventhub)
}
"""Those that the library is compared with."""


def main() -> None:
    """Time one loop.

    TIME_SCALE is for a count of instructions, under which a program runs many times slower: what
    the library does for some milliseconds then takes so many times as long, which makes batches as
    large as they are without.
    """
    name, url = sys.argv[1:]
    scale = float(os.environ.get("TIME_SCALE", "1"))
    if scale != 1:
        from feedapi_client.runtime import delivery, fetching

        delivery.TURN_SECONDS *= scale
        fetching.DELIVERY_SECONDS *= scale
    wall, processor = time.perf_counter(), time.process_time()
    count = asyncio.run((LOOPS | OTHERS)[name](url))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(count / wall, count / processor)


if __name__ == "__main__":
    main()
