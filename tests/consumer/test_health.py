"""Ready means that the consumer makes progress or is at the end. On virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, Event, FeedConsumer, FetchOptions, Health, ProblemName, Retry
from feedapi_client.testing import Publisher
from tests.testing.virtual_time import HOUR, asgi_client, run_in_virtual_time

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
RETRY = Retry(attempts=None, base_delay=0.2, max_delay=5.0)
Look = Callable[[FeedConsumer, Publisher], Awaitable[None]]


async def nothing(_: Batch) -> None:
    pass


def observe(
    look: Look, backend: str, *, partitions: int = 3, handle: Any = nothing, **options: Any
) -> None:
    """Consume a feed with an event in each partition, and look meanwhile."""

    async def test() -> None:
        publisher = Publisher(partitions)
        for partition in range(partitions):
            publisher.append(partition, {"n": partition})
        async with (
            asgi_client(publisher) as http,
            FeedConsumer("http://feed/feed", http=http, **options) as consumer,
            anyio.create_task_group() as tasks,
        ):

            async def run() -> None:
                await consumer.run(handle, on_failure=RETRY)

            tasks.start_soon(run)
            await anyio.sleep(30)
            await look(consumer, publisher)
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)


@BACKENDS
def test_not_ready_while_no_partition_was_answered_soundly_for_a_minute(backend: str) -> None:
    async def look(consumer: FeedConsumer, publisher: Publisher) -> None:
        assert consumer.health() == Health(live=True, ready=True)
        publisher.fail(503, times=None)
        await anyio.sleep(45)
        assert consumer.health().ready
        await anyio.sleep(30)
        assert not consumer.health().ready
        publisher.heal()
        await anyio.sleep(60)
        assert consumer.health() == Health(live=True, ready=True)

    observe(look, backend)


@BACKENDS
def test_ready_while_one_partition_is_answered_and_each_that_fails_is_counted(
    backend: str,
) -> None:
    async def look(consumer: FeedConsumer, publisher: Publisher) -> None:
        for partition in range(1, 12):
            publisher.fail(503, partition=partition, times=None)
        await anyio.sleep(120)
        health = consumer.health()
        assert health.ready
        assert [each.name for each in health.problems] == [ProblemName.FETCH_FAILING] * 11
        publisher.fail(503, partition=0, times=None)
        await anyio.sleep(120)
        assert not consumer.health().ready

    observe(look, backend, partitions=12)


@BACKENDS
def test_ready_while_the_application_is_busy_and_nothing_is_asked(backend: str) -> None:
    async def busy(_: Batch) -> None:
        await anyio.sleep(240)

    async def look(consumer: FeedConsumer, _: Publisher) -> None:
        await anyio.sleep(150)
        assert consumer.health() == Health(live=True, ready=True)

    observe(look, backend, handle=busy)


@BACKENDS
def test_ready_while_a_stream_is_held_open_and_another_partition_fails(backend: str) -> None:
    async def look(consumer: FeedConsumer, publisher: Publisher) -> None:
        publisher.fail(503, partition=1, times=None)
        for _ in range(40):
            await anyio.sleep(7)
            assert consumer.health().ready

    observe(look, backend, partitions=2, fetch=FetchOptions(stream=True))


class Handler:
    """Fails with the events of some partitions."""

    def __init__(self, *failing: int) -> None:
        self.failing = set(failing)

    async def __call__(self, batch: Batch) -> None:
        if batch.partition in self.failing:
            raise LookupError("no such account")


@BACKENDS
def test_not_ready_while_every_handler_fails(backend: str) -> None:
    handler = Handler(0, 1, 2)

    async def look(consumer: FeedConsumer, _: Publisher) -> None:
        assert not consumer.health().ready
        assert consumer.health().live
        handler.failing = {0}
        await anyio.sleep(30)
        assert consumer.health().ready
        assert [each.partition for each in consumer.health().problems] == [0]
        handler.failing = set()
        await anyio.sleep(30)
        assert consumer.health() == Health(live=True, ready=True)

    async def handle(batch: Batch) -> None:
        await handler(batch)

    observe(look, backend, handle=handle)


@BACKENDS
def test_ready_while_one_event_fails_and_others_are_handled(backend: str) -> None:
    handler = Handler(1)

    async def look(consumer: FeedConsumer, publisher: Publisher) -> None:
        publisher.append(0, {"n": 10})
        await anyio.sleep(HOUR / 4)
        assert consumer.health().ready
        handler.failing = {0, 1}
        publisher.append(0, {"n": 11})
        await anyio.sleep(30)
        assert not consumer.health().ready

    async def handle(batch: Batch) -> None:
        await handler(batch)

    observe(look, backend, handle=handle)


@BACKENDS
def test_by_key_one_key_that_fails_leaves_the_consumer_ready(backend: str) -> None:
    failing = {"bad"}

    async def handle(event: Event) -> None:
        if event.json()["key"] in failing:
            raise LookupError("no such account")

    async def test() -> None:
        publisher = Publisher()
        publisher.extend(0, [{"key": "bad"}, {"key": "good"}])
        async with (
            asgi_client(publisher) as http,
            FeedConsumer("http://feed/feed", http=http) as consumer,
            anyio.create_task_group() as tasks,
        ):

            async def run() -> None:
                await consumer.run_by_key(
                    handle, key=lambda event: event.json()["key"], on_failure=RETRY
                )

            tasks.start_soon(run)
            await anyio.sleep(30)
            publisher.append(0, {"key": "good"})
            await anyio.sleep(30)
            assert consumer.health().ready
            failing.add("good")
            publisher.append(0, {"key": "good"})
            await anyio.sleep(30)
            assert not consumer.health().ready, "every key fails"
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)
