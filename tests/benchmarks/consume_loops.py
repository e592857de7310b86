"""The loops that are timed: one feed, read to its end. Each returns how many events it read.

Run as a program it times one of them: ``python tests/benchmarks/consume_loops.py LOOP URL`` prints
events per second of wall time and of processor time. The library is what PYTHONPATH says first, so
that two versions of it can be compared.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import orjson

from feedapi_client import FeedConsumer

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


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (batches_untouched, batches_raw, batches_json, events_json, v1_json)
}
"""Those of the library, by name."""


def main() -> None:
    """Time one loop."""
    name, url = sys.argv[1:]
    wall, processor = time.perf_counter(), time.process_time()
    count = asyncio.run(LOOPS[name](url))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(count / wall, count / processor)


if __name__ == "__main__":
    main()
