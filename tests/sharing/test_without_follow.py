"""Without `follow` each instance ends once all that was published before it started is handled.

By whichever instance, also when some die in between. On virtual time.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from feedapi_client import Batch, CommitOrderError, FeedConsumer, FeedInfo, Limits, Partition, Share
from feedapi_client.lineage.planner import Planner
from feedapi_client.runtime.planning import Planning
from feedapi_client.sharing.coordinator import Ends
from feedapi_client.stores import Lease, View
from feedapi_client.testing import Publisher
from tests.sharing.fleet import URL, Fleet, Member, fleet, publish, until
from tests.testing.virtual_time import HOUR, asgi_client

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

ONCE: dict[str, Any] = {"follow": False, "limits": Limits(discovery_interval=20.0)}


def six_partitions() -> Publisher:
    publisher = Publisher(6)
    for partition in range(6):
        publish(publisher, partition, *range(10 * partition, 10 * partition + 10))
    return publisher


class Gate:
    """Holds back the batches of one partition."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.open = anyio.Event()

    async def __call__(self, batch: Batch) -> None:
        if batch.partition == self.partition and batch.events:
            await self.open.wait()


async def test_one_that_starts_beside_one_that_still_reads_takes_no_old_end_for_its_own() -> None:
    publisher = six_partitions()
    async with fleet(publisher) as instances:
        instances.before = gate = Gate(5)
        first = instances.start(**ONCE)
        await until(lambda: len(instances.handled) == 50)
        await anyio.sleep(5)  # marks the five as read to their ends
        publish(publisher, 0, 1000)
        second = instances.start(**ONCE)
        await anyio.sleep(30)
        gate.open.set()
        await instances.all_over(first, second)
        assert sorted(instances.handled) == [*range(60), 1000]


async def test_ends_that_a_dead_instance_has_marked_do_not_end_the_next_round() -> None:
    """Its heartbeat is still alive when the next round begins."""
    publisher = six_partitions()
    async with fleet(publisher) as instances:
        instances.before = gate = Gate(5)
        both = [instances.start(**ONCE) for _ in range(2)]
        await until(lambda: len(instances.handled) == 50)
        await anyio.sleep(5)
        (dies,) = [one for one in both if 5 not in one.reads]
        (ends,) = [one for one in both if one is not dies]
        instances.kill(dies)
        gate.open.set()
        await instances.all_over(ends)
        for partition in range(6):
            publish(publisher, partition, 1000 + partition)
        await instances.all_over(instances.start(**ONCE))
        assert sorted(instances.handled) == [*range(60), *range(1000, 1006)]


@pytest.mark.parametrize(
    ("mark", "counts"),
    [
        (Lease(0, "gone", 1, ended=True), False),
        (Lease(0, None, 1, ended=True), False),  # it was released since
        (Lease(0, "gone", 2, ended=True), True),
        (Lease(0, "self", 1, ended=True), True),  # leases went back, and count the same epoch again
        (Lease(0, "self", 2), False),
    ],
)
def test_a_mark_counts_unless_it_was_there_before_this_instance(mark: Lease, counts: bool) -> None:
    planner = Planner(feed=URL)
    planner.discover(FeedInfo("v2-draft", {0: Partition(0)}))
    iteration = SimpleNamespace(settings=SimpleNamespace(follow=False), clock=lambda: 0.0)
    planning = SimpleNamespace(planner=planner, iteration=iteration)
    ends = Ends(cast("Planning", planning))
    ends.saw(View([], {0: Lease(0, "gone", 1, ended=True)}))
    assert ends.of({0: mark}) == ({0} if counts else set())


async def test_what_a_dead_instance_has_not_read_is_read_before_the_others_end() -> None:
    publisher = six_partitions()
    async with fleet(publisher) as instances:
        instances.before = gate = Gate(5)
        both = [instances.start(**ONCE) for _ in range(2)]
        await until(lambda: len(instances.handled) == 50)
        (dies,) = [one for one in both if 5 in one.reads]
        (ends,) = [one for one in both if one is not dies]
        await anyio.sleep(60)
        assert not ends.over
        instances.kill(dies)
        gate.open.set()
        await instances.all_over(ends)
        assert sorted(instances.handled) == [*range(60)]


