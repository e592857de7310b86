"""What sharing costs: 10 instances on thousands of partitions, and nothing when nothing changes."""

from __future__ import annotations

import anyio.lowlevel
import pytest

from feedapi_client import FeedInfo, Partition, Position
from tests.sharing.coordinators import KEY, CountingStore, instance

pytestmark = pytest.mark.anyio


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ten_instances_on_thousands_of_partitions(anyio_backend: str) -> None:
    count, partitions = 10, 4_096
    store = CountingStore()
    info = FeedInfo("v2-draft", {id: Partition(id) for id in range(partitions)})
    await store.save(KEY, {id: Position("a") for id in range(partitions)})
    instances = [await instance(store, number, info) for number in range(count)]
    store.taken()
    for _ in range(2):  # the first round claims, the second one sees that all is divided
        for one in instances:
            await one._look()
    shares = [len(one._owned) for one in instances]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1
    started = store.taken()
    assert started["claim"] == count
    assert started["release"] == 0
    assert started["leases"] <= 2 * count
    assert started["load"] <= 3 * count
    for one in instances:
        await one._look()
        await one._membership._renew()
    assert store.taken() == {"instances": count, "renew": count}


async def test_a_change_is_read_once_by_each(anyio_backend: str) -> None:
    store = CountingStore()
    info = FeedInfo("v2-draft", {id: Partition(id) for id in range(6)})
    await store.save(KEY, {id: Position("a") for id in range(6)})
    instances = [await instance(store, number, info) for number in range(3)]
    for _ in range(2):
        for one in instances:
            await one._look()
    store.taken()
    await instances[2].leave()
    for _ in range(2):
        for one in instances[:2]:
            await one._look()
    assert [len(one._owned) for one in instances[:2]] == [3, 3]
    calls = store.taken()
    assert calls["claim"] == 2
    assert calls["leases"] <= 4
    for one in instances[:2]:
        await one._look()
    assert store.taken() == {"instances": 2}
    await anyio.lowlevel.checkpoint()
