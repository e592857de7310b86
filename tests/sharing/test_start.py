"""What reaches the publisher and the database when many instances start at once. Counted, on
virtual time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import anyio
import pytest

from feedapi_client import Limits, MemoryCursorStore, Share
from feedapi_client.testing import Publisher, faults
from tests.sharing.fleet import Fleet, Member, fleet, publish, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

INSTANCES, PARTITIONS = 10, 20
NO_INTERVAL = Limits(discovery_interval=86_400, poll_interval=10, max_poll_interval=60)
"""So that each discovery has another reason, and polls cost the test little."""


def asked_for_ends(publisher: Publisher) -> int:
    return sum(request.cursor == "_last" for request in publisher.requests)


@pytest.mark.parametrize("start", ["first", "last"])
async def test_ten_instances_that_start_at_once_ask_for_everything_once(start: str) -> None:
    publisher = Publisher(PARTITIONS)
    async with fleet(publisher) as instances:
        all = [instances.start(start=start, limits=NO_INTERVAL) for _ in range(INSTANCES)]
        await instances.balanced(*all)
        assert publisher.counters["discovery"] == INSTANCES
        assert asked_for_ends(publisher) == (PARTITIONS if start == "last" else 0)
        calls = instances.store.taken()
        # The one that saves the first positions joins and claims for that alone.
        assert calls["join"] == INSTANCES + 1
        assert calls["claim"] <= INSTANCES + 1
        assert calls["release"] == 0, "each claims its share only"
        assert max(calls["load"], calls["look"]) <= 10 * INSTANCES


async def test_those_that_wait_for_the_first_positions_write_nothing() -> None:
    """The ends take longer than a lease: one asks for them, and keeps its heartbeat."""
    publisher = Publisher(PARTITIONS)
    publisher.fail(faults.Delay(100.0), times=None)
    share = Share(lease_seconds=15)
    async with fleet(publisher) as instances:
        limits = replace(NO_INTERVAL, request_timeout=300)
        options = {"start": "last", "share": share, "limits": limits}
        all = [instances.start(**options) for _ in range(INSTANCES)]
        await until(lambda: asked_for_ends(publisher) == PARTITIONS)
        publisher.heal()
        instances.store.taken()
        await anyio.sleep(90)
        waiting = instances.store.taken()
        assert waiting.keys() <= {"load", "leases", "look", "beat"}
        assert waiting["beat"] <= 90 / 15 * 5, "of one instance"
        assert waiting["load"] <= 40 * INSTANCES
        await instances.balanced(*all)
        assert asked_for_ends(publisher) == PARTITIONS


async def test_leases_that_change_lead_to_no_discovery() -> None:
    publisher = Publisher(PARTITIONS)
    async with fleet(publisher) as instances:
        all = [instances.start(limits=NO_INTERVAL) for _ in range(INSTANCES)]
        await instances.balanced(*all)
        discoveries = publisher.counters["discovery"]
        instances.kill(all.pop())
        await instances.balanced(*all)
        all.append(instances.start(limits=NO_INTERVAL))
        await instances.balanced(*all)
        assert publisher.counters["discovery"] == discoveries + 1, "of the one that joined"


async def test_a_change_is_read_once_by_each() -> None:
    async with fleet(Publisher(6)) as instances:
        members = [instances.start() for _ in range(3)]
        await instances.balanced(*members)
        instances.store.taken()
        await instances.stop(members.pop())
        await instances.balanced(*members)
        calls = instances.store.taken()
        assert calls["claim"] == 2
        assert calls["load"] <= 4


async def test_a_split_is_discovered_a_few_times_by_each() -> None:
    publisher = Publisher(PARTITIONS)
    async with fleet(publisher) as instances:
        all = [instances.start(limits=NO_INTERVAL) for _ in range(INSTANCES)]
        await instances.balanced(*all)
        before = publisher.counters["discovery"]
        for partition in range(8):
            publisher.split(partition, method="cursor-from")
        await until(lambda: _reads(instances) == set(publisher.open_partitions()))
        await anyio.sleep(60)
        assert publisher.counters["discovery"] - before <= 5 * INSTANCES


def _reads(instances: Fleet) -> set[int]:
    return set().union(*(member.reads for member in instances.members))


async def test_nothing_but_heartbeats_and_looks_while_nothing_changes() -> None:
    async with fleet(Publisher(PARTITIONS)) as instances:
        all = [instances.start(limits=NO_INTERVAL) for _ in range(INSTANCES)]
        await instances.balanced(*all)
        await anyio.sleep(30)
        discoveries = instances.publisher.counters["discovery"]
        instances.store.taken()
        share = Share()
        await anyio.sleep(share.lease_seconds)
        calls: Counter[str] = instances.store.taken()
        assert calls.keys() == {"beat", "look", "load", "leases"}
        assert max(calls["load"], calls["leases"]) <= 2 * INSTANCES < calls["look"], "once a lease"
        assert calls["beat"] <= 6 * INSTANCES
        looks = share.lease_seconds / (0.8 * share.rebalance_seconds)
        assert calls["look"] <= (looks + 1) * INSTANCES
        assert instances.publisher.counters["discovery"] == discoveries


@pytest.mark.parametrize("apart", [False, True], ids=["leases in the store", "leases apart"])
async def test_a_feed_that_gets_a_name_waits_for_the_instances_without_one(apart: bool) -> None:
    """A rolling deployment: nothing is read by both, and nothing that was committed comes again."""
    publisher = Publisher(4)
    share = Share(leases=MemoryCursorStore() if apart else None)
    async with fleet(publisher) as instances:
        old = instances.start(share=share)
        await instances.balanced(old)
        publish(publisher, 0, *range(10))
        await until(lambda: len(instances.handled) == 10)
        new = instances.start(share=share, feed_name="orders")
        await anyio.sleep(300)
        publish(publisher, 0, *range(10, 20))
        await until(lambda: len(instances.handled) == 20)
        assert not new.open
        assert "for the instances that share the feed under" in _entry(new)
        await instances.stop(old)
        await instances.balanced(new)
        publish(publisher, 0, *range(20, 30))
        await until(lambda: len(instances.handled) >= 30)
        assert instances.handled == list(range(30))
        await instances.stop(new)


async def test_an_instance_that_was_killed_holds_no_name_back() -> None:
    publisher = Publisher(4)
    async with fleet(publisher) as instances:
        old = instances.start()
        await instances.balanced(old)
        instances.kill(old)
        new = instances.start(feed_name="orders")
        await instances.balanced(new)
        assert any("from now on" in each for each in new.consumer.status().reports)


def _entry(member: Member) -> str:
    return " ".join(problem.text for problem in member.consumer.health().problems)
