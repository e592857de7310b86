"""The database is gone, a process is paused, a lease is lost: everything goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    LeaseLostError,
    MemoryCursorStore,
    RetryPolicy,
    Share,
    StoreError,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import SAFETY_LIMIT, consume
from tests.sharing.helpers import Numbers, group, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
Serve = Callable[..., Publisher]
BRIEF = Share(lease_seconds=0.3, rebalance_seconds=0.02, handover_seconds=5)
LEASE_OPERATIONS = ("look", "beat", "put")


class Cut:
    """The connection of one instance to the database of all."""

    def __init__(self, store: MemoryCursorStore) -> None:
        self.store = store
        self.leases_fail = self.loads_fail = False
        self.hangs = False
        self.error: Exception = StoreError("the connection is refused")
        self.calls = 0

    load: Any
    save: Any

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)
        if name == "load" and self.loads_fail:
            raise self.error
        if name not in LEASE_OPERATIONS:
            return operation

        async def guarded(*args: Any) -> Any:
            self.calls += 1
            while self.hangs:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            if self.leases_fail:
                raise self.error
            return await operation(*args)

        return guarded


# `isinstance(cut, LeaseStore)` looks the methods up on the class.
def _passed_on(name: str) -> property:
    return property(lambda cut: cut.__getattr__(name))


for _name in ("load", "save", "leave", *LEASE_OPERATIONS):
    setattr(Cut, _name, _passed_on(_name))


async def expired(store: MemoryCursorStore, consumer: Any) -> bool:
    return not any(
        found.alive
        for found in (await store.look(consumer.key)).instances
        if found.name == consumer.instance
    )


@pytest.mark.parametrize("how", ["refused", "driver's error", "hangs"])
async def test_an_outage_longer_than_a_lease_loses_and_repeats_nothing(
    serve: Serve, how: str
) -> None:
    publisher = serve(4, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    cut = Cut(MemoryCursorStore())
    async with group(publisher, cut) as instances:
        one, two = instances.start(share=BRIEF), instances.start(share=BRIEF)
        await instances.balanced(one, two, partitions=4)
        numbers.publish(40)
        await until(lambda: instances.handled.total() >= 40)
        cut.leases_fail, cut.hangs = how != "hangs", how == "hangs"
        if how == "driver's error":
            cut.error = OSError("what a store of one's own may let through")
        # Each stops by its own clock, whatever the database does.
        await until(lambda: not one.reads and not two.reads)
        numbers.publish(40)
        cut.leases_fail = cut.hangs = False
        await instances.balanced(one, two, partitions=4)
        await until(lambda: instances.handled.total() >= 80)
        instances.check()
    assert instances.handled == numbers.expected
    assert instances.in_order()


async def test_a_paused_process_cannot_commit_what_another_one_took_over(serve: Serve) -> None:
    """The handler runs on for longer than a lease, while the heartbeat does not get through."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(10)
    store = MemoryCursorStore()
    cut = Cut(store)
    paused = consume(publisher, store=cut, name="shared", share=BRIEF)
    in_flight, resumed, over = anyio.Event(), anyio.Event(), anyio.Event()
    refused: list[LeaseLostError] = []

    async def handle(batch: Batch) -> None:
        if not batch.events:
            return
        in_flight.set()
        await resumed.wait()
        try:
            await batch.commit()
        except LeaseLostError as error:
            refused.append(error)
            raise

    async def run() -> None:
        async with paused:
            await paused.run(handle)
        over.set()

    async with group(publisher, store) as instances, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(in_flight.is_set)
        cut.leases_fail = True
        other = instances.start(share=BRIEF)
        await until(lambda: instances.handled.total() >= 10)
        resumed.set()
        await until(lambda: refused)
        cut.leases_fail = False
        assert other.reads == {0}
        # It goes on: it is a member again, and takes over when the other one leaves.
        await instances.stop(other)
        numbers.publish(5)
        await until(lambda: paused.status().events > 10)
        paused.stop()
        await until(over.is_set)
    assert {error.partition for error in refused} == {0}


async def test_a_claim_whose_reply_was_lost_is_read_back(serve: Serve) -> None:
    publisher = serve(3, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(20)

    class Unsure(MemoryCursorStore):
        lost = 2

        async def put(self, feed: Any, instance: str, leases: Any) -> set[int]:
            put = await super().put(feed, instance, leases)
            if -1 not in put and self.lost:
                self.lost -= 1
                raise StoreError("the connection broke")
            return put

    async with group(publisher, Unsure()) as instances:
        one = instances.start()
        await instances.balanced(one, partitions=3)
        await until(lambda: instances.handled.total() >= 20)
    assert instances.handled == numbers.expected


async def test_a_claim_that_the_heartbeat_did_not_survive_counts_for_nothing(serve: Serve) -> None:
    """Its answer comes when another instance has claimed the same, after the heartbeat expired."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    answered = anyio.Event()

    class Late(Cut):
        async def put(self, *args: Any) -> set[int]:
            stored = await self.store.put(*args)
            if 0 in stored and not answered.is_set():
                self.leases_fail = True
                await answered.wait()
                self.leases_fail = False
            return stored

    share = Share(lease_seconds=1.5, rebalance_seconds=0.5, handover_seconds=5)
    store = MemoryCursorStore()
    cut = Late(store)
    async with group(publisher, store) as instances:
        one = instances.start(share=share, store=cut)
        await until(lambda: cut.leases_fail)
        two = instances.start(share=share)
        await until(lambda: two.reads)
        answered.set()
        for _ in range(20):
            numbers.publish(5)
            await anyio.sleep(0.1)
            assert not (one.reads and two.reads)
        await until(lambda: instances.handled.total() >= 100)
        instances.check()
    assert instances.handled == numbers.expected


async def test_a_lease_that_went_back_is_lost(serve: Serve) -> None:
    """A failover of Redis lost the last writes: another instance has the lease by the table."""
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    store = MemoryCursorStore()
    async with group(publisher, store) as instances:
        one, two = instances.start(), instances.start()
        await instances.balanced(one, two, partitions=2)
        (mine,) = one.reads
        went_back = "UPDATE feedapi_cursors_leases SET owner = ?, epoch = 0 WHERE partition_id = ?"
        store.database._connection.execute(went_back, (two.name, mine))
        await store.put(one.consumer.key, two.name, [])  # shows as a change
        # It was not claimed by the one that it names, which gives it back.
        with anyio.fail_after(SAFETY_LIMIT):
            while not (await store.look(one.consumer.key)).leases[mine].epoch:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        await instances.balanced(one, two, partitions=2)
        numbers.publish(20)
        await until(lambda: instances.handled.total() >= 20)
        instances.check()
    assert instances.handled == numbers.expected


async def test_a_discovery_that_the_database_prevented_is_made_as_soon_as_it_is_back(
    serve: Serve,
) -> None:
    """What was refused waits for it: with the longest pause of all after one failure."""
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    cut = Cut(MemoryCursorStore())
    patient = RetryPolicy(base_delay=0.01, max_delay=10_000, refused_for=10_000)
    async with group(publisher, cut) as instances:
        one = instances.start(share=BRIEF, retry=patient)
        await instances.balanced(one, partitions=2)
        cut.loads_fail = True
        publisher.split(0)  # with a new token, so that fetches are refused
        publisher.clear_requests()
        await until(lambda: [each.kind for each in publisher.requests].count("discovery") >= 3)
        cut.loads_fail = False
        numbers.publish(40)
        await until(lambda: instances.handled.total() >= 40)
        instances.check()
    assert instances.handled == numbers.expected
