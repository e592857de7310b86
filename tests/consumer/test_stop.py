"""`FeedConsumer.stop`, with a grace period or without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
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
from feedapi_client.testing import faults
from tests.consumer.helpers import SAFETY_LIMIT, LocalFeed, RecordingStore, n_of, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

LONG = 1000.0
SHORT = 0.02
Stop = Callable[[FeedConsumer], object]


def one_event() -> LocalFeed:
    feed = LocalFeed()
    feed.numbers(0, 1)
    return feed


async def handles(feed: LocalFeed, stop: Stop, seconds: float = float("inf")) -> FeedConsumer:
    """Run a handler that stops the consumer, and takes so long then."""

    async def handle(batch: Batch) -> None:
        if batch.events:
            stop(consumer)
            await anyio.sleep(seconds)

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer:
            await consumer.run(handle)
            return consumer


def call_soon(consumer: FeedConsumer) -> None:
    asyncio.get_running_loop().call_soon(lambda: consumer.stop(grace=0))


def stops_twice(consumer: FeedConsumer) -> None:
    consumer.stop(grace=LONG)
    consumer.stop(grace=0)


@pytest.mark.parametrize(
    ("stop", "seconds", "finished"),
    [
        pytest.param(lambda c: c.stop(grace=LONG), SHORT, True, id="within the grace period"),
        pytest.param(lambda c: c.stop(), SHORT, True, id="without one"),
        pytest.param(lambda c: c.stop(grace=SHORT), float("inf"), False, id="after it"),
        pytest.param(stops_twice, float("inf"), False, id="after another one, shortened"),
    ],
)
async def test_r05_handlers_are_cancelled_after_the_grace_period_and_commit_nothing(
    stop: Stop, seconds: float, finished: bool
) -> None:
    feed = one_event()
    consumer = await handles(feed, stop, seconds)
    assert consumer.cut_short is not finished
    assert await feed.store.cursors() == {0: feed.end_cursor(0) if finished else "_first"}
    over = "s is over: what is in flight is given up, partition 0"
    assert [r.endswith(over) for r in consumer.status().reports] == [True] * (not finished)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_stop_can_be_called_from_a_callback_of_the_event_loop() -> None:
    assert (await handles(one_event(), call_soon)).cut_short


@pytest.mark.parametrize("stops", ["while it pauses", "while it is handled"])
@pytest.mark.parametrize("then", ["raise", Quarantine()])
async def test_after_a_stop_a_failing_batch_is_not_tried_again(stops: str, then: Any) -> None:
    feed, calls = LocalFeed(), 0
    feed.fill(0, 5)

    async def handle(_: Batch) -> None:
        nonlocal calls
        calls += 1
        if stops == "while it is handled":
            consumer.stop()
        raise ValueError("the service is down")

    policy = Retry(attempts=None, base_delay=1000, max_delay=1000, then=then)
    consumer = feed.consume()
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: consumer.run(handle, on_failure=policy))
        if stops == "while it pauses":
            await wait_until(lambda: consumer.status()[0].handler_failures == 1)
            consumer.stop()
    assert calls == 1
    assert await feed.read() == [*range(5)]


async def nothing(_: Batch) -> None:
    """Handle a batch."""


async def test_after_a_stop_a_failed_save_of_what_is_handled_is_tried_again() -> None:
    feed, failures = one_event(), 0

    async def fail(positions: Any) -> None:
        nonlocal failures
        if failures < 2 and positions[0].cursor == feed.end_cursor(0):
            failures += 1
            consumer.stop()
            raise ConnectionError

    feed.store.before_save = fail
    async with feed.consume() as consumer:
        await consumer.run(nothing, on_failure=Retry(base_delay=0.001))
    assert failures == 2
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


async def test_an_iteration_that_was_cut_short_says_nothing_of_the_next_one() -> None:
    async def hangs(_: Batch) -> None:
        consumer.stop(grace=SHORT)
        await anyio.sleep_forever()

    async def ends(_: Batch) -> None:
        consumer.stop(grace=LONG)

    with anyio.fail_after(SAFETY_LIMIT):
        async with one_event().consume() as consumer:
            await consumer.run(hangs)
            assert consumer.cut_short
            await consumer.run(ends)
            assert not consumer.cut_short


async def test_a_grace_period_ends_handlers_that_outlive_a_failure() -> None:
    feed, hangs = LocalFeed(2), anyio.Event()
    feed.numbers(0, 1)

    async def handle(batch: Batch) -> None:
        if batch.events:
            hangs.set()
            await anyio.sleep_forever()

    async def fail(_: object) -> None:
        raise ConnectionError

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: consumer.run(handle, max_concurrency=1))
            await hangs.wait()
            feed.store.before_save = fail
            feed.split(1, 2, method="cursor-from")  # whose cursor can't be transferred
            await wait_until(lambda: not consumer.health().live)
            consumer.stop(grace=SHORT)
    assert consumer.cut_short


async def test_a_grace_period_ends_with_its_iteration() -> None:
    feed, grace = one_event(), 10 * SHORT

    async def handle_the_last(_: Batch) -> None:
        consumer.stop(grace=grace)

    async def handle_for_longer(_: Batch) -> None:
        await anyio.sleep(2 * grace)
        consumer.stop(grace=LONG)

    async with feed.consume() as consumer:
        await consumer.run(handle_the_last)
        feed.numbers(0, 2)
        await consumer.run(handle_for_longer)
        assert not consumer.cut_short


async def test_stop_counts_while_the_next_iteration_begins() -> None:
    feed = LocalFeed()

    async def handle(_: Batch) -> None:
        raise AssertionError("nothing is to be handled")

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer:
            consumer.stop()
            await consumer.run(handle)
            feed.numbers(0, 1)
            load = feed.store.load

            async def stop_and_load(key: FeedKey) -> dict[int, Position]:
                consumer.stop(grace=LONG)
                return await load(key)

            feed.store.load = stop_and_load  # type: ignore[method-assign]
            await consumer.run(handle)
    assert not consumer.cut_short


@pytest.mark.parametrize("grace", [None, LONG, 0.0])
@pytest.mark.parametrize("way", ["run", "loop"])
async def test_stop_ends_an_iteration_that_waits_for_its_first_discovery(
    way: str, grace: float | None
) -> None:
    feed, handled = LocalFeed(), []

    async def handle(batch: Batch) -> None:
        handled.extend(n_of(batch.events))
        consumer.stop()

    async def stop_when_it_waits() -> None:
        await wait_until(lambda: len(feed.requests) > 1)
        consumer.stop(grace=grace)

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer, anyio.create_task_group() as tasks:
            await consumer.run(handle)
            feed.clear_requests()
            feed.fail(503, on="discovery", times=None)
            tasks.start_soon(stop_when_it_waits)
            if way == "run":
                await consumer.run(handle)
            else:
                assert [batch async for batch in consumer.batches()] == []
            assert handled == []
            feed.heal()
            feed.numbers(0, 1)
            await consumer.run(handle)
    assert handled == [1]
    assert not consumer.cut_short


async def test_stop_between_iterations_ends_the_next_one_and_no_other() -> None:
    feed, handled = one_event(), []

    async def handle(batch: Batch) -> None:
        handled.extend(n_of(batch.events))
        consumer.stop()

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer:
            await consumer.run(handle)
            consumer.stop(grace=LONG)
            feed.numbers(0, 2)
            await consumer.run(handle)
            assert handled == [1]
            await consumer.run(handle)
            assert handled == [1, 2]


@pytest.mark.parametrize("task", ["of the block", "another"])
async def test_a_loop_is_not_cancelled_and_can_not_commit_after_the_grace_period(task: str) -> None:
    feed, refused = one_event(), anyio.Event()

    async def loop() -> None:
        async for batch in consumer.batches():
            consumer.stop(grace=SHORT)
            await wait_until(lambda: consumer.cut_short)
            with pytest.raises(CommitOrderError):
                await batch.commit()
            refused.set()

    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer, anyio.create_task_group() as tasks:
            if task == "another":
                tasks.start_soon(loop)
            else:
                await loop()
            await refused.wait()
    assert await feed.store.cursors() == {0: "_first"}


async def test_a_save_that_began_is_finished_after_the_grace_period() -> None:
    feed = one_event()

    async def slowly(saved: Any) -> None:
        if saved[0].replaces is not None:
            consumer.stop(grace=0)
            await wait_until(lambda: consumer.cut_short)

    feed.store.before_save = slowly
    with anyio.fail_after(SAFETY_LIMIT):
        async with feed.consume() as consumer:
            await consumer.run(lambda batch: batch.commit())
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


async def test_the_topology_is_that_of_the_last_discovery() -> None:
    feed = LocalFeed()
    consumer = feed.consume(lineage={})
    assert consumer.topology() == {}
    first, second = feed.split(0)
    async with consumer:
        parents = {id: p.starts_after for id, p in consumer.topology().items()}
        assert parents == {0: None, first: 0, second: 0}


class SlowStart(RecordingStore):
    """Waits in the operation that is named, and says so."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow, self.waiting = slow, False

    async def _wait_in(self, operation: str) -> None:
        if self.slow == operation:
            self.waiting = True
            await anyio.sleep_forever()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        await self._wait_in("store")
        return await super().load(feed)

    async def put(self, feed: FeedKey, instance: str, leases: Any) -> set[int]:
        if all(lease.partition >= 0 for lease in leases):
            await self._wait_in("leases")
        return await super().put(feed, instance, leases)


@pytest.mark.parametrize("waits_for", ["store", "feed", "leases"])
async def test_r20_a_stop_during_the_start_is_a_clean_end(waits_for: str) -> None:
    """Whatever it waits for. Nothing is delivered, and its leases are given back."""
    feed, delivered = LocalFeed(store=(store := SlowStart(waits_for))), []
    feed.numbers(0, 1)
    if waits_for == "feed":
        feed.fail(faults.Delay(SAFETY_LIMIT), times=None)
    share = Share(lease_seconds=SAFETY_LIMIT, rebalance_seconds=0.05)
    consumer = feed.consume(share=share)

    async def stop() -> None:
        await wait_until(lambda: store.waiting or (waits_for == "feed" and feed.requests))
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
