"""`pause` and `resume`: nothing new is fetched or delivered; what is in flight can be committed."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import Batch, FetchOptions, PartitionState, PartitionWait
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    LocalFeed,
    Reader,
    consume,
    n_of,
    numbers,
    rediscovered,
    wait_until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def nothing_comes(reader: Reader, feed: Publisher, discoveries: int = 2) -> None:
    target = feed.counters["discovery"] + discoveries
    await reader.nothing_until(lambda: feed.counters["discovery"] >= target)


async def test_a_paused_partition_is_not_fetched_or_delivered_and_others_go_on() -> None:
    feed = LocalFeed(2)
    feed.numbers(0, 0)
    async with feed.open(limit={"stall_timeout": 0.2}) as reader:
        reader.consumer.pause(0)
        feed.numbers(1, 100)
        assert await reader.commit() == [100]
        await nothing_comes(reader, feed, 12)  # longer than something that stalls
        assert not feed.asked(0)
        status = reader.consumer.status()[0]
        assert (status.state, status.wait) == (PartitionState.PAUSED, PartitionWait.RESUME)
        assert reader.consumer.health().problems == ()
        assert reader.consumer.health().ready
        reader.consumer.resume(0)
        assert await reader.commit() == [0]
        feed.numbers(0, 1)
        assert await reader.commit() == [1]
        assert reader.consumer.status()[0].state is not PartitionState.PAUSED


async def test_what_is_in_flight_can_be_committed_and_what_is_buffered_waits() -> None:
    feed = LocalFeed()
    feed.numbers(0, *range(10))
    async with feed.open(limit={"max_batch_events": 5}) as reader:
        batch = await reader.batch()
        reader.consumer.pause()
        await batch.commit()
        await nothing_comes(reader, feed)
        assert (await feed.store.cursors())[0] == batch.cursor
        reader.consumer.resume()
        assert await reader.commit() == [*range(5, 10)]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_stream_that_is_open_is_ended_and_opened_again(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, fetch=FetchOptions(stream=True)) as consumer:
        reader = Reader(consumer)
        assert await reader.commit() == [0]
        await wait_until(lambda: publisher.in_flight == 1)
        consumer.pause(0)
        numbers(publisher, 0, [1])
        await nothing_comes(reader, publisher)
        consumer.resume(0)
        assert await reader.commit() == [1]


@pytest.mark.parametrize("pauses", ["while others wait", "before"])
async def test_r16_what_is_paused_keeps_no_room_that_others_need(pauses: str) -> None:
    """It is fetched again once it is resumed."""
    feed = LocalFeed(3, page_size=100)
    for partition in (0, 1):
        feed.numbers(partition, *range(1000 * partition, 1000 * partition + 400))
    async with feed.open(limit={"max_buffered_bytes": 40_000, "max_batch_events": 5}) as reader:
        first = await reader.batch()
        await wait_until(lambda: reader.consumer.status().buffered_bytes > 20_000)
        if pauses == "before":
            reader.consumer.pause(0, 1)
        feed.numbers(2, *range(2000, 2300))
        await rediscovered(feed)
        reader.consumer.pause(0, 1)
        await first.commit()
        got: list[int] = []
        while len(got) < 300:
            got += await reader.commit()
        assert got == list(range(2000, 2300))
        reader.consumer.resume()
        rest = n_of(first.events)
        while len(rest) < 800:
            rest += await reader.commit()
        assert sorted(rest) == [*range(400), *range(1000, 1400)]


async def test_all_are_paused_also_in_the_next_iteration_and_after_a_split() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    async with feed.open() as reader:
        reader.consumer.pause()
        await nothing_comes(reader, feed)
        first, _ = feed.split(0)
        feed.numbers(first, 1)
        again = Reader(reader.consumer)
        await nothing_comes(again, feed)
        reader.consumer.resume(0)
        assert await again.commit() == [0]
        await again.nothing_until(lambda: reader.state() == PartitionState.DRAINED)
        await nothing_comes(again, feed)
        assert reader.state(first) is PartitionState.PAUSED
        reader.consumer.resume()
        assert await again.commit() == [1]


async def test_run_and_run_by_key_pause_as_well() -> None:
    feed, handled = LocalFeed(), []
    feed.numbers(0, *range(10))

    async def by_batch(batch: Batch) -> None:
        handled.extend(n_of(batch.events))

    async def by_event(event: Any) -> None:
        handled.append(event.json()["n"])

    async with feed.running(by_batch) as reader:
        await wait_until(lambda: len(handled) == 10)
        reader.consumer.pause()
        feed.numbers(0, *range(10, 20))
        await rediscovered(feed)
        assert len(handled) == 10
    async with feed.consume(name="by key", start="last") as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: consumer.run_by_key(by_event, key=lambda _: 1))
                consumer.pause()
                feed.numbers(0, *range(20, 30))
                await rediscovered(feed)
                assert len(handled) == 10
                consumer.resume()
                await wait_until(lambda: len(handled) == 20)
                consumer.stop()


@pytest.mark.parametrize("wrong", [-1, "0", 40_000, None])
async def test_what_is_no_partition_is_refused(wrong: Any) -> None:
    async with LocalFeed().consume() as consumer:
        for change in (consumer.pause, consumer.resume):
            with pytest.raises((TypeError, ValueError), match="partitions' ids"):
                change(wrong)
