"""Ready means that the consumer makes progress or is at the end. On virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, Event, FeedConsumer, FetchOptions, Health, ProblemName, Retry
from tests.consumer.helpers import LocalFeed
from tests.testing.virtual_time import HOUR, asgi_client

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
RETRY = Retry(attempts=None, base_delay=0.2, max_delay=5.0)
WELL = Health(live=True, ready=True)


class Handler:
    """Fails with the events of some partitions, or with some keys."""

    def __init__(self, *failing: object) -> None:
        self.failing = set(failing)
        self.busy = 0.0

    async def of_batch(self, batch: Batch) -> None:
        await anyio.sleep(self.busy)
        if batch.partition in self.failing:
            raise LookupError("no such account")

    async def of_event(self, event: Event) -> None:
        if event.json()["key"] in self.failing:
            raise LookupError("no such account")


@asynccontextmanager
async def observed(
    partitions: int = 3, handler: Handler | None = None, *, by_key: bool = False, **options: Any
) -> AsyncIterator[tuple[FeedConsumer, LocalFeed]]:
    """Consume a feed with an event in each partition for half a minute, and in the block."""
    feed, handler = LocalFeed(partitions), handler or Handler()
    for partition in range(partitions):
        feed.append(partition, {"n": partition, "key": "good" if partition else "bad"})
    consumer = FeedConsumer("http://feed/feed", http=asgi_client(feed), **options)

    async def run() -> None:
        if by_key:
            key = lambda event: event.json()["key"]  # noqa: E731
            await consumer.run_by_key(handler.of_event, key=key, on_failure=RETRY)
        else:
            await consumer.run(handler.of_batch, on_failure=RETRY)

    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.sleep(30)
        yield consumer, feed
        tasks.cancel_scope.cancel()


async def test_not_ready_while_no_partition_was_answered_soundly_for_a_minute() -> None:
    async with observed() as (consumer, feed):
        assert consumer.health() == WELL
        feed.fail(503, times=None)
        await anyio.sleep(45)
        assert consumer.health().ready
        await anyio.sleep(30)
        assert not consumer.health().ready
        feed.heal()
        await anyio.sleep(60)
        assert consumer.health() == WELL


async def test_ready_while_one_partition_is_answered_and_each_that_fails_is_counted() -> None:
    async with observed(12) as (consumer, feed):
        for partition in range(1, 12):
            feed.fail(503, partition=partition, times=None)
        await anyio.sleep(120)
        health = consumer.health()
        assert health.ready
        assert [each.name for each in health.problems] == [ProblemName.FETCH_FAILING] * 11
        feed.fail(503, partition=0, times=None)
        await anyio.sleep(120)
        assert not consumer.health().ready


async def test_ready_while_the_application_is_busy_and_nothing_is_asked() -> None:
    handler = Handler()
    handler.busy = 240
    async with observed(handler=handler) as (consumer, _):
        await anyio.sleep(150)
        assert consumer.health() == WELL


async def test_ready_while_a_stream_is_held_open_and_another_partition_fails() -> None:
    async with observed(2, fetch=FetchOptions(stream=True)) as (consumer, feed):
        feed.fail(503, partition=1, times=None)
        for _ in range(40):
            await anyio.sleep(7)
            assert consumer.health().ready


async def test_not_ready_while_every_handler_fails() -> None:
    handler = Handler(0, 1, 2)
    async with observed(handler=handler) as (consumer, _):
        assert consumer.health().live
        assert not consumer.health().ready
        handler.failing = {0}
        await anyio.sleep(30)
        assert consumer.health().ready
        assert [each.partition for each in consumer.health().problems] == [0]
        handler.failing = set()
        await anyio.sleep(30)
        assert consumer.health() == WELL


async def test_ready_while_one_event_fails_and_others_are_handled() -> None:
    handler = Handler(1)
    async with observed(handler=handler) as (consumer, feed):
        feed.append(0, {"n": 10})
        await anyio.sleep(HOUR / 4)
        assert consumer.health().ready
        handler.failing = {0, 1}
        feed.append(0, {"n": 11})
        await anyio.sleep(30)
        assert not consumer.health().ready


async def test_by_key_one_key_that_fails_leaves_the_consumer_ready() -> None:
    handler = Handler("bad")
    async with observed(2, handler, by_key=True) as (consumer, feed):
        feed.append(0, {"key": "good"})
        await anyio.sleep(30)
        assert consumer.health().ready
        handler.failing.add("good")
        feed.append(0, {"key": "good"})
        await anyio.sleep(30)
        assert not consumer.health().ready, "every key fails"
