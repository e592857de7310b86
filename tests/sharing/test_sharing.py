"""Several consumers of one feed: they divide it, and every event is handled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    CursorStore,
    FencedError,
    LeaseLostError,
    MemoryCursorStore,
    PartitionState,
    Share,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import consume
from tests.sharing.helpers import QUICK, Group, Numbers, group, until

pytestmark = pytest.mark.anyio


def at_least(instances: Group, total: int) -> bool:
    return instances.handled.total() >= total


Serve = Callable[..., Publisher]


async def test_who_joins_and_leaves_repeats_nothing(
    serve: Serve, shared_store: CursorStore
) -> None:
    publisher = serve(6, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(100)
    async with group(publisher, shared_store) as instances:
        first = instances.start()
        await instances.balanced(first, partitions=6)
        numbers.publish(100)
        second = instances.start()
        await instances.balanced(first, second, partitions=6)
        kept = first.reads
        numbers.publish(100)
        third = instances.start()
        await instances.balanced(first, second, third, partitions=6)
        assert first.reads < kept
        await instances.stop(first)
        numbers.publish(100)
        await instances.balanced(second, third, partitions=6)
        await until(lambda: instances.handled.total() >= 400)
    assert instances.handled == numbers.expected
    assert instances.in_order()


async def test_a_hand_over_waits_for_the_batch_in_flight(serve: Serve) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(20)
    busy, go_on = anyio.Event(), anyio.Event()

    async with group(publisher, MemoryCursorStore()) as instances:

        async def block(batch: Batch) -> None:
            if batch.events:
                busy.set()
                await go_on.wait()

        instances.before = block
        first = instances.start()
        await until(busy.is_set)
        await instances.balanced(first, partitions=2)
        second = instances.start()
        # It is known to the first one, which gives a partition away and waits for its batch.
        await until(lambda: PartitionState.ELSEWHERE in _states(first.consumer))
        assert first.reads == {0, 1}
        assert second.reads == set()
        go_on.set()
        await instances.balanced(first, second, partitions=2)
        await until(lambda: instances.handled.total() >= 20)
    assert instances.handled == numbers.expected


def _states(consumer: object) -> set[PartitionState]:
    return {p.state for p in consumer.status().partitions.values()}


async def test_a_hand_over_waits_no_longer_than_its_time(serve: Serve) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(20)
    never = anyio.Event()
    store = MemoryCursorStore()
    share = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=0.05)
    begun: set[int] = set()
    lost: list[LeaseLostError] = []
    stuck = consume(publisher, store=store, name="shared", share=share)

    async def handle(batch: Batch) -> None:
        begun.add(batch.partition)
        await never.wait()
        try:
            await batch.commit()
        except LeaseLostError as error:
            lost.append(error)
            raise

    async with group(publisher, store) as instances, anyio.create_task_group() as tasks, stuck:
        tasks.start_soon(stuck.run, handle)
        await until(lambda: begun == {0, 1})  # what is given away was begun, whichever it is
        other = instances.start(share=share)
        await until(lambda: len(other.reads) == 1)
        (taken,) = other.reads
        await until(lambda: {p for p, _ in instances.effects} == {taken})
        never.set()
        await until(lambda: lost)
        assert [error.partition for error in lost] == [taken]
        # Its iteration goes on: the other partition was committed.
        stuck.stop()


async def test_without_share_a_second_consumer_is_fenced_and_sharers_go_on(serve: Serve) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    store = MemoryCursorStore()
    async with group(publisher, store) as instances:
        sharing = instances.start()
        await instances.balanced(sharing, partitions=2)
        old = consume(publisher, store=store, name="shared")
        async with old:
            batches = old.batches()
            numbers.publish(20)
            batch = await anext(batches)
            await until(lambda: instances.handled.total() >= 20)
            with pytest.raises(FencedError) as caught:
                await batch.commit()
            assert type(caught.value) is FencedError
        numbers.publish(20)
        await until(lambda: instances.handled.total() >= 40)
        instances.check()
    assert instances.handled == numbers.expected


async def test_from_without_share_to_with_it_and_back(
    serve: Serve, shared_store: CursorStore
) -> None:
    publisher = serve(4, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    async with group(publisher, shared_store) as instances:
        for options in ({"share": None}, {}, {"share": None}):
            count = 1 if options else 3
            numbers.publish(50)
            running = [instances.start(**options) for _ in range(count)]
            total = numbers.published.total()
            await until(partial(at_least, instances, total))
            for one in running:
                await instances.stop(one)
    assert instances.handled == numbers.expected
    assert instances.in_order()


@pytest.mark.parametrize("way", ["batches", "events"])
async def test_r17_a_lost_lease_is_told_and_the_iteration_goes_on(serve: Serve, way: str) -> None:
    """Another instance advances the partition, as one does that claimed it after a pause."""
    publisher = serve(1, page_size=5, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(5)
    store, got = MemoryCursorStore(), 0
    async with consume(publisher, store=store, name="shared", share=QUICK) as consumer:

        async def advance() -> None:
            position = (await store.load(consumer.key))[0]
            await store.save(consumer.key, {0: position.advance(publisher.end_cursor(0))})
            numbers.publish(5)

        if way == "events":
            async for _ in consumer:
                got += 1
                if got == 5:
                    await advance()
                if got == 10:
                    break
            return
        async for batch in consumer.batches():
            got += len(batch.events)
            if got == 5:
                await advance()
                with pytest.raises(LeaseLostError, match="partition 0: the lease"):
                    await batch.commit()
            else:
                await batch.commit()
            if got == 10:
                break


def not_async(partitions: frozenset[int]) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lease_seconds": 10.0}, "Share"),
        ({"lease_seconds": 0.0}, "Share"),
        ({"rebalance_seconds": -1.0}, "Share"),
        ({"handover_seconds": -1.0}, "Share"),
        ({"instance": ""}, "Share"),
        ({"instance": "a" + chr(10)}, "Share"),
        ({"on_assigned": not_async}, "on_assigned must be an async function"),
        ({"on_release": "release"}, "on_release"),
        ({"leases": object()}, "object does not implement LeaseStore"),
    ],
)
async def test_what_can_not_work_is_refused_at_once(options: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        consume(Publisher(1), share=Share(**options))
