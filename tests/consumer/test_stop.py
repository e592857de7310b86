"""`FeedConsumer.stop`, with a grace period or without."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import (
    Batch,
    CommitOrderError,
    FeedConsumer,
    FeedKey,
    Position,
    Quarantine,
    Retry,
    Share,
)
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    consume,
    fill,
    n_of,
    numbers,
    wait_until,
)

pytestmark = pytest.mark.anyio

_LONG = 1000.0
_SHORT = 0.02


async def test_run_commits_what_is_finished_within_the_grace_period(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, [1])

    async def handle(batch: Batch) -> None:
        if batch.events:
            consumer.stop(grace=_LONG)
            await anyio.sleep(_SHORT)

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher, store=store) as consumer:
            await consumer.run(handle)
            assert not consumer.cut_short
    assert await store.cursors() == {0: end}


async def test_r05_handlers_are_cancelled_after_the_grace_period_and_nothing_is_committed(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [1])
    handled = []

    async def handle(batch: Batch) -> None:
        handled.append(batch)
        consumer.stop(grace=_SHORT)
        await anyio.sleep_forever()

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher, store=store) as consumer:
            await consumer.run(handle)
            assert consumer.cut_short
            (report,) = consumer.status().reports
    assert report.endswith("s is over: what is in flight is given up, partition 0")
    assert len(handled) == 1
    assert await store.cursors() == {0: "_first"}


@pytest.mark.parametrize("stops", ["while it pauses", "while it is handled"])
@pytest.mark.parametrize("then", ["raise", Quarantine()])
async def test_after_a_stop_a_failing_batch_is_not_tried_again(
    publisher: Publisher, store: RecordingStore, stops: str, then: Any
) -> None:
    fill(publisher, 5)
    calls = 0

    async def handle(_: Batch) -> None:
        nonlocal calls
        calls += 1
        if stops == "while it is handled":
            consumer.stop()
        raise ValueError("the service is down")

    policy = Retry(attempts=None, base_delay=1000, max_delay=1000, then=then)
    consumer = consume(publisher, store=store)
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: consumer.run(handle, on_failure=policy))
        if stops == "while it pauses":
            await wait_until(lambda: consumer.status()[0].handler_failures == 1)
            consumer.stop()
    assert calls == 1
    async with consume(publisher, store=store, follow=False) as consumer:
        assert n_of([event async for event in consumer]) == list(range(5))


async def test_after_a_stop_a_failed_save_of_what_is_handled_is_tried_again(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 5)
    failures = 0

    async def fail(positions: Any) -> None:
        nonlocal failures
        if failures < 2 and positions[0].cursor == publisher.end_cursor(0):
            failures += 1
            consumer.stop()
            raise ConnectionError

    store.before_save = fail
    async with consume(publisher, store=store) as consumer:
        await consumer.run(_nothing, on_failure=Retry(base_delay=0.001))
    assert failures == 2
    assert await store.cursors() == {0: publisher.end_cursor(0)}


async def _nothing(_: Batch) -> None:
    pass


async def test_an_iteration_that_was_cut_short_says_nothing_of_the_next_one(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, [1])

    async def hangs(batch: Batch) -> None:
        consumer.stop(grace=_SHORT)
        await anyio.sleep_forever()

    async def ends(batch: Batch) -> None:
        consumer.stop(grace=_LONG)

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher) as consumer:
            await consumer.run(hangs)
            assert consumer.cut_short
            await consumer.run(ends)
            assert not consumer.cut_short


async def test_another_stop_shortens_the_grace_period(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])

    async def handle(batch: Batch) -> None:
        consumer.stop(grace=_LONG)
        consumer.stop(grace=0)
        await anyio.sleep_forever()

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher) as consumer:
            await consumer.run(handle)
            assert consumer.cut_short


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_stop_can_be_called_from_a_callback_of_the_event_loop(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])

    async def handle(batch: Batch) -> None:
        asyncio.get_running_loop().call_soon(lambda: consumer.stop(grace=0))
        await anyio.sleep_forever()

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher) as consumer:
            await consumer.run(handle)
            assert consumer.cut_short


async def test_a_grace_period_ends_with_its_iteration(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    grace = 10 * _SHORT

    async def handle_the_last(batch: Batch) -> None:
        consumer.stop(grace=grace)

    async def handle_for_longer(batch: Batch) -> None:
        await anyio.sleep(2 * grace)
        consumer.stop(grace=_LONG)

    async with consume(publisher) as consumer:
        await consumer.run(handle_the_last)
        numbers(publisher, 0, [2])
        await consumer.run(handle_for_longer)
        assert not consumer.cut_short


async def test_stop_counts_while_the_next_iteration_begins(
    publisher: Publisher, store: RecordingStore
) -> None:
    async def handle(batch: Batch) -> None:
        raise AssertionError("nothing is to be handled")

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher, store=store) as consumer:
            consumer.stop()
            await consumer.run(handle)
            numbers(publisher, 0, [1])
            load = store.load

            async def stop_and_load(feed: FeedKey) -> dict[int, Position]:
                consumer.stop(grace=_LONG)
                return await load(feed)

            store.load = stop_and_load  # type: ignore[method-assign]
            await consumer.run(handle)
    assert not consumer.cut_short


@pytest.mark.parametrize("grace", [None, _LONG, 0.0])
@pytest.mark.parametrize("way", ["run", "loop"])
async def test_stop_ends_an_iteration_that_waits_for_its_first_discovery(
    publisher: Publisher, way: str, grace: float | None
) -> None:
    async def handle(batch: Batch) -> None:
        consumer.stop()

    async def stop_when_it_waits() -> None:
        await wait_until(lambda: len(publisher.requests) > 1)
        consumer.stop(grace=grace)

    async def iterate_again() -> None:
        if way == "run":
            await consumer.run(handle)
        else:
            async for _ in consumer.batches():
                raise AssertionError("there is nothing to read")

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
            await consumer.run(handle)
            publisher.clear_requests()
            publisher.fail(503, on="discovery", times=None)
            tasks.start_soon(stop_when_it_waits)
            await iterate_again()
            publisher.heal()
            numbers(publisher, 0, [1])
            handled: list[int] = []
            async for batch in consumer.batches():
                handled += n_of(batch.events)
                consumer.stop()
    assert handled == [1]
    assert not consumer.cut_short


async def test_stop_between_iterations_ends_the_next_one_and_no_other(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    handled = []

    async def handle(batch: Batch) -> None:
        handled.extend(n_of(batch.events))
        consumer.stop()

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher) as consumer:
            await consumer.run(handle)
            consumer.stop(grace=_LONG)
            numbers(publisher, 0, [2])
            await consumer.run(handle)
            assert handled == [1]
            await consumer.run(handle)
            assert handled == [1, 2]


@pytest.mark.parametrize("task", ["of the block", "another"])
async def test_a_loop_is_not_cancelled_and_can_not_commit_after_the_grace_period(
    publisher: Publisher, store: RecordingStore, task: str
) -> None:
    numbers(publisher, 0, [1])
    refused = anyio.Event()

    async def loop(consumer: FeedConsumer) -> None:
        async for batch in consumer.batches():
            consumer.stop(grace=_SHORT)
            await wait_until(lambda: consumer.cut_short)
            with pytest.raises(CommitOrderError):
                await batch.commit()
            refused.set()

    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
            if task == "another":
                tasks.start_soon(loop, consumer)
            else:
                await loop(consumer)
            await refused.wait()
    assert await store.cursors() == {0: "_first"}


async def test_a_save_that_began_is_finished_after_the_grace_period(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, [1])
    saving = False

    async def slowly(_: object) -> None:
        if saving:
            consumer.stop(grace=0)
            await wait_until(lambda: consumer.cut_short)

    async def handle(batch: Batch) -> None:
        nonlocal saving
        saving = True
        await batch.commit()

    store.before_save = slowly
    with anyio.fail_after(SAFETY_LIMIT):
        async with consume(publisher, store=store) as consumer:
            await consumer.run(handle)
    assert await store.cursors() == {0: end}


async def test_the_topology_is_that_of_the_last_discovery(publisher: Publisher) -> None:
    consumer = consume(publisher, lineage={})
    assert consumer.topology() == {}
    first, second = publisher.split(0)
    async with consumer:
        assert {id: p.starts_after for id, p in consumer.topology().items()} == {
            0: None,
            first: 0,
            second: 0,
        }


@pytest.mark.parametrize("waits_for", ["store", "feed", "leases"])
async def test_r20_a_stop_during_the_start_is_a_clean_end(
    publisher: Publisher, waits_for: str
) -> None:
    """Whatever it waits for. Nothing is delivered, and its leases are given back."""
    numbers(publisher, 0, [1])
    waiting, blocked = anyio.Event(), anyio.Event()

    class Slow(RecordingStore):
        async def load(self, feed: FeedKey) -> dict[int, Position]:
            if waits_for == "store":
                waiting.set()
                await blocked.wait()
            return await super().load(feed)

        async def put(self, feed: FeedKey, instance: str, leases: Any) -> set[int]:
            if waits_for == "leases" and all(lease.partition >= 0 for lease in leases):
                waiting.set()
                await blocked.wait()
            return await super().put(feed, instance, leases)

    if waits_for == "feed":
        publisher.fail(faults.Delay(SAFETY_LIMIT), times=None)
    store, delivered = Slow(), []
    share = Share(lease_seconds=SAFETY_LIMIT, rebalance_seconds=0.05)
    consumer = consume(publisher, store=store, share=share)

    async def stop() -> None:
        if waits_for == "feed":
            while not publisher.counters["discovery"]:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        else:
            await waiting.wait()
        consumer.stop()

    async def handle(batch: Batch) -> None:
        delivered.append(batch)

    with anyio.fail_after(SAFETY_LIMIT / 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            async with consumer:
                await consumer.run(handle)
    assert not delivered
    instances, leases = await store.look(consumer.key)
    assert not instances
    assert not any(lease.owner for lease in leases.values())
