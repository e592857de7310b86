"""Lineage across instances: one drains the parent and another reads the child."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from feedapi_client import PartitionState
from feedapi_client.testing import Publisher
from tests.sharing.fleet import PAGES, Fleet, Gate, Member, fleet, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def divided(instances: Fleet, count: int) -> list[Member]:
    """Start as many instances as there are partitions."""
    members = [instances.start() for _ in range(count)]
    await instances.balanced(*members)
    return members


async def all_wait(members: Iterable[Member], *partitions: int) -> None:
    def wait() -> bool:
        found: list[Any] = [m.consumer.status().partitions for m in members]
        return all(
            p in each and each[p].state is PartitionState.WAITING
            for each in found
            for p in partitions
        )

    await until(wait)


@pytest.mark.parametrize("count", [2, 3])
async def test_r04_a_child_elsewhere_waits_for_the_commit_of_its_parent(count: int) -> None:
    publisher = Publisher(count, **PAGES)
    async with fleet(publisher) as instances:
        members = await divided(instances, count)
        instances.before = gate = Gate(0)
        instances.publish(60)
        await gate.reached.wait()
        children = publisher.split(0, method="starts-after")
        instances.publish(60)
        await all_wait([one for one in members if 0 not in one.reads], children[0])
        # All that does not descend from partition 0 is handled meanwhile.
        free = set(publisher.open_partitions()) - set(children)
        expected = sum(len(publisher.payloads(id)) for id in free)
        await until(lambda: len([1 for p, _ in instances.effects if p in free]) >= expected)
        assert not [p for p, _ in instances.effects if p in children]
        gate.open.set()
        await instances.done()
        await instances.balanced(*members)
        assert (await instances.stored())[0].status == "drained"


async def test_r09_a_transfer_waits_for_the_batch_in_flight_on_another_instance() -> None:
    publisher = Publisher(2, **PAGES)
    async with fleet(publisher) as instances:
        members = await divided(instances, 2)
        instances.before = gate = Gate(0)
        instances.publish(40)
        await gate.reached.wait()
        successors = publisher.split(0, method="cursor-from")
        instances.publish(40)
        await all_wait(members, *successors)
        positions = await instances.stored()
        assert positions[0].status == "open"
        assert positions.keys().isdisjoint(successors)
        gate.open.set()
        await instances.done()
        await instances.balanced(*members)
        assert (await instances.stored())[0].status == "superseded"


async def test_r09_a_merge_of_ancestors_of_two_instances() -> None:
    """Nothing was committed of either, so that they stand at the same cursor: requests fail."""
    publisher = Publisher(2, **PAGES)
    publisher.fail(503, times=None)
    async with fleet(publisher) as instances:
        await divided(instances, 2)
        successor = publisher.merge([0, 1])
        instances.publish(40)
        publisher.heal()
        await instances.done()
        await until(lambda: sorted(map(len, (m.reads for m in instances.members))) == [0, 1])
        positions = await instances.stored()
        assert [positions[p].status for p in (0, 1, successor)] == ["superseded"] * 2 + ["open"]
