"""`run_by_key` where several instances share a feed: hand-overs, lost leases, what is given up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest

from feedapi_client import Event, FeedConsumer, FeedKey, FencedError, Quarantine, Share
from feedapi_client.quarantine import MemoryQuarantineStore, QuarantinedEvent
from feedapi_client.stores.done import Claim
from tests.by_key.helpers import Application, KeyFeed, drain, kept, number
from tests.consumer.helpers import Gate, RecordingStore, rediscovered, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

PATIENT = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=60)
HASTY = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=0.05)


def sharing(feed: KeyFeed, share: Share = PATIENT) -> FeedConsumer:
    return feed.consume(share=share, limit={"max_batch_events": 5})


def reads(consumer: FeedConsumer) -> set[int]:
    status = consumer.status().partitions.values()
    return {p.partition for p in status if p.owner == consumer.instance}


def events(consumer: FeedConsumer) -> int:
    return consumer.status().events


async def test_r17_a_hand_over_waits_for_what_is_in_flight_and_repeats_nothing() -> None:
    feed = KeyFeed(2)
    feed.fill(0, 100, entities=10)
    application, other = Application(), Application()
    application.blocked["e0"] = application.blocked["e1"] = anyio.Event()
    first, second = sharing(feed), sharing(feed)
    async with first, second, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, first, application)
        await wait_until(lambda: len(application.payloads) == 80)
        tasks.start_soon(drain, second, other)
        await wait_until(
            lambda: "elsewhere" in {p.state for p in first.status().partitions.values()}
        )
        await rediscovered(feed)
        assert reads(first) == {0, 1}
        application.blocked["e0"].set()
        await wait_until(lambda: len(reads(first)) == len(reads(second)) == 1)
        feed.fill(100, 200, entities=10)
        await wait_until(lambda: len(application.payloads) + len(other.payloads) == 200)
        first.stop()
        second.stop()
    assert other.payloads
    feed.check(application.payloads + other.payloads)


async def test_r17_a_hand_over_begins_nothing_that_need_not_be_begun() -> None:
    feed = KeyFeed(2)
    feed.fill(0, 200, entities=20)
    application, other = Application(), Application()
    gate = anyio.Event()
    application.blocked = {f"e{n}": gate for n in range(20)}
    first, second = sharing(feed), sharing(feed)
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
    feed.check(application.payloads + other.payloads)
    assert len(other.payloads) >= 90


async def test_r17_lost_work_leaves_the_counts_and_its_queue() -> None:
    """A partition is given away with an event that hangs, and comes back.

    What leaked in a peer until nothing was read, and a place that was still occupied.
    """
    feed = KeyFeed(2)
    feed.fill(0, 100, entities=10)
    application, other = Application(), Application()
    gate = anyio.Event()
    application.blocked = {f"e{n}": gate for n in range(10)}
    first, second = sharing(feed, HASTY), sharing(feed, HASTY)
    async with first, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(first, application, max_in_flight=60))
        await wait_until(lambda: len(application.running) == 10)
        async with second, anyio.create_task_group() as beside:
            beside.start_soon(drain, second, other)
            await wait_until(lambda: len(other.payloads) in range(20, 81) and reads(second))
            (taken,) = reads(second)
            await wait_until(lambda: len(other.payloads) == len(feed.payloads(taken)))
            # Nothing of what was lost is begun, although its handlers still hang.
            second.stop()
        await wait_until(lambda: reads(first) == {0, 1})
        feed.fill(100, 200, entities=10)
        gate.set()
        await wait_until(lambda: {p["n"] for p in application.payloads} >= set(range(100, 200)))
        first.stop()
    seen = Counter(p["n"] for p in application.payloads + other.payloads)
    assert set(seen) == set(range(200))
    # Only what was being handled when the lease was lost comes twice.
    assert len([n for n in seen if seen[n] > 1]) <= 10
    for key in application.blocked:
        numbers = application.of(key)
        assert numbers == sorted(numbers)


async def test_r17_a_save_refused_after_a_lost_lease_is_not_remembered_as_done() -> None:
    """Another instance has advanced the partition while this one was paused."""
    feed = KeyFeed()
    feed.fill(0, 20)
    application = Application()
    gate = application.blocked["e0"] = anyio.Event()
    async with sharing(feed) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 16)
        position = (await feed.store.positions())[0]
        # As somebody whom the lease was not lost to.
        await feed.store.save(consumer.key, {0: position.advance()})
        gate.set()
        application.blocked.clear()
        await wait_until(lambda: all(len(application.of(f"e{n}")) >= 8 for n in range(1, 5)))
        feed.fill(20, 25)
        await wait_until(lambda: all(application.of(f"e{n}")[-1] == 20 + n for n in range(5)))
        consumer.stop()
    # All was handled again from the stored position, in order, and then committed to the end.
    for n in range(5):
        assert application.of(f"e{n}")[-5:] == list(range(n, 25, 5))
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


class ReplacedStore(RecordingStore):
    """Renews no lease once it is away, and at last refuses a claim: another instance has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.refused = Gate()

    async def beat(self, *args: Any, **options: Any) -> bool:
        if self.away:
            await anyio.sleep_forever()
        return await super().beat(*args, **options)

    async def take_over(self, feed: FeedKey, partitions: Any, revision: int) -> Claim:
        if partitions[0] == 2:
            await self.refused.wait()
            raise FencedError("another revision is stored", feed=feed.url)
        return await super().take_over(feed, partitions, revision)


