"""Random histories of splits through the driver's part of a streaming query, without Spark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.negotiation import negotiate
from feedapi_client.spark.batch import chains
from feedapi_client.spark.fetch import FetchResult, Target
from feedapi_client.spark.plan import epoch_planner as planning
from feedapi_client.spark.plan.epoch_planner import EpochPlanner
from feedapi_client.spark.source_options import parse_options
from tests.simulation import wire
from tests.simulation.world import Method, World

URL = "http://simulated/feed"
STYLE = wire.PageStyle(size=5, checkpoint_every=3)
EPOCHS = 300
AT_ONCE = dict.fromkeys(("discoveryInterval", "pollInterval", "maxPollInterval"), "0.000001")


class Feed:
    """A `FeedConnection` to the simulator's publisher; the rows that were read from it."""

    url = URL
    options = parse_options({"url": URL, **AT_ONCE})
    fetch_options = FetchOptions()

    def __init__(self, partitions: int, random: Random) -> None:
        self.time = 0.0
        self.random = random
        self.world = World(partitions, "v2-token", last_cursor=True, now=lambda: self.time)
        self.rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Of each entity: depth, sequence and number of its events."""

    @property
    def info(self) -> FeedInfo:
        return self.discover()

    def discover(self) -> FeedInfo:
        version = self.world.version(self.time)
        body = wire.discovery(self.world, version, self.time, stream=False)
        return negotiate(200, body, feed=URL)

    def fetch(self, target: Target, *, keep: bool) -> FetchResult:
        partition = self.world.partitions[target.partition]
        asked = partition.sequence_of(target.cursor)
        assert asked is not None
        page = wire.page(self.world, partition, asked, self.time, "v2-token", STYLE, self.random)
        events = [e for e in partition.events if asked < e.sequence <= page.reached]
        for number, event in enumerate(events if keep else ()):
            row = target.depth, target.sequence + number, event.n
            self.rows[event.entity].append(row)
        cursor = partition.cursor(page.reached)
        ended = (not events and cursor == target.cursor) or cursor == target.last_cursor
        return FetchResult(
            target.partition, target.cursor, cursor, len(events), ended, asked_closed=target.closed
        )


class EveryPartitionHasNews:
    """A `Probe` that leaves all to the epochs."""

    def __init__(self, connection: object) -> None:
        pass

    def ask(self, cursors: Mapping[int, str]) -> Iterator[list[FetchResult]]:
        yield [FetchResult(id, cursor, cursor, events=1) for id, cursor in cursors.items()]


class Query:
    """A streaming query whose driver may start again at any time."""

    def __init__(self, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "Probe", EveryPartitionHasNews)
        self.feed = feed
        self.planner = self._planner(None)

    def _planner(self, plan: Any) -> EpochPlanner:
        return EpochPlanner(self.feed.options, self.feed, plan)  # type: ignore[arg-type]

    def epoch(self, *, restart: bool = False) -> None:
        plan = self.planner.next_plan(None)
        assert plan is not None
        results = []
        for number in range(len(plan.groups)):
            task = plan.task(0, number, FetchOptions())
            results += [self.feed.fetch(target, keep=True) for target in task.targets]
        if restart:
            self.planner = self._planner(plan)
        self.planner.add_results(results, fresh=not restart)

    def read_to_the_end(self) -> None:
        for _ in range(EPOCHS):
            if sum(map(len, self.feed.rows.values())) == self.feed.world.total():
                return
            self.epoch()
        raise AssertionError("the query does not reach the end of the feed")


def assert_in_order(feed: Feed) -> None:
    for entity, count in feed.world.published.items():
        found = [n for _, _, n in sorted(feed.rows[entity])]
        assert found == list(range(1, count + 1)), f"entity {entity}: {sorted(feed.rows[entity])}"


def publish(feed: Feed, count: int, entities: int = 4) -> None:
    for number in range(count):
        feed.world.publish(number % entities)


def split(feed: Feed, method: Method, parts: int = 2) -> None:
    writable = feed.world.writable()
    feed.world.split(feed.random.choice(writable).id, parts, method)


@pytest.mark.parametrize("seen", [True, False], ids=["waiting child seen", "never seen"])
@pytest.mark.parametrize("drained", [True, False], ids=["parent drained", "parent unread"])
def test_depth_of_the_successors_of_a_partition_that_was_never_read(
    seen: bool, drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 0 is closed; its child waits for it, and is split before an event of it is read."""
    feed = Feed(1, Random(1))
    query = Query(feed, monkeypatch)
    publish(feed, 8)
    query.epoch()
    split(feed, "starts-after", parts=1)
    publish(feed, 8)
    if seen:
        query.epoch()
    if drained and not seen:
        feed.time += 1.0
    split(feed, "cursor-from")
    publish(feed, 8)
    query.epoch(restart=drained)
    query.read_to_the_end()
    assert_in_order(feed)


def test_depth_of_a_batch_read_after_the_same_splits() -> None:
    feed = Feed(1, Random(1))
    publish(feed, 4)
    split(feed, "starts-after", parts=1)
    split(feed, "cursor-from")
    publish(feed, 4)
    options = parse_options({"url": URL})
    for chain in chains(options, feed, feed.discover(), {}):  # type: ignore[arg-type]
        for target in chain:
            ended = False
            while not ended:
                found = feed.fetch(target, keep=True)
                sequence, ended = target.sequence + found.events, found.ended
                target = replace(target, cursor=found.cursor, sequence=sequence)
    assert_in_order(feed)


@pytest.mark.parametrize("seed", range(25))
def test_depth_and_sequence_are_the_order_of_each_entity(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    feed = Feed(random.randint(1, 3), random)
    query = Query(feed, monkeypatch)
    for _ in range(25):
        feed.time += 1.0
        match random.choice(("publish", "publish", "split", "epoch", "restart")):
            case "publish":
                publish(feed, random.randint(1, 12), random.choice((3, 8)))
            case "split":
                split(feed, random.choice(("starts-after", "cursor-from")), random.randint(1, 3))
            case "epoch":
                query.epoch()
            case "restart":
                query.epoch(restart=True)
    query.read_to_the_end()
    assert_in_order(feed)
