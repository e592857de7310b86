"""R14 over real sockets: a partition that answers never waits for one that does not.

And a publisher that fails is neither asked nor logged without a bound.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.abc
import orjson
import pytest

from feedapi_client import FeedConsumer, FetchOptions, Limits, RetryPolicy
from feedapi_client.status import PartitionState
from tests.consumer.helpers import n_of, take, wait_until

pytestmark = pytest.mark.anyio

Send = Callable[[bytes], Any]
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
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


class Feed:
    """Partitions of which each answers in its own way. `bad` answers for all that are not healthy.

    A healthy partition `n` holds one event, whose number is `n`.
    """

    def __init__(self, partitions: int, healthy: set[int], *, stream: bool = False) -> None:
        self.partitions = partitions
        self.healthy = healthy
        self.stream = stream
        self.bad: Callable[[Send], Any] = hang
        self.asked: Counter[int] = Counter()
        self.url = ""

    async def handle(self, connection: anyio.abc.SocketStream) -> None:
        try:
            async with connection:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += await connection.receive()
                await self._answer(connection.send, received.split(b" ")[1].decode())
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass  # the consumer has ended the request

    async def _answer(self, send: Send, target: str) -> None:
        query = parse_qs(urlsplit(target).query)
        if "partition" not in query:
            ids = [{"id": str(id)} for id in range(self.partitions)]
            await send(HEAD + orjson.dumps({"partitions": ids, "stream": self.stream}))
            return
        partition = int(query["partition"][0])
        self.asked[partition] += 1
        if partition not in self.healthy:
            await self.bad(send)
        elif query["cursor"] == ["_first"]:
            await send(HEAD + b'{"event":{"n":%d}}\n{"cursor":"a"}\n' % partition)
        else:
            await send(HEAD + b'{"cursor":"a"}\n')


async def hang(send: Send) -> None:
    await anyio.sleep_forever()


async def trickle(send: Send) -> None:
    """A byte each 30 ms: no silence is ever long."""
    await send(HEAD + b'{"event":"')
    while True:
        await send(b"x")
        await anyio.sleep(0.03)


async def endless(send: Send) -> None:
    """A response without an end, with a checkpoint in each piece."""
    await send(HEAD)
    number = 0
    while True:
        number += 1
        await send(b'{"event":{"n":-1}}\n{"cursor":"c%d"}\n' % number)
        await anyio.sleep(0.01)


async def unavailable(send: Send) -> None:
    await send(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@asynccontextmanager
async def serving(feed: Feed) -> AsyncIterator[Feed]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=1024)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    feed.url = f"http://127.0.0.1:{port}/feed"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, feed.handle)
        yield feed
        tasks.cancel_scope.cancel()


def consumer_of(feed: Feed, **options: Any) -> FeedConsumer:
    return FeedConsumer(feed.url, **{"limits": LIMITS, "retry": RETRY, **options})


async def healthy_numbers(consumer: FeedConsumer, wanted: set[int]) -> None:
    """Read until each of the numbers came."""
    events, missing = aiter(consumer), set(wanted)
    while missing:
        missing.difference_update(n_of(await take(events)))


@pytest.mark.parametrize("bad", [hang, trickle, endless, unavailable])
async def test_r14_partitions_that_take_all_slots_give_them_back(
    bad: Callable[[Send], Any],
) -> None:
    """The healthy one comes behind as many bad ones as there are slots."""
    feed = Feed(9, healthy={8})
    feed.bad = bad
    async with serving(feed), consumer_of(feed) as consumer:
        await healthy_numbers(consumer, {8})
        # And it is polled on while the others go on as they are.
        before = feed.asked[8]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_on, consumer)
            await wait_until(lambda: feed.asked[8] >= before + 10)
            tasks.cancel_scope.cancel()
        # They are asked again.
        await wait_until(lambda: min(feed.asked[id] for id in range(8)) >= 1)


async def _read_on(consumer: FeedConsumer) -> None:
    async for _ in consumer:
        pass


@pytest.mark.slow
async def test_r14_hundreds_of_partitions_that_hang_at_the_start_are_passed_by() -> None:
    """By shorter and shorter turns, not by one `slot_timeout` for each 64 of them."""
    feed = Feed(401, healthy={400})
    slow = Limits(max_concurrent_fetches=64, slot_timeout=2, discovery_interval=3600)
    async with serving(feed), consumer_of(feed, limits=slow) as consumer:
        await healthy_numbers(consumer, {400})
        # Each partition was asked once: nobody who hung had a second turn before.
        assert max(feed.asked.values()) <= 2


async def test_r14_a_new_partition_is_read_beside_endless_streams() -> None:
    feed = Feed(8, healthy=set(), stream=True)
    feed.bad = endless
    fetch = FetchOptions(stream=True)
    async with serving(feed), consumer_of(feed, fetch=fetch) as consumer:
        await take(aiter(consumer))
        await wait_until(lambda: len(feed.asked) == 8)
        feed.partitions, feed.healthy = 9, {8}
        await healthy_numbers(consumer, {8})
        assert consumer.status()[0].state is not PartitionState.RETRYING, "a stream is no failure"


async def test_r14_nobody_is_interrupted_while_nobody_waits() -> None:
    feed = Feed(8, healthy=set())
    feed.bad = trickle
    async with serving(feed), consumer_of(feed) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(_read_on, consumer)
        await wait_until(lambda: len(feed.asked) == 8)
        await anyio.sleep(1.0)
        assert set(feed.asked.values()) == {1}
        tasks.cancel_scope.cancel()


async def test_r14_a_page_that_takes_longer_than_a_slot_arrives_in_the_end() -> None:
    """Each attempt may take twice as long as the one before."""

    async def slow_page(send: Send) -> None:
        await send(HEAD + b'{"event":{"n":0}}\n')
        await anyio.sleep(0.7)
        await send(b'{"cursor":"a"}\n')

    feed = Feed(30, healthy=set())
    feed.bad = slow_page
    async with serving(feed), consumer_of(feed) as consumer:
        events = aiter(consumer)
        assert n_of(await take(events, 3)) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("bad", [unavailable, hang])
async def test_r14_failures_are_logged_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture, bad: Callable[[Send], Any]
) -> None:
    """Of one partition, and of many together."""
    feed = Feed(30, healthy={0})
    feed.bad = bad
    with caplog.at_level(logging.INFO, "feedapi_client"):
        async with (
            serving(feed),
            consumer_of(feed) as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_read_on, consumer)
            await wait_until(lambda: feed.asked.total() >= 100)
            tasks.cancel_scope.cancel()
    ours = [each for each in caplog.records if each.name.startswith("feedapi_client.")]
    records = [record for record in ours if record.levelno >= logging.WARNING]
    assert 1 <= len(records) <= 10
