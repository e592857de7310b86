"""Polls a second of a feed where nothing happens, 64 at once, beside a bare httpx client.

``python -m tests.benchmarks --only idle``. nginx serves the feed. Each loop runs in a process of
its own, for some seconds after all partitions were found without events.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
from rich.console import Console

from feedapi_client import FeedConsumer, Limits
from tests import nginx
from tests.benchmarks.nginx_feed import IdleFeed, idle_feed, polls_served
from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes

CONCURRENCY = 64
PAIRS: list[tuple[tuple[str, str], tuple[str, str], float | None]] = [
    (("ours", "own"), ("bare", "httpx"), 4.0),
    (("ours", "httpx"), ("bare", "httpx"), None),
    (("ours", "aiohttp"), ("bare", "httpx"), None),
    (("bare", "aiohttp"), ("bare", "httpx"), None),
    (("ours", "http2"), ("bare", "http2"), None),
    (("ours", "http2"), ("bare", "httpx"), None),
]
"""Loop and transport, and what they are compared with. "own" is the library's default."""


@asynccontextmanager
async def bare(client: httpx.AsyncClient, url: str, partitions: int) -> AsyncIterator[None]:
    """Poll all partitions in turn within the block."""

    async def poll(first: int) -> None:
        while True:
            for partition in range(first, partitions, CONCURRENCY):
                query = {"token": "t", "partition": str(partition), "cursor": "c"}
                response = await client.get(f"{url}/events", params=query)
                assert b"cursor" in response.content

    tasks = [asyncio.create_task(poll(first)) for first in range(CONCURRENCY)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def ours(client: httpx.AsyncClient | None, url: str, partitions: int) -> AsyncIterator[None]:
    """Consume within the block. Every partition is due again at once."""
    limits = Limits(
        max_concurrent_fetches=CONCURRENCY,
        poll_interval=0.001,
        max_poll_interval=0.001,
        discovery_interval=600,
    )

    all_read = asyncio.Event()

    async def consume() -> None:
        first_answers = 0
        async for batch in consumer.batches():
            await batch.commit()
            first_answers += 1
            if first_answers == partitions:
                all_read.set()

    async with FeedConsumer(url, http=client, limits=limits) as consumer:
        task = asyncio.create_task(consume())
        await all_read.wait()
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def client_of(transport: str, certificate: str) -> httpx.AsyncClient:
    """Return a client with room for all polls at once."""
    pool = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    if transport == "aiohttp":
        from httpx_aiohttp import AiohttpTransport

        return httpx.AsyncClient(transport=AiohttpTransport(limits=pool))
    if transport == "http2":
        trust = ssl.create_default_context(cafile=certificate)
        return httpx.AsyncClient(http1=False, http2=True, verify=trust, limits=pool)
    return httpx.AsyncClient(limits=pool)


async def polls_a_second(
    loop: str, transport: str, feed: IdleFeed, partitions: int, seconds: float
) -> float:
    """Run one loop for that long, and return its polls, as nginx counts them, a second."""
    url = feed.secure_url if transport == "http2" else feed.url
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        client = None
        if (loop, transport) != ("ours", "own"):
            certificate = str(feed.certificate.path)
            client = await stack.enter_async_context(client_of(transport, certificate))
        if loop == "ours":
            await stack.enter_async_context(ours(client, url, partitions))
        else:
            assert client is not None
            await stack.enter_async_context(bare(client, url, partitions))
        await asyncio.sleep(seconds / 4)
        began, before = clock(), await asyncio.to_thread(polls_served, feed.url)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(polls_served, feed.url)
        return (after - before) / (clock() - began)


def measure(sizes: Sizes) -> list[Comparison]:
    """Measure the bar, and what other transports bring. Nothing without nginx."""
    if nginx.program() is None:
        Console(stderr=True).print("idle: nginx is not installed (apt-get install nginx-light)")
        return []
    partitions, seconds = sizes.pick(4096, 64), sizes.pick(8, 1) / 2
    results = []
    with idle_feed(partitions) as feed:

        def rate(loop: str, transport: str) -> Callable[[], float]:
            run = partial(polls_a_second, loop, transport, feed, partitions, seconds)
            return lambda: asyncio.run(run()) if sizes.quick else in_a_process(run)

        for ours, theirs, bar in PAIRS:
            name = f"idle polls, 64 at once: {' '.join(ours)} / {' '.join(theirs)}"
            pairs = in_turns(rate(*ours), rate(*theirs), rounds=sizes.rounds, title=name)
            results.append(
                Comparison(
                    name=name,
                    unit="1/s",
                    ours=[mine for mine, _ in pairs],
                    theirs=[other for _, other in pairs],
                    bar=bar,
                )
            )
    return results


def in_a_process(run: Callable[[], Coroutine[Any, Any, float]]) -> float:
    """Run a loop in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_here, run).result()


def run_here(run: Callable[[], Coroutine[Any, Any, float]]) -> float:
    """Run a loop in this process."""
    return asyncio.run(run())
