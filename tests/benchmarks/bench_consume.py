"""The consumer beside a bare httpx loop, in one run: ``python -m tests.benchmarks.bench_consume``.

Rounds alternate between the two loops: a machine whose speed drifts favours neither. The ratio is
that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

import httpx
import msgspec
import orjson
from rich.console import Console
from rich.progress import track
from rich.table import Table

from feedapi_client import FeedConsumer
from tests.benchmarks.static_feed import static_feed

Loop = Callable[[str], Awaitable[int]]


class Line(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    cursor: str | None = None


async def bare_raw(url: str) -> int:
    """httpx and msgspec, nothing else. Events are counted; the last line holds the cursor."""
    decoder = msgspec.json.Decoder(Line)
    cursor, count = "_first", 0
    async with httpx.AsyncClient() as client:
        while True:
            response = await client.get(
                f"{url}/events", params={"token": "t", "partition": "0", "cursor": cursor}
            )
            lines = decoder.decode_lines(response.content)
            if len(lines) == 1:
                return count
            count += len(lines) - len(lines) // 101
            cursor = lines[-1].cursor or ""


async def bare_json(url: str) -> int:
    """httpx and orjson: every line is decoded."""
    cursor, count = "_first", 0
    async with httpx.AsyncClient() as client:
        while True:
            response = await client.get(
                f"{url}/events", params={"token": "t", "partition": "0", "cursor": cursor}
            )
            before, asked = count, cursor
            for line in response.content.splitlines():
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


async def batches_raw(url: str) -> int:
    async with FeedConsumer(url, follow=False) as consumer:
        count = 0
        async for batch in consumer.batches():
            for event in batch.events:
                event.raw  # noqa: B018
                count += 1
            await batch.commit()
    return count


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
    from zeroeventhub import Client, Cursor, Event

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


MEASURES: list[tuple[str, Loop, Loop, float | None]] = [
    ("batches(), payloads untouched / httpx + decode_lines", batches_untouched, bare_raw, 0.7),
    ("batches(), each .raw taken / httpx + decode_lines", batches_raw, bare_raw, None),
    ("batches(), each .json() / httpx + orjson.loads", batches_json, bare_json, 0.75),
    ("async for, each .json() / httpx + orjson.loads", events_json, bare_json, 0.5),
]


def timed(loop: Loop, url: str, events: int) -> float:
    started = time.perf_counter()
    count = asyncio.run(loop(url))
    seconds = time.perf_counter() - started
    assert count == events, (loop.__name__, count)
    return events / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    table = Table("measure", "ours, M events/s", "theirs, M events/s", "ratio", "bar")

    def measure(name: str, ours: Loop, theirs: Loop, bar: float | None, url: str) -> None:
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in track(range(options.rounds), description=name, transient=True):
            rates[0].append(timed(ours, url, options.events))
            rates[1].append(timed(theirs, url, options.events))
        us, them = (statistics.median(r) for r in rates)
        table.add_row(
            name,
            f"{us / 1e6:.3f}",
            f"{them / 1e6:.3f}",
            f"{us / them:.2f}",
            "" if bar is None else f">= {bar}",
        )

    with static_feed(events=options.events, page_size=options.page_size) as url:
        for name, ours, bare, bar in MEASURES:
            measure(name, ours, bare, bar, url)
    if find_spec("zeroeventhub"):
        with static_feed(dialect="v1", events=options.events, page_size=options.page_size) as url:
            measure("v1, decoded / zeroeventhub from PyPI", v1_json, zeroeventhub, 4, url)
    else:
        print("To compare with zeroeventhub: pip install --no-deps zeroeventhub")
    Console().print(table)


if __name__ == "__main__":
    main()
