"""Lineage across instances: one drains the parent and another reads the child."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from feedapi_client import Batch, CursorStore, PartitionState
from feedapi_client.model import Position
from feedapi_client.testing import Publisher
from tests.sharing.helpers import Group, Numbers, Running, group, until

pytestmark = pytest.mark.anyio
Serve = Callable[..., Publisher]


class Gate:
    """Holds the batches of one partition back, before their effects."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.reached = anyio.Event()
        self.open = anyio.Event()

    async def __call__(self, batch: Batch) -> None:
        if batch.partition == self.partition and batch.events:
            self.reached.set()
            await self.open.wait()


async def stored(instances: Group, running: Running) -> dict[int, Position]:
    return await instances.store.load(running.consumer.key)


def at_least(instances: Group, total: int) -> bool:
    return instances.handled.total() >= total


def owner_of(partition: int, running: list[Running]) -> Running:
    return next(one for one in running if partition in one.reads)


def known(running: Running, partition: int, state: PartitionState) -> bool:
    found = running.consumer.status().partitions.get(partition)
    return found is not None and found.state is state


@pytest.mark.parametrize("count", [2, 3])
async def test_r04_a_child_elsewhere_waits_for_the_commit_of_its_parent(
    serve: Serve, shared_store: CursorStore, count: int
) -> None:
    publisher = serve(count, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    async with group(publisher, shared_store) as instances:
        running = [instances.start() for _ in range(count)]
        await instances.balanced(*running, partitions=count)
        gate = Gate(0)
        instances.before = gate
        numbers.publish(60)
        await until(gate.reached.is_set)
        children = publisher.split(0, method="starts-after")
        numbers.publish(60)
        others = [one for one in running if one is not owner_of(0, running)]
        for one in others:
            await until(partial(known, one, children[0], PartitionState.WAITING))
        # All that does not descend from partition 0 is handled meanwhile.
        free = set(publisher.open_partitions()) - set(children)
        expected = sum(len(publisher.payloads(id)) for id in free)
        await until(lambda: len([1 for p, _ in instances.effects if p in free]) >= expected)
        assert not [p for p, _ in instances.effects if p in children]
        gate.open.set()
        await until(lambda: instances.handled.total() >= 120)
        await instances.balanced(*running, partitions=count + 1)
        assert (await stored(instances, running[0]))[0].status == "drained"
    assert instances.handled == numbers.expected
    assert instances.in_order()


async def test_r09_a_transfer_waits_for_the_batch_in_flight_on_another_instance(
    serve: Serve, shared_store: CursorStore
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    async with group(publisher, shared_store) as instances:
        running = [instances.start() for _ in range(2)]
        await instances.balanced(*running, partitions=2)
        owner = owner_of(0, running)
        (other,) = [one for one in running if one is not owner]
        gate = Gate(0)
        instances.before = gate
        numbers.publish(40)
        await until(gate.reached.is_set)
        successors = publisher.split(0, method="cursor-from")
        numbers.publish(40)
        for successor in successors:
            for one in running:
                await until(partial(known, one, successor, PartitionState.WAITING))
        positions = await stored(instances, other)
        assert positions[0].status == "open"
        assert positions.keys().isdisjoint(successors)
        gate.open.set()
        await until(lambda: instances.handled.total() >= 80)
        await instances.balanced(*running, partitions=3)
        assert (await stored(instances, other))[0].status == "superseded"
    assert instances.handled == numbers.expected
    assert instances.in_order()


async def test_r09_a_merge_of_ancestors_of_two_instances(
    serve: Serve, shared_store: CursorStore
) -> None:
    """Nothing was committed of either, so that they stand at the same cursor: requests fail."""
    publisher = serve(2, page_size=10, checkpoint_every=5)
    publisher.fail(503, times=None)
    numbers = Numbers(publisher)
    async with group(publisher, shared_store) as instances:
        running = [instances.start() for _ in range(2)]
        await instances.balanced(*running, partitions=2)
        successor = publisher.merge([0, 1])
        numbers.publish(40)
        publisher.heal()
        await until(lambda: instances.handled.total() >= 40)
        await instances.balanced(*running, partitions=1)
        positions = await stored(instances, running[0])
        assert positions[0].status == positions[1].status == "superseded"
        assert positions[successor].status == "open"
    assert instances.handled == numbers.expected
    assert instances.in_order()
