"""What an epoch reads, whom an idle query asks (R15), and option ``partitions``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.stream import StreamPartition
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import MicroBatchEngine, problems, query

pytestmark = pytest.mark.slow

SELDOM = {"pollInterval": "1000", "maxPollInterval": "2000"}


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=40, page_size=50, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def fill(publisher: Publisher, *partitions: int, n: int = 1) -> None:
    for partition in partitions:
        publisher.append(partition, {"entity": str(partition), "n": n})


def fetched(publisher: Publisher) -> list[int]:
    return [request.partition or 0 for request in publisher.requests if request.kind == "fetch"]


@pytest.mark.parametrize(
    ("count", "given", "tasks"),
    [
        (5, {"maxPartitionsPerTask": "2"}, [2, 2, 1]),
        (5, {}, [1] * 5),
        (40, {}, [2] * 8 + [1] * 24),
    ],
)
def test_partitions_are_spread_evenly_over_tasks(
    publisher: Publisher, tmp_path: Path, count: int, given: dict[str, str], tasks: list[int]
) -> None:
    fill(publisher, *range(count))
    engine = query(publisher, tmp_path, **given)
    assert engine.trigger()
    reader, end = engine.reader, json.loads(engine.offsets[0])
    found = [part.task.targets for part in reader.partitions(reader.initialOffset(), end)]
    assert [len(targets) for targets in found] == tasks
    assert sorted(target.partition for targets in found for target in targets) == [*range(count)]


def test_r15_idle_trigger_asks_no_partition_that_is_not_due(
    publisher: Publisher, tmp_path: Path
) -> None:
    fill(publisher, 3)
    engine = query(publisher, tmp_path, **SELDOM)
    assert engine.trigger()
    while engine.trigger() or engine.reader.reportLatestOffset()["caughtUp"] < 40:
        pass
    publisher.clear_requests()
    for _ in range(20):
        assert not engine.trigger()
    assert fetched(publisher) == []


def test_epoch_reads_only_partitions_with_news(publisher: Publisher, tmp_path: Path) -> None:
    fill(publisher, *range(40))
    engine = query(publisher, tmp_path)
    engine.run()
    batches = len(engine.rows)
    fill(publisher, 7, 9, n=2)
    engine.run()
    assert len(engine.rows) <= batches + 2
    parts = [
        part
        for batch in range(batches, len(engine.rows))
        for part in engine.reader.partitions(
            json.loads(engine.offsets[batch - 1]), json.loads(engine.offsets[batch])
        )
    ]
    assert all(isinstance(part, StreamPartition) for part in parts)
    assert {target.partition for part in parts for target in part.task.targets} == {7, 9}
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_news_cost_no_request_of_the_idle_partitions(publisher: Publisher, tmp_path: Path) -> None:
    publisher.quirks = Quirks(last_cursor="always")
    fill(publisher, *range(40))
    engine = query(publisher, tmp_path, **SELDOM, discoveryInterval="0.05")
    while engine.trigger() or engine.reader.reportLatestOffset()["caughtUp"] < 40:
        pass
    publisher.clear_requests()
    fill(publisher, 7, n=2)
    while not engine.trigger():
        pass
    assert set(fetched(publisher)) == {7}
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
def test_partition_split_while_idle_is_read_on_before_it_is_due(
    publisher: Publisher, tmp_path: Path, method: Any
) -> None:
    publisher.quirks = Quirks(last_cursor="closed")
    fill(publisher, *range(40))
    engine = query(publisher, tmp_path, **SELDOM, discoveryInterval="0.01")
    while engine.trigger() or engine.reader.reportLatestOffset()["caughtUp"] < 40:
        pass
    children = publisher.split(0, into=2, method=method)
    fill(publisher, *children, n=2)
    while len([*engine.all_rows()]) < 42:
        engine.trigger()
    assert {row["partition"] for row in engine.all_rows()} == {*range(40), *children}


# ---------------------------------------------------------------------- option partitions


def test_selection_of_an_unlisted_partition_is_an_error(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = query(publisher, tmp_path, partitions="0,77")
    with pytest.raises(OptionError, match="option partitions names 77, which the feed does not"):
        engine.run()


@pytest.mark.parametrize("restarts", [True, False])
def test_descendants_that_come_later_are_selected_too(
    publisher: Publisher, tmp_path: Path, restarts: bool
) -> None:
    fill(publisher, 0, 1)
    engine = query(publisher, tmp_path, partitions="1", discoveryInterval="0.01")
    engine.run()
    children = publisher.split(1, into=2, method="starts-after")
    others = publisher.split(0, into=2, method="starts-after")
    fill(publisher, *children, *others, n=2)
    if restarts:
        engine.restart()
    while len([*engine.all_rows()]) < 3:
        engine.trigger()
    (child, _), grandchildren = children, publisher.split(children[0], into=2, method="cursor-from")
    fill(publisher, *grandchildren, n=3)
    if restarts:
        engine.restart()
    while len([*engine.all_rows()]) < 5:
        engine.trigger()
    read = {row["partition"] for row in engine.all_rows()}
    assert read == {1, child, children[1], *grandchildren}


def test_selected_partition_that_is_gone_before_its_turn_is_no_error(
    publisher: Publisher, tmp_path: Path
) -> None:
    """Nor is what descends from it lost: its selection is planned before it has news."""
    fill(publisher, 1)
    engine = query(publisher, tmp_path, partitions="1", discoveryInterval="0.01")
    engine.run()
    child, other = publisher.split(1, into=2, method="starts-after")
    while engine.reader.reportLatestOffset()["partitions"] < 3:
        engine.trigger()
    engine.run()
    grandchildren = publisher.split(child, into=2, method="cursor-from")
    fill(publisher, other, *grandchildren, n=2)
    engine.restart()
    engine.run()
    assert {row["partition"] for row in engine.all_rows()} == {1, other, *grandchildren}
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("later", [True, False])
def test_r08_lineage_keeps_children_behind_a_parent_that_the_feed_does_not_name(
    tmp_path: Path, later: bool
) -> None:
    publisher = Publisher(partitions=1, quirks=Quirks(omit_parent_zero=True))
    with publisher.serve():
        engine = query(publisher, tmp_path)
        fill(publisher, 0)
        if later:
            engine.run()
        children = publisher.split(0, into=2)
        fill(publisher, *children, n=2)
        given = query(publisher, tmp_path, lineage="1:0,2:0", discoveryInterval="0.01")
        given.offsets, given.committed, given.rows = engine.offsets, engine.committed, engine.rows
        while len([*given.all_rows()]) < 3:
            given.trigger()
        assert problems(given.all_rows(), publisher.payloads()) == []
        parents = [batch for batch in given.rows if 0 in of(given, batch)]
        assert all(not of(given, batch) & {1, 2} for batch in parents)


def of(engine: MicroBatchEngine, batch: int) -> set[int]:
    return {row["partition"] for row in engine.rows[batch]}
