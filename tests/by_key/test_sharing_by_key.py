"""`run_by_key` where several instances share a feed: hand-overs, lost leases, what is given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from feedapi_client import Event, FeedConsumer, MemoryCursorStore, Quarantine, Share
from feedapi_client.quarantine import operations
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.testing import Publisher
from tests.by_key.test_run_by_key import Application, drain, n_of_raw
from tests.consumer.helpers import (
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    rediscovered,
    wait_until,
)

pytestmark = pytest.mark.anyio

PATIENT = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=60)
HASTY = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=0.05)


def sharing(publisher: Publisher, store: Any, share: Share = PATIENT) -> FeedConsumer:
    return consume(publisher, store=store, share=share, limit={"max_batch_events": 5})


def reads(consumer: FeedConsumer) -> set[int]:
    status = consumer.status().partitions.values()
    return {p.partition for p in status if p.owner == consumer.instance}


def events(consumer: FeedConsumer) -> int:
    return consumer.status().events


async def test_r17_a_hand_over_waits_for_what_is_in_flight_and_repeats_nothing(
    serve: Callable[..., Publisher],
) -> None:
    publisher, store = serve(2, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 100, entities=10)
    application, other = Application(), Application()
    application.blocked["e0"] = application.blocked["e1"] = anyio.Event()
    first, second = sharing(publisher, store), sharing(publisher, store)
    async with first, second, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, first, application)
        await wait_until(lambda: len(application.payloads) == 80)
        tasks.start_soon(drain, second, other)
        await wait_until(
            lambda: "elsewhere" in {p.state for p in first.status().partitions.values()}
        )
        await rediscovered(publisher)
        assert reads(first) == {0, 1}
        application.blocked["e0"].set()
        await wait_until(lambda: len(reads(first)) == len(reads(second)) == 1)
        fill(publisher, 100, entities=10, start=100)
        await wait_until(lambda: len(application.payloads) + len(other.payloads) == 200)
        first.stop()
        second.stop()
    assert other.payloads
    assert_each_entity_in_order_and_once(application.payloads + other.payloads, publisher)


async def test_r17_a_hand_over_begins_nothing_that_need_not_be_begun(
    serve: Callable[..., Publisher],
) -> None:
    publisher, store = serve(2, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 200, entities=20)
    application, other = Application(), Application()
    gate = anyio.Event()
    application.blocked = {f"e{n}": gate for n in range(20)}
    first, second = sharing(publisher, store), sharing(publisher, store)
    async with first, second, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(first, application, max_concurrency=3))
        await wait_until(lambda: len(application.running) == 3 and events(first) == 200)
        tasks.start_soon(drain, second, other)
        await wait_until(
            lambda: "elsewhere" in {p.state for p in first.status().partitions.values()}
        )
        gate.set()
        await wait_until(lambda: len(application.payloads) + len(other.payloads) == 200)
        first.stop()
        second.stop()
    assert_each_entity_in_order_and_once(application.payloads + other.payloads, publisher)
    assert len(other.payloads) >= 90


async def _lose_one_and_get_it_back(serve: Callable[..., Publisher]) -> dict[str, Any]:
    """A partition is given away with an event that hangs, and comes back."""
    publisher, store = serve(2, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 100, entities=10)
    application, other = Application(), Application()
    gate = anyio.Event()
    application.blocked = {f"e{n}": gate for n in range(10)}
    first, second = sharing(publisher, store, HASTY), sharing(publisher, store, HASTY)
    async with first, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(first, application, max_in_flight=60))
        await wait_until(lambda: len(application.running) == 10)
        async with second, anyio.create_task_group() as beside:
            beside.start_soon(drain, second, other)
            await wait_until(lambda: len(other.payloads) in range(20, 81) and reads(second))
            (taken,) = reads(second)
            await wait_until(lambda: len(other.payloads) == len(publisher.payloads(taken)))
            # Nothing of what was lost is begun, although its handlers still hang.
            second.stop()
        await wait_until(lambda: reads(first) == {0, 1})
        fill(publisher, 100, entities=10, start=100)
        gate.set()
        await wait_until(lambda: {p["n"] for p in application.payloads} >= set(range(100, 200)))
        first.stop()
    seen = Counter(p["n"] for p in application.payloads + other.payloads)
    assert set(seen) == set(range(200))
    begun = [n for n in seen if seen[n] > 1]
    return {"repeated": begun, "application": application, "cursors": await positions(store)}


async def positions(store: MemoryCursorStore) -> dict[int, str]:
    (key,) = await store.feeds()
    return {p: position.cursor for p, position in (await store.load(key)).items()}


async def test_r17_lost_work_leaves_the_counts_and_its_queue(
    serve: Callable[..., Publisher],
) -> None:
    """What leaked in a peer until nothing was read, and a place that was still occupied."""
    found = await _lose_one_and_get_it_back(serve)
    # Only what was being handled when the lease was lost comes twice.
    assert len(found["repeated"]) <= 10
    for key in {f"e{n}" for n in range(10)}:
        numbers = found["application"].of(key)
        assert numbers == sorted(numbers)


async def test_r17_a_save_refused_after_a_lost_lease_is_not_remembered_as_done(
    serve: Callable[..., Publisher],
) -> None:
    """Another instance has advanced the partition while this one was paused."""
    publisher, store = serve(1, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 20)
    application = Application()
    gate = application.blocked["e0"] = anyio.Event()
    async with sharing(publisher, store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 16)
        (key,) = await store.feeds()
        position = (await store.load(key))[0]
        await store.save(key, {0: position.advance()})  # by whom the lease was not lost to
        gate.set()
        application.blocked.clear()
        await wait_until(lambda: all(len(application.of(f"e{n}")) >= 8 for n in range(1, 5)))
        fill(publisher, 5, start=20)
        await wait_until(lambda: all(application.of(f"e{n}")[-1] == 20 + n for n in range(5)))
        consumer.stop()
    # All was handled again from the stored position, in order, and then committed to the end.
    for n in range(5):
        assert application.of(f"e{n}")[-5:] == list(range(n, 25, 5))
    assert await positions(store) == {0: publisher.end_cursor(0)}


async def test_whole_key_holds_back_what_another_instance_put_aside(
    serve: Callable[..., Publisher],
) -> None:
    publisher, store = serve(1, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 10)
    quarantine = MemoryQuarantineStore()
    application, other = Application(), Application()

    async def fails(event: Event) -> None:
        if event.json()["n"] == 3:
            raise RuntimeError("poison")
        await application(event)

    policy = Quarantine(to=quarantine, whole_key=True)
    first, second = sharing(publisher, store), sharing(publisher, store)
    async with second, anyio.create_task_group() as tasks:
        async with first, anyio.create_task_group() as beside:
            beside.start_soon(lambda: drain(first, fails, on_failure=policy))
            await wait_until(lambda: reads(first) == {0})
            tasks.start_soon(lambda: drain(second, other, on_failure=policy))
            await wait_until(lambda: len(application.payloads) == 8)
            first.stop()
        await wait_until(lambda: reads(second) == {0})
        fill(publisher, 10, start=10)
        await wait_until(lambda: len(other.payloads) == 8)
        second.stop()
    kept = [n_of_raw(event.raw) async for event in operations.list_events(quarantine)]
    assert kept == [3, 8, 13, 18]
    assert other.of("e3") == []
