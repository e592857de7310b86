"""Random histories of splits through a streaming query, without Spark, and through a batch read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from feedapi_client.spark.batch import FeedReader
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import (
    Crash,
    MicroBatchEngine,
    options_for,
    problems,
    publish,
    query,
    resumed,
    rows_of,
)

OFTEN = {"discoveryInterval": "0.01"}


def feed_of(partitions: int) -> Publisher:
    quirks = Quirks(last_cursor="closed")
    return Publisher(partitions, page_size=5, checkpoint_every=3, seed=1, quirks=quirks)


def split_one(feed: Publisher, random: Random, method: Any, parts: int = 2) -> None:
    feed.split(random.choice(feed.open_partitions()), into=parts, method=method)


def check(engine: MicroBatchEngine, feed: Publisher) -> None:
    """Read to the end, and check each entity's order by depth and sequence."""
    while len([*engine.all_rows()]) < len(feed.payloads()):
        engine.trigger()
    assert problems(engine.all_rows(), feed.payloads()) == []


@pytest.fixture
def feed() -> Iterator[Publisher]:
    feed = feed_of(1)
    with feed.serve():
        yield feed


@pytest.mark.slow
@pytest.mark.parametrize("seen", [True, False], ids=["waiting child seen", "never seen"])
@pytest.mark.parametrize("drained", [True, False], ids=["parent drained", "parent unread"])
def test_depth_of_the_successors_of_a_partition_that_was_never_read(
    feed: Publisher, tmp_path: Path, seen: bool, drained: bool
) -> None:
    """Partition 0 is closed; its child waits for it, and is split before an event of it is read."""
    engine, random = query(feed, tmp_path, **OFTEN), Random(1)
    publish(feed, 8, entities=4)
    engine.trigger()
    if drained and not seen:
        engine.run()
    split_one(feed, random, "starts-after", parts=1)
    if seen:
        feed.fail(503, partition=1, times=None)
        while engine.reader.reportLatestOffset()["partitions"] < 2:
            engine.trigger()
        if drained:
            while not engine.reader.reportLatestOffset()["drained"]:
                engine.trigger()
    publish(feed, 8, entities=4)
    split_one(feed, random, "cursor-from")
    feed.heal()
    publish(feed, 8, entities=4)
    if drained:
        engine.restart()
    check(engine, feed)


@pytest.mark.parametrize("seed", range(25))
def test_every_event_is_read_once_and_depth_and_sequence_are_the_order_of_each_entity(
    seed: int, tmp_path: Path
) -> None:
    """By a query that crashes, by sinks that read twice, or not at all; and by a batch read."""
    random, crashes = Random(seed), Random(seed)
    feed = feed_of(random.randint(1, 3))

    def crash_at(point: str) -> None:
        if crashes.random() < (seed + 1) % 3 / 10:
            raise Crash(point)

    with feed.serve():
        engine = query(feed, tmp_path, crash_at, maxEventsPerPartition="9", **OFTEN)
        engine.reread = 1 + seed % 2
        engine.skip = lambda batch: batch % 7 == seed % 5
        for _ in range(25):
            match random.choice(("publish", "publish", "split", "epoch", "restart", "rotate")):
                case "publish":
                    publish(feed, random.randint(1, 12), entities=random.choice((3, 8)))
                case "split":
                    method = random.choice(("starts-after", "cursor-from"))
                    split_one(feed, random, method, random.randint(1, 3))
                case "epoch":
                    engine.trigger()
                case "restart":
                    engine.trigger()
                    engine.restart()
                case "rotate":
                    feed.rotate_token()
        engine.crash_at = lambda point: None
        if seed % 4 == 3:
            engine.available_now()
        check(engine, feed)
        assert problems(rows_of(FeedReader(options_for(feed))), feed.payloads()) == []
    for partition in {row["partition"] for row in engine.all_rows()}:
        numbers = [row["sequence"] for row in engine.all_rows() if row["partition"] == partition]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("ends", [False, True], ids=["followed", "availableNow"])
