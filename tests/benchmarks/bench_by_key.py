"""What handling by key costs: ``python -m tests.benchmarks --only by-key``.

One partition, 1,000 keys (the payloads' ``entity``). A handler that waits 10 ms, 100 at once, is
compared with the ideal of 10,000 events a second; one that does nothing with `async for`, in the
processor's time. Both loops decode each event once.
"""

from __future__ import annotations

import asyncio
import gc
import time

from feedapi_client import Event, FeedConsumer
from tests.benchmarks.results import Comparison
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

WAIT = 0.01
AT_ONCE = 100
KEYS = 1000


def _key(event: Event) -> object:
    return event.json()["amount"] % KEYS


async def _waiting(url: str) -> float:
    """Return the events a second of a handler that waits."""
    count = 0

    async def handle(_: Event) -> None:
        nonlocal count
        await asyncio.sleep(WAIT)
        count += 1

    async with FeedConsumer(url, follow=False) as consumer:
        started = time.perf_counter()
        await consumer.run_by_key(handle, key=_key, max_concurrency=AT_ONCE)
        return count / (time.perf_counter() - started)


async def _empty(url: str) -> float:
    """Return the events in a second of the processor's time of a handler that does nothing."""
    count = 0

    async def handle(_: Event) -> None:
        nonlocal count
        count += 1

    async with FeedConsumer(url, follow=False) as consumer:
        started = time.process_time()
        await consumer.run_by_key(handle, key=_key)
        return count / (time.process_time() - started)


async def _loop(url: str) -> float:
    """Return the same of a loop over events."""
    count = 0
    async with FeedConsumer(url, follow=False) as consumer:
        started = time.process_time()
        async for event in consumer:
            event.json()
            count += 1
        return count / (time.process_time() - started)


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare `run_by_key` with the ideal, and with `async for`."""
    empty: list[float] = []
    loop: list[float] = []
    waiting: list[float] = []
    with static_feed(events=sizes.pick(200_000, 2_000), in_thread=sizes.quick) as url:
        for turn in range(sizes.rounds + 1):
            for measured, found in ((_empty, empty), (_loop, loop)):
                gc.collect()
                speed = asyncio.run(measured(url))
                if turn or sizes.quick:
                    found.append(speed)
    with static_feed(events=sizes.pick(50_000, 2_000), in_thread=sizes.quick) as url:
        for _ in range(sizes.rounds):
            gc.collect()
            waiting.append(asyncio.run(_waiting(url)))
    ideal = AT_ONCE / WAIT
    return [
        Comparison(
            name="by key, a handler of 10 ms, 100 at once / ideal",
            unit="events/s",
            ours=waiting,
            theirs=[ideal] * len(waiting),
            bar=0.9,
        ),
        Comparison(
            name="by key, an empty handler / async for",
            unit="events/s",
            ours=empty,
            theirs=loop,
            bar=0.5,
        ),
    ]
