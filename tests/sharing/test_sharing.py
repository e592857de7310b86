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
from tests.leases import claims
from tests.sharing.helpers import QUICK, Group, Numbers, Running, group, until

pytestmark = pytest.mark.anyio


def at_least(instances: Group, total: int) -> bool:
    return instances.handled.total() >= total


def all_over(running: list[Running]) -> bool:
    return all(one.over for one in running)


Serve = Callable[..., Publisher]


async def test_three_instances_divide_the_partitions(
    serve: Serve, shared_store: CursorStore
) -> None:
    publisher = serve(8, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(200)
    async with group(publisher, shared_store) as instances:
        running = [instances.start() for _ in range(3)]
        await instances.balanced(*running, partitions=8)
        numbers.publish(200)
        await until(lambda: instances.handled.total() >= 400)
        for one in running:
            await instances.stop(one)
    assert instances.handled == numbers.expected
    assert instances.in_order()


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


async def test_status_names_the_owner(serve: Serve) -> None:
    publisher = serve(2)
    async with group(publisher, MemoryCursorStore()) as instances:
        one, two = instances.start(), instances.start()
        await instances.balanced(one, two, partitions=2)
        (mine,) = one.reads
        (other,) = two.reads
        status = one.consumer.status()
        assert status[mine].owner == one.name
        assert status[other].owner == two.name
        assert status[other].state is PartitionState.ELSEWHERE
        assert status[other].caught_up is None


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
    return {p.state for p in consumer.status().partitions.values()}  # type: ignore[attr-defined]


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


async def test_batches_raise_that_the_lease_is_lost_and_go_on(serve: Serve) -> None:
    """Another instance advances the partition, as one does that claimed it after a pause."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(10)
    store = MemoryCursorStore()
    got: list[object] = []
    consumer = consume(publisher, store=store, name="shared", share=QUICK)
    async with consumer:
        batches = consumer.batches()
        batch = await anext(batches)
        position = (await store.load(consumer.key))[0]
        await store.save(consumer.key, {0: position.advance(batch.cursor)})
        with pytest.raises(LeaseLostError, match="partition 0: the lease"):
            await batch.commit()
        numbers.publish(5)
        async for batch in batches:
            got += [event.json() for event in batch.events]
            await batch.commit()
            if len(got) >= 5:
                break
    assert len(got) == 5


async def test_events_go_on_after_a_lost_lease(serve: Serve) -> None:
    publisher = serve(1, page_size=5, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(5)
    store = MemoryCursorStore()
    got = 0
    async with consume(publisher, store=store, name="shared", share=QUICK) as consumer:
        async for event in consumer:
            got += 1
            if got == 5:
                position = (await store.load(consumer.key))[0]
                key = consumer.key
                await store.save(key, {0: position.advance(position.cursor)})
                numbers.publish(5)
            if got == 10:
                break
            assert event.partition == 0


async def test_a_killed_instance_is_replaced(serve: Serve, shared_store: CursorStore) -> None:
    """One that does not leave: its heartbeat expires."""
    publisher = serve(4, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(40)
    key = consume(publisher, name="shared").key
    async with group(publisher, shared_store) as instances:
        leases: Any = shared_store
        await leases.beat(key, "dead", 1000)
        assert len(await leases.put(key, "dead", claims("dead", dict.fromkeys(range(4), 0)))) == 4
        assert await leases.beat(key, "dead", 0.5)
        one = instances.start()
        await instances.balanced(one, partitions=4)
        await until(lambda: instances.handled.total() >= 40)
    assert instances.handled == numbers.expected


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


@pytest.mark.parametrize("ordered", [True, False])
async def test_without_follow_all_end_when_the_whole_feed_was_read(
    serve: Serve, shared_store: CursorStore, ordered: bool
) -> None:
    publisher = serve(5, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(100)
    publisher.split(0, method="starts-after")
    publisher.split(1, method="cursor-from")
    numbers.publish(100)
    async with group(publisher, shared_store) as instances:
        for expected in (200, 250):
            running = [instances.start(follow=False, ordered=ordered) for _ in range(3)]
            await until(partial(all_over, running))
            instances.check()
            assert instances.handled.total() == expected
            numbers.publish(250 - expected or 0)
    assert instances.handled == numbers.expected
    assert not ordered or instances.in_order()


async def test_a_store_without_leases_is_refused(serve: Serve) -> None:
    class Plain:
        async def load(self, feed: object) -> dict[int, object]:
            return {}

        async def save(
            self, feed: object, positions: object, *, transaction: object = None
        ) -> None:
            pass

    with pytest.raises(TypeError, match="Plain does not implement LeaseStore"):
        consume(serve(1), store=Plain(), share=Share())


@pytest.mark.parametrize(
    "options",
    [
        {"lease_seconds": 10.0},
        {"lease_seconds": 0.0},
        {"rebalance_seconds": -1.0},
        {"handover_seconds": -1.0},
        {"instance": ""},
        {"instance": "a" + chr(10)},
    ],
)
def test_options_that_can_not_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Share"):
        Share(**options)  # type: ignore[arg-type]