@pytest.mark.parametrize("splits", [1, 2])
def test_r06_end_is_kept_of_partitions_that_are_unlisted_before_the_next_event(
    feed: Publisher, tmp_path: Path, splits: int, ends: bool
) -> None:
    engine, parent = query(feed, tmp_path, **OFTEN), 0
    publish(feed, 8)
    engine.run()
    for _ in range(splits):
        (parent,) = feed.split(parent, into=1)
    if ends:
        engine.available_now()
    while not ends and engine.reader.reportLatestOffset()["drained"] < splits:
        engine.trigger()
    engine.trigger()
    for partition in [p for p in feed.partitions if p != parent]:
        feed.remove(partition)
    engine.restart()
    publish(feed, 8)
    check(engine, feed)


@pytest.mark.parametrize("gone", [False, True])
def test_r09_resume_goes_on_with_what_descends_from_the_selected_partitions(
    tmp_path: Path, gone: bool
) -> None:
    """Also over a partition that is no longer listed."""
    feed, given = feed_of(2), {"partitions": "0", **OFTEN}
    with feed.serve():
        first = query(feed, tmp_path, **given)
        for number, partition in enumerate((0, 2, 3), 1):
            feed.extend(partition, [{"n": number}])
            while len([*first.all_rows()]) < number:
                first.trigger()
            feed.split(partition, into=1)
        for partition in (0, 2) if gone else ():
            feed.remove(partition)
        feed.extend(1, [{"n": "of another partition"}])
        feed.extend(4, [{"n": 4}])
        second = resumed(feed, tmp_path, first.all_rows(), **given)
        for _ in range(20):
            second.trigger()
        assert [row["data"] for row in second.all_rows()] == ['{"n":4}']


def test_r09_resume_takes_a_parent_as_read_that_is_not_listed_and_had_no_event(
    tmp_path: Path,
) -> None:
    feed = feed_of(2)
    with feed.serve():
        first = query(feed, tmp_path, **OFTEN)
        feed.extend(1, [{"n": 1}])
        first.run()
        (child,) = feed.split(0, into=1)
        feed.remove(0)
        second = resumed(feed, tmp_path, first.all_rows(), **OFTEN)
        feed.extend(child, [{"n": 2}])
        second.run()
        assert [row["data"] for row in second.all_rows()] == ['{"n":2}']


@pytest.mark.parametrize("listed", ["closed", "open"])
def test_r09_resume_reads_nothing_again_of_a_split_partition_that_is_listed(
    feed: Publisher, tmp_path: Path, listed: str
) -> None:
    """Its successors took over its cursor before its end, and have read the rest."""
    first = query(feed, tmp_path, **OFTEN)
    publish(feed, 8)
    first.run()
    publish(feed, 8)
    split_one(feed, Random(1), "cursor-from")
    feed.add(0, closed=listed == "closed")
    check(first, feed)
    second = resumed(feed, tmp_path, first.all_rows(), **OFTEN)
    second.run()
    assert [*second.all_rows()] == []


@pytest.mark.parametrize("sibling", [False, True], ids=["no sibling read", "a sibling read"])
def test_r09_resume_goes_on_at_the_first_ancestor_of_a_successor_without_events(
    feed: Publisher, tmp_path: Path, sibling: bool
) -> None:
    """Its grandparent stands at another cursor, which the parent took over long ago."""
    first = query(feed, tmp_path, **OFTEN)
    publish(feed, 8)
    first.run()
    feed.split(0, into=1, method="cursor-from")
    publish(feed, 8)
    check(first, feed)
    feed.split(1, into=2, method="cursor-from")
    if sibling:
        publish(feed, 1)
        check(first, feed)
    second = resumed(feed, tmp_path, first.all_rows(), **OFTEN)
    publish(feed, 8)
    rows = [*first.all_rows()]
    while len(rows) + len([*second.all_rows()]) < len(feed.payloads()):
        second.trigger()
    assert problems([*rows, *second.all_rows()], feed.payloads()) == []
