"""`pause` and `resume`: nothing new is fetched or delivered; what is in flight can be committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, FetchOptions, PartitionState, PartitionWait
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    consume,
    n_of,
    next_batch,
    nothing_comes,
    numbers,
    rediscovered,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio


async def test_a_paused_partition_is_not_fetched_or_delivered_and_others_go_on(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, limit={"stall_timeout": 0.2}) as consumer:
        consumer.pause(0)
        events = aiter(consumer)
        numbers(publisher, 1, [100])
        assert n_of(await take(events)) == [100]
        async with nothing_comes(events):
            await rediscovered(publisher, 12)  # longer than something that stalls
            assert not [r for r in publisher.requests if r.kind == "fetch" and r.partition == 0]
            status = consumer.status()[0]
            assert (status.state, status.wait) == (PartitionState.PAUSED, PartitionWait.RESUME)
            assert consumer.health().problems == ()
            assert consumer.health().ready
        consumer.resume(0)
        assert n_of(await take(events)) == [0]
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]
        assert consumer.status()[0].state is not PartitionState.PAUSED


async def test_what_is_in_flight_can_be_committed_and_what_is_buffered_waits(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(10))
    limit = {"max_batch_events": 5}
    async with consume(publisher, store=store, limit=limit) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        consumer.pause()
        await batch.commit()
        async with nothing_comes(batches):
            await rediscovered(publisher)
        assert (await store.cursors())[0] == batch.cursor
        consumer.resume()
        assert n_of((await next_batch(batches)).events) == list(range(5, 10))


async def test_a_stream_that_is_open_is_ended_and_opened_again(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, fetch=FetchOptions(stream=True)) as consumer:
        events = aiter(consumer)
        assert n_of(await take(events)) == [0]
        await wait_until(lambda: publisher.in_flight == 1)
        consumer.pause(0)
        numbers(publisher, 0, [1])
        async with nothing_comes(events):
            await rediscovered(publisher)
        consumer.resume(0)
        assert n_of(await take(events)) == [1]


async def test_all_are_paused_also_in_the_next_iteration_and_after_a_split(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        consumer.pause()
        async with nothing_comes(consumer.batches()):
            await rediscovered(publisher)
        children = publisher.split(0)
        numbers(publisher, children[0], [1])
        events = aiter(consumer)
        async with nothing_comes(events):
            await rediscovered(publisher)
        consumer.resume(0)
        assert n_of(await take(events)) == [0]
        async with nothing_comes(events):
            await wait_until(lambda: consumer.status()[0].state is PartitionState.DRAINED)
            await rediscovered(publisher)
            assert consumer.status()[children[0]].state is PartitionState.PAUSED
        consumer.resume()
        assert n_of(await take(events)) == [1]


async def test_run_and_run_by_key_pause_as_well(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    handled: list[int] = []

    async def by_batch(batch: Batch) -> None:
        handled.extend(n_of(batch.events))

    async def by_event(event: Any) -> None:
        handled.append(event.json()["n"])

    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run, by_batch)
        await wait_until(lambda: len(handled) == 10)
        consumer.pause()
        numbers(publisher, 0, range(10, 20))
        await rediscovered(publisher)
        assert len(handled) == 10
        consumer.stop()
    async with consume(publisher, start="last") as consumer, anyio.create_task_group() as tasks:
        with anyio.fail_after(SAFETY_LIMIT):
            tasks.start_soon(lambda: consumer.run_by_key(by_event, key=lambda _: 1))
            consumer.pause()
            numbers(publisher, 0, range(20, 30))
            await rediscovered(publisher)
            assert len(handled) == 10
            consumer.resume()
            await wait_until(lambda: len(handled) == 20)
            consumer.stop()


@pytest.mark.parametrize("wrong", [-1, "0", 40_000, None])
async def test_what_is_no_partition_is_refused(publisher: Publisher, wrong: Any) -> None:
    async with consume(publisher) as consumer:
        for change in (consumer.pause, consumer.resume):
            with pytest.raises((TypeError, ValueError), match="partitions' ids"):
                change(wrong)