async def test_r17_a_stop_ends_in_order_where_all_leases_are_lost_while_it_saves() -> None:
    store, gate = ReplacedStore(), Gate()
    feed = KeyFeed(3, store=store, page_size=1000, checkpoint_every=10)
    for partition in range(3):
        feed.numbers(
            partition, *range(1000 * partition, 1000 * (partition + 1)), entity=f"e{partition}"
        )
    begun: set[int] = set()

    async def handle(event: Event) -> None:
        begun.add(number(event))
        if number(event) in (500, 1500):
            await gate.opened.wait()

    share = Share(lease_seconds=6, rebalance_seconds=0.05)
    async with feed.consume(share=share) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(consumer, handle, event_id=number))
        await wait_until(lambda: {500, 1500} <= begun)
        consumer.stop()
        save = store.hold(lambda positions: 0 in positions)
        gate.opened.set()
        await save.reached.wait()
        store.away = True
        await wait_until(lambda: "lost the leases" in str(consumer.status().reports))
        store.refused.opened.set()
        await anyio.sleep(1)
        save.opened.set()


class SlowQuarantineStore(MemoryQuarantineStore):
    async def page(self, *args: Any, **options: Any) -> list[QuarantinedEvent]:
        found = await super().page(*args, **options)
        await anyio.sleep(5 * len(found))
        return found


@pytest.mark.parametrize("kind", [MemoryQuarantineStore, SlowQuarantineStore])
async def test_whole_key_holds_back_what_another_instance_put_aside(
    kind: type[MemoryQuarantineStore],
) -> None:
    feed, quarantine = KeyFeed(), kind()
    application, other = Application(poison=[3]), Application()
    policy = Quarantine(to=quarantine, whole_key=True)
    first, second = sharing(feed), sharing(feed)
    async with second, anyio.create_task_group() as tasks:
        async with first, anyio.create_task_group() as beside:
            beside.start_soon(lambda: drain(first, application, on_failure=policy))
            await wait_until(lambda: reads(first) == {0})
            tasks.start_soon(lambda: drain(second, other, on_failure=policy))
            await rediscovered(feed)
            feed.fill(0, 10)  # when the second one has looked what is in quarantine
            await wait_until(lambda: len(application.payloads) == 8)
            first.stop()
        await wait_until(lambda: reads(second) == {0})
        feed.fill(10, 11)
        await anyio.sleep(1)  # the rest comes while it looks there again
        feed.fill(11, 20)
        await wait_until(lambda: len(other.payloads) == 8)
        second.stop()
    assert await kept(quarantine) == [3, 8, 13, 18]
    assert other.of("e3") == []


async def test_whole_key_holds_back_what_was_put_aside_while_the_partition_was_away() -> None:
    feed, quarantine = KeyFeed(2), MemoryQuarantineStore()
    application, other = Application(), Application()
    policy = Quarantine(to=quarantine, whole_key=True)
    first, second = sharing(feed), sharing(feed)
    feed.fill(0, 20, entities=10)

    async def handled(count: int) -> None:
        await wait_until(lambda: len(application.payloads) + len(other.payloads) == count)

    async with first, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(first, application, on_failure=policy))
        await handled(20)
        async with second, anyio.create_task_group() as beside:
            beside.start_soon(lambda: drain(second, other, on_failure=policy))
            await wait_until(lambda: len(reads(first)) == len(reads(second)) == 1)
            (taken,) = reads(second)
            feed.fill(20, 30, entities=10)  # the first one looks what is in quarantine
            await handled(30)
            poison = feed.payloads(taken)[-1]["n"] + 10
            other.poison = {poison}
            feed.fill(30, 40, entities=10)
            await handled(39)
            second.stop()
        await wait_until(lambda: reads(first) == {0, 1})
        feed.fill(40, 50, entities=10)
        await wait_until(lambda: first.status().events == 49 - len(other.payloads))
        await anyio.sleep(1)
        first.stop()
    assert await kept(quarantine) == [poison, poison + 10]