async def test_r09_the_marked_end_of_a_dead_instance_is_transferred_at_a_split() -> None:
    publisher = six_partitions()
    async with fleet(publisher) as instances:
        instances.before = gate = Gate(5)
        both = [instances.start(**ONCE) for _ in range(2)]
        await until(lambda: len(instances.handled) == 50)
        (ends,) = [one for one in both if 5 in one.reads]
        (dies,) = [one for one in both if one is not ends]
        await anyio.sleep(60)
        split = min(dies.reads)
        instances.kill(dies)
        successor = publisher.split(split, method="cursor-from")[0]
        publish(publisher, successor, *range(60, 70))
        await anyio.sleep(60)
        gate.open.set()
        await instances.all_over(ends)
        assert sorted(instances.handled) == [*range(70)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("splits", [1, 2])
async def test_r09_what_was_split_while_no_instance_ran_is_read_to_its_end(
    splits: int, count: int
) -> None:
    publisher = Publisher(1)
    publish(publisher, 0, *range(10))
    async with fleet(publisher) as instances:
        await instances.all_over(instances.start(**ONCE))
        assert sorted(instances.handled) == [*range(10)]
        publish(publisher, 0, *range(10, 20))
        successors = publisher.split(0, method="cursor-from")
        for _ in range(1, splits):
            successors = publisher.split(successors[0], method="cursor-from")
        publish(publisher, successors[0], *range(20, 30))
        await instances.all_over(*(instances.start(**ONCE) for _ in range(count)))
        assert sorted(instances.handled) == [*range(30)]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(6))
async def test_any_history_of_starts_and_deaths_ends_with_all_handled(
    seed: int, ordered: bool
) -> None:
    random, publisher = Random(seed), six_partitions()
    async with fleet(publisher) as instances:

        async def handle(_: Batch) -> None:
            await anyio.sleep(random.uniform(0, 3))

        instances.before = handle
        history = History(random, instances, ordered=ordered)
        for _ in range(12):
            await history.step()
        await instances.all_over(*instances.members)
        history.start()  # the last word: whoever is alone reads all that there is
        await instances.all_over(*instances.members)
        assert set(instances.handled) == history.published


class History:
    """Starts, kills, publishes and splits at random."""

    def __init__(self, random: Random, instances: Fleet, *, ordered: bool) -> None:
        self.random = random
        self.instances = instances
        self.ordered = ordered
        self.published = set(range(60))
        self.start()

    def start(self) -> None:
        before = set(self.published)
        options = {**ONCE, "ordered": self.ordered}
        member = self.instances.start(**options)
        member.at_end = lambda: self.check(before)

    def check(self, published_before: set[int]) -> None:
        """An instance has ended: all that was published before it started is handled."""
        missing = published_before.difference(self.instances.handled)
        assert not missing, f"it ended before {sorted(missing)} were handled"

    async def step(self) -> None:
        publisher, running = self.instances.publisher, self._running()
        match self.random.choice(["start", "start", "kill", "publish", "publish", "split"]):
            case "start" if len(running) < 4:
                self.start()
            case "kill" if running:
                self.instances.kill(self.random.choice(running))
            case "split" if len(publisher.open_partitions()) < 12:
                partition = self.random.choice(publisher.open_partitions())
                publisher.split(partition, method="starts-after")
            case _:
                numbers = range(len(self.published), len(self.published) + 5)
                for n in numbers:
                    publish(publisher, self.random.choice(publisher.open_partitions()), n)
                self.published.update(numbers)
        await anyio.sleep(self.random.choice([0.0, 0.3, 2.0, 15.0]))

    def _running(self) -> list[Member]:
        return [member for member in self.instances.members if not member.over]


async def test_r05_an_end_that_is_not_committed_is_an_error_once_nothing_else_can_come() -> None:
    """Every instance waits for it: its children start only when it is drained."""
    publisher = six_partitions()
    for partition in range(1, 6):  # no other one may be a child of an open 0
        publisher.close(partition)
    async with fleet(publisher) as instances, asgi_client(publisher) as http:
        told = anyio.Event()
        instances.before = lambda batch: told.wait()
        other = instances.start(**ONCE)
        options = {"http": http, "store": instances.store, "share": Share(), **ONCE}
        async with FeedConsumer(URL, **options) as forgetful:
            with (
                anyio.fail_after(HOUR),
                pytest.raises(CommitOrderError, match="was not: await"),
            ):
                async for _ in forgetful.batches():
                    pass
        told.set()
        await instances.all_over(other)
        assert sorted(set(instances.handled)) == [*range(60)]
