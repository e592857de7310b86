"""R14: a partition that answers never waits for one that does not. On virtual time.

And a publisher that fails is neither asked nor logged without a bound.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import FeedConsumer, FetchOptions, Limits, RetryPolicy
from feedapi_client.runtime.logs import RECORDS
from feedapi_client.status import PartitionState
from tests.consumer.helpers import n_of, take, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

Bad = Callable[[], Awaitable[httpx.Response]]
LIMITS = Limits(
    max_concurrent_fetches=8,
    slot_timeout=0.2,
    request_timeout=3600,
    stream_idle_timeout=3600,
    poll_interval=0.01,
    max_poll_interval=0.05,
    discovery_interval=0.1,
)
RETRY = RetryPolicy(base_delay=0.05, max_delay=0.2)


def line(n: int) -> bytes:
    return b'{"event":{"n":%d}}\n' % n


async def hang() -> httpx.Response:
    await anyio.sleep_forever()
    raise AssertionError


async def trickle() -> httpx.Response:
    """A byte each 30 ms: no silence is ever long."""

    async def body() -> AsyncIterator[bytes]:
        yield b'{"event":"'
        while True:
            yield b"x"
            await anyio.sleep(0.03)

    return httpx.Response(200, content=body())


async def endless() -> httpx.Response:
    """A response without an end, with a checkpoint in each piece."""

    async def body() -> AsyncIterator[bytes]:
        number = 0
        while True:
            number += 1
            yield line(-1) + b'{"cursor":"c%d"}\n' % number
            await anyio.sleep(0.01)

    return httpx.Response(200, content=body())


async def slow_page() -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        yield line(0)
        await anyio.sleep(0.7)
        yield b'{"cursor":"a"}\n'

    return httpx.Response(200, content=body())


async def unavailable() -> httpx.Response:
    return httpx.Response(503)


class Feed:
    """Partitions of which each answers in its own way. `bad` answers for all that are not healthy.

    A healthy partition `n` holds one event, whose number is `n`.
    """

    def __init__(self, partitions: int, healthy: set[int], bad: Bad, *, stream: bool = False):
        self.partitions = partitions
        self.healthy = healthy
        self.bad = bad
        self.stream = stream
        self.lists = True
        self.asked: Counter[int] = Counter()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.001)
        query = request.url.params
        if "partition" not in query:
            if not self.lists:
                return httpx.Response(503)
            ids = [{"id": str(id)} for id in range(self.partitions)]
            return httpx.Response(200, json={"partitions": ids, "stream": self.stream})
        partition = int(query["partition"])
        self.asked[partition] += 1
        if partition not in self.healthy:
            return await self.bad()
        event = line(partition) if query["cursor"] == "_first" else b""
        return httpx.Response(200, content=event + b'{"cursor":"a"}\n')

    def consumer(self, **options: Any) -> FeedConsumer:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self), timeout=None)
        options = {"limits": LIMITS, "retry": RETRY, "http": http, **options}
        return FeedConsumer("http://feed/feed", **options)

    @asynccontextmanager
    async def read_on(self, **options: Any) -> AsyncIterator[FeedConsumer]:
        async def read() -> None:
            async for _ in consumer:
                pass

        async with self.consumer(**options) as consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            yield consumer
            tasks.cancel_scope.cancel()


async def healthy_numbers(consumer: FeedConsumer, wanted: set[int]) -> None:
    """Read until each of the numbers came."""
    events, missing = aiter(consumer), set(wanted)
    while missing:
        missing.difference_update(n_of(await take(events)))


@pytest.mark.parametrize("bad", [hang, trickle, endless, unavailable])
async def test_r14_partitions_that_take_all_slots_give_them_back(bad: Bad) -> None:
    """The healthy one comes behind as many bad ones as there are slots, and is polled on."""
    feed = Feed(9, {8}, bad)
    async with feed.read_on():
        await wait_until(lambda: feed.asked[8] >= 10)
        await wait_until(lambda: min(feed.asked[id] for id in range(8)) >= 1)


async def test_r14_hundreds_of_partitions_that_hang_at_the_start_are_passed_by() -> None:
    """By shorter and shorter turns, not by one `slot_timeout` for each 64 of them."""
    feed = Feed(401, {400}, hang)
    slow = Limits(max_concurrent_fetches=64, slot_timeout=2, discovery_interval=3600)
    async with feed.consumer(limits=slow) as consumer:
        await healthy_numbers(consumer, {400})
        # Each partition was asked once: nobody who hung had a second turn before.
        assert max(feed.asked.values()) <= 2


async def test_r14_a_new_partition_is_read_beside_endless_streams() -> None:
    feed = Feed(8, set(), endless, stream=True)
    async with feed.consumer(fetch=FetchOptions(stream=True)) as consumer:
        await take(aiter(consumer))
        await wait_until(lambda: len(feed.asked) == 8)
        feed.partitions, feed.healthy = 9, {8}
        await healthy_numbers(consumer, {8})
        assert consumer.status()[0].state is not PartitionState.RETRYING, "a stream is no failure"


async def test_r14_nobody_is_interrupted_while_nobody_waits() -> None:
    feed = Feed(8, set(), trickle)
    async with feed.read_on():
        await wait_until(lambda: len(feed.asked) == 8)
        await anyio.sleep(1.0)
        assert set(feed.asked.values()) == {1}


async def test_r14_a_page_that_takes_longer_than_a_slot_arrives_in_the_end() -> None:
    """Each attempt may take twice as long as the one before."""
    async with Feed(30, set(), slow_page).consumer() as consumer:
        assert n_of(await take(aiter(consumer), 3)) == [0, 0, 0]


@pytest.mark.parametrize("bad", [unavailable, hang])
async def test_r14_failures_are_logged_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture, bad: Bad
) -> None:
    """Of one partition, and of many together; discovery has a record of its own."""
    feed, limits = Feed(30, {0}, bad), replace(LIMITS, report_interval=1.0)
    with caplog.at_level(logging.INFO, "feedapi_client"):
        async with feed.read_on(limits=limits):
            await wait_until(lambda: feed.asked.total() >= 100)
            caplog.clear()
            feed.lists = False
            began = feed.asked.total()
            await anyio.sleep(3.9)
            failed = feed.asked.total() - began
    ours = [each for each in caplog.records if each.name.startswith("feedapi_client.")]
    records = [each.getMessage() for each in ours if each.levelno >= logging.WARNING]
    assert sum("last good topology" in text for text in records) >= 3
    assert 1 <= len(records) <= 5 * (RECORDS + 1)
    if bad is unavailable:
        assert failed > 3 * len(records)
        assert any(re.search(r"\(\d+ failures before it were not logged\)", t) for t in records)
