"""Random histories of splits through a streaming query, without Spark, and through a batch read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from feedapi_client.spark.batch import FeedReader
from feedapi_client.spark.source_options import SourceOptions, parse_options
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import MicroBatchEngine, problems

pytestmark = pytest.mark.slow

AT_ONCE = {
    "discoveryInterval": "0.01",
    "pollInterval": "0.001",
    "maxPollInterval": "0.01",
    "settleTime": "0.01",
    "baseDelay": "0.01",
}


class Feed(Publisher):
    """Publishes events of some entities, each with its number."""

    def __init__(self, partitions: int, random: Random) -> None:
        quirks = Quirks(last_cursor="closed")
        super().__init__(partitions, page_size=5, checkpoint_every=3, seed=1, quirks=quirks)
        self.random = random
        self.published = 0

    def grow(self, count: int, entities: int = 4) -> None:
        for _ in range(count):
            entity = f"e{self.published % entities}"
            self.publish(entity, {"entity": entity, "n": self.published})
            self.published += 1

    def split_one(self, method: Any, parts: int = 2) -> None:
        self.split(self.random.choice(self.open_partitions()), into=parts, method=method)

    @property
    def options(self) -> SourceOptions:
        return parse_options({**AT_ONCE, "url": str(self.url)})

    def query(self, folder: Path) -> MicroBatchEngine:
        options = self.options
        return MicroBatchEngine(lambda: FeedStreamReader(options, folder.as_uri()))

    def check(self, engine: MicroBatchEngine) -> None:
        """Read to the end, and check each entity's order by depth and sequence."""
        while len([*engine.all_rows()]) < self.published:
            engine.trigger()
        assert problems(engine.all_rows(), self.payloads()) == []


@pytest.fixture
def feed() -> Iterator[Feed]:
    feed = Feed(1, Random(1))
    with feed.serve():
        yield feed


@pytest.mark.parametrize("seen", [True, False], ids=["waiting child seen", "never seen"])
@pytest.mark.parametrize("drained", [True, False], ids=["parent drained", "parent unread"])
def test_depth_of_the_successors_of_a_partition_that_was_never_read(
    feed: Feed, tmp_path: Path, seen: bool, drained: bool
) -> None:
    """Partition 0 is closed; its child waits for it, and is split before an event of it is read."""
    engine = feed.query(tmp_path)
    feed.grow(8)
    engine.trigger()
    if drained and not seen:
        engine.run()
    feed.split_one("starts-after", parts=1)
    if seen:
        feed.fail(503, partition=1, times=None)
        while engine.reader.reportLatestOffset()["partitions"] < 2:
            engine.trigger()
        if drained:
            while not engine.reader.reportLatestOffset()["drained"]:
                engine.trigger()
    feed.grow(8)
    feed.split_one("cursor-from")
    feed.heal()
    feed.grow(8)
    if drained:
        engine.restart()
    feed.check(engine)


def test_depth_of_a_batch_read_after_the_same_splits(feed: Feed) -> None:
    feed.grow(4)
    feed.split_one("starts-after", parts=1)
    feed.split_one("cursor-from")
    feed.grow(4)
    reader = FeedReader(feed.options)
    rows = [
        row
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert problems(rows, feed.payloads()) == []


@pytest.mark.parametrize("seed", range(25))
def test_depth_and_sequence_are_the_order_of_each_entity(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    feed = Feed(random.randint(1, 3), random)
    with feed.serve():
        engine = feed.query(tmp_path)
        for _ in range(25):
            match random.choice(("publish", "publish", "split", "epoch", "restart")):
                case "publish":
                    feed.grow(random.randint(1, 12), random.choice((3, 8)))
                case "split":
                    method = random.choice(("starts-after", "cursor-from"))
                    feed.split_one(method, random.randint(1, 3))
                case "epoch":
                    engine.trigger()
                case "restart":
                    engine.trigger()
                    engine.restart()
        feed.check(engine)
