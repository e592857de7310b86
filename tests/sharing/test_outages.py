"""The database is gone, a process is paused, a lease is lost: everything goes on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import Batch, LeaseLostError, MemoryCursorStore, RetryPolicy, StoreError
from feedapi_client.testing import Publisher
from tests.sharing.fleet import BRIEF, PAGES, Cut, fleet, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


@pytest.mark.parametrize("how", ["refused", "driver's error", "hangs"])
async def test_an_outage_longer_than_a_lease_loses_and_repeats_nothing(how: str) -> None:
    async with fleet(Publisher(4, **PAGES)) as instances:
        instances.store = cut = instances.cut()
        one, two = instances.start(share=BRIEF), instances.start(share=BRIEF)
        await instances.balanced(one, two)
        instances.publish(40)
        await instances.done()
        if how == "hangs":
            cut.hangs = True
        elif how == "refused":
            cut.fail()
        else:
            cut.leases = OSError("what a store of one's own may let through")
        # Each stops by its own clock, whatever the database does.
        await until(lambda: not one.reads and not two.reads)
        instances.publish(40)
        cut.heal()
        await instances.balanced(one, two)
        await instances.done()


async def test_a_paused_process_cannot_commit_what_another_one_took_over() -> None:
    """The handler runs on for longer than a lease, while the heartbeat does not get through."""
    in_flight, resumed = anyio.Event(), anyio.Event()
    refused, later = list[int | None](), list[Any]()

    async def handle(batch: Batch) -> None:
        if refused:
            later.extend(batch.events)
        if not batch.events or refused:
            return
        in_flight.set()
        await resumed.wait()
        try:
            await batch.commit()
        except LeaseLostError as error:
            refused.append(error.partition)
            raise

    async with fleet(Publisher(1, **PAGES)) as instances:
        instances.publish(10)
        cut = instances.cut()
        paused = instances.start(handle, share=BRIEF, store=cut)
        await in_flight.wait()
        cut.fail()
        other = instances.start(share=BRIEF)
        await instances.done()
        resumed.set()
        await until(lambda: refused)
        cut.heal()
        assert other.reads == {0}
        # It goes on: it is a member again, and takes over when the other one leaves.
        await instances.stop(other)
        instances.publish(5)
        await until(lambda: len(later) == 5)
        await instances.stop(paused)
    assert refused == [0]


async def test_a_claim_whose_reply_was_lost_is_read_back() -> None:
    class Unsure(MemoryCursorStore):
        lost = 2

        async def put(self, feed: Any, instance: str, leases: Any) -> set[int]:
            put = await super().put(feed, instance, leases)
            if -1 not in put and self.lost:
                self.lost -= 1
                raise StoreError("the connection broke")
            return put

    async with fleet(Publisher(3, **PAGES)) as instances:
        instances.publish(20)
        instances.store = Unsure()
        await instances.balanced(instances.start())
        await instances.done()


async def test_a_claim_that_the_heartbeat_did_not_survive_counts_for_nothing() -> None:
    """Its answer comes when another instance has claimed the same, after the heartbeat expired."""
    answered = anyio.Event()

    class Late(Cut):
        async def put(self, *args: Any) -> set[int]:
            stored: set[int] = await self.store.put(*args)
            if 0 in stored and not answered.is_set():
                self.fail()
                await answered.wait()
                self.heal()
            return stored

    async with fleet(Publisher(1, **PAGES)) as instances:
        cut = Late(instances.store)
        one = instances.start(share=BRIEF, store=cut)
        await until(lambda: cut.leases)
        two = instances.start(share=BRIEF)
        await until(lambda: two.reads)
        answered.set()
        for _ in range(20):
            instances.publish(5)
            await anyio.sleep(1)
            assert not (one.reads and two.reads)
        await instances.done()


async def test_a_lease_that_went_back_is_lost() -> None:
    """A failover of Redis lost the last writes: another instance has the lease by the table."""
    async with fleet(Publisher(2, **PAGES)) as instances:
        one, two = instances.start(), instances.start()
        await instances.balanced(one, two)
        ((mine,), key) = one.reads, one.consumer.key
        went_back = "UPDATE feedapi_cursors_leases SET owner = ?, epoch = 0 WHERE partition_id = ?"
        instances.store.database._connection.execute(went_back, (two.name, mine))
        # It was not claimed by the one that it names, which gives it back.
        while not (await instances.store.look(key)).leases[mine].epoch:  # noqa: ASYNC110
            await anyio.sleep(1)
        await instances.balanced(one, two)
        instances.publish(20)
        await instances.done()


async def test_a_discovery_that_the_database_prevented_is_made_as_soon_as_it_is_back() -> None:
    """What was refused waits for it: with the longest pause of all after one failure."""
    publisher = Publisher(2, **PAGES)
    patient = RetryPolicy(base_delay=0.01, max_delay=10_000, refused_for=10_000)
    async with fleet(publisher) as instances:
        cut = instances.cut()
        await instances.balanced(instances.start(share=BRIEF, retry=patient, store=cut))
        cut.loads = StoreError("the connection is refused")
        publisher.split(0)  # with a new token, so that fetches are refused
        publisher.clear_requests()
        await until(lambda: [each.kind for each in publisher.requests].count("discovery") >= 3)
        cut.heal()
        instances.publish(40)
        began = anyio.current_time()
        await instances.done()
        assert anyio.current_time() - began < 60
