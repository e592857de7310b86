"""What a query waits for: refusals that pass, ends that prove to be none, feeds that hang.

And whom an idle query asks (R15), and option ``partitions``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import (
    AuthenticationError,
    CursorRejectedError,
    FeedError,
    ProtocolError,
    TransportError,
)
from feedapi_client.spark import feed_watch
from feedapi_client.spark.source_options import OptionError
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    Both,
    EmptyPage,
    Hang,
    Lag,
    Redirect,
    Replace,
    Status,
    Trickle,
)
from tests.spark.micro_batches import MicroBatchEngine, Start, problems, publish, query

pytestmark = pytest.mark.slow


def wait(engine: MicroBatchEngine, reached: Callable[[], object]) -> None:
    """Trigger until it is so."""
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        engine.trigger()


def report_of(engine: MicroBatchEngine) -> dict[str, Any]:
    reader: Any = engine.reader
    return dict(reader.reportLatestOffset() or {})


# ---------------------------------------------------------------------- refusals


ELSEWHERE = Redirect("https://login.invalid/?session=s3cret")


REFUSALS: list[tuple[int | Redirect, type[FeedError] | None]] = [
    *((status, CursorRejectedError) for status in (400, 405, 410)),
    *((status, AuthenticationError) for status in (401, 403)),
    *((status, ProtocolError) for status in (402, 409, 451)),
    (ELSEWHERE, TransportError),
    *((status, None) for status in (404, 421)),
]


@pytest.mark.parametrize(("status", "kind"), REFUSALS)
def test_r10_refusal_that_passes_ends_no_query_and_one_that_lasts_is_an_error(
    start: Start, publisher: Publisher, status: int | Redirect, kind: type[FeedError] | None
) -> None:
    publish(publisher, 50)
    engine = start()
    engine.run()
    publish(publisher, 50)
    publisher.fail(status, partition=0, times=8)
    wait(engine, lambda: len(list(engine.all_rows())) == 100)
    assert problems(engine.all_rows(), publisher.payloads()) == []
    if kind is None:
        return
    # Where data may be lost, a partition whose cursor is refused begins anew: this one must not.
    lossless = str(kind is CursorRejectedError)
    engine.restart_with(publisher, refusedFor="0.5", failOnDataLoss=lossless)
    publish(publisher, 50)
    publisher.fail(status, partition=0, times=None)
    began = time.monotonic()
    with pytest.raises(kind, match="while discovery lists the partition") as caught:
        wait(engine, lambda: False)
    assert (type(caught.value), caught.value.partition) == (kind, 0)
    assert time.monotonic() - began >= 0.5
    assert "s3cret" not in str(caught.value)


# ---------------------------------------------------------------------- late is better than lost


def test_r06_next_run_asks_once_more_behind_an_end_that_lagging_replicas_showed(
    start: Start, publisher: Publisher
) -> None:
    publisher.quirks = Quirks(last_cursor="never")
    engine = start(discoveryInterval="0.01")
    publish(publisher, 50)
    engine.run()
    publish(publisher, 50)
    publisher.fail(EmptyPage(moving=False), partition=0, times=None)
    publisher.close(0)
    wait(engine, lambda: report_of(engine)["drained"] == 1)
    batches = len(engine.rows)
    publisher.append(1, {"entity": "other", "n": 1})
    wait(engine, lambda: len(engine.rows) > batches)  # whose plan holds that end
    assert problems(engine.all_rows(), publisher.payloads()) != []
    publisher.heal()
    engine.available_now()
    assert problems(engine.all_rows(), publisher.payloads()) == []


# ---------------------------------------------------------------------- feeds that hang


@pytest.mark.parametrize("partitions", [1, 20])
def test_r14_partitions_of_a_feed_that_hangs_are_not_caught_up(
    partitions: int, tmp_path: Path
) -> None:
    """Only four are asked at a time: the others wait for their turn."""
    publisher = Publisher(partitions=partitions)
    with publisher.serve():
        engine = query(publisher, tmp_path, requestTimeout="600", maxConcurrentFetches="4")
        for partition in range(partitions):
            publisher.append(partition, {"entity": "a", "n": partition})
        wait(engine, lambda: report_of(engine).get("caughtUpPartitions") == partitions)
        publisher.fail(Hang(), times=None, on="fetch")
        wait(engine, lambda: report_of(engine)["caughtUpPartitions"] == 0)
        assert report_of(engine)["reading"] == partitions


@pytest.mark.parametrize(
    "fault",
    [Hang(), Both((Replace(b"\n" * 10_000), Trickle(interval=0.01)))],
    ids=["hangs", "trickles"],
)
def test_r14_available_now_ends_where_a_feed_hangs_for_too_long(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    publish(publisher, 30)
    engine = start(requestTimeout="0.3", slotTimeout="0.3", giveUpAfter="2")
    engine.available_now()
    publish(publisher, 30)
    publisher.fail(fault, times=None, on="any")
    with pytest.raises(TransportError, match=str(publisher.url)):
        engine.available_now()
    engine.reader.stop()
    publisher.heal()
    engine.available_now()
    assert len(list(engine.all_rows())) == 60


@pytest.mark.parametrize("fault", [Status(503), Hang()], ids=["503", "hangs"])
def test_r14_restart_does_not_wait_for_a_feed_that_is_down(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Spark asks the sources of a query in turn: the others would wait for this one."""
    monkeypatch.setattr(feed_watch, "_PATIENCE", 0.0)
    publish(publisher, 30)
    engine = start(requestTimeout="0.3", maxDelay="0.02")
    engine.run()
    publisher.fail(fault, times=None, on="any")
    engine.restart()
    publish(publisher, 10)
    assert not engine.trigger()
    publisher.heal()
    wait(engine, lambda: problems(engine.all_rows(), publisher.payloads()) == [])


# ---------------------------------------------------------------------- replicas that lag


@pytest.mark.parametrize("ahead", ["echo", "tail", "silent"])
@pytest.mark.parametrize("last_cursor", ["never", "closed"])
def test_available_now_skips_nothing_that_a_lagging_replica_does_not_show(
    start: Start, publisher: Publisher, ahead: Any, last_cursor: Any
) -> None:
    """Half of all answers are those of a replica that lags: a run may end too early."""
    publisher.quirks = Quirks(last_cursor=last_cursor)
    chance = random.Random(3)
    lag = Lag(0.3, ahead)

    def half(response: Any, request: Any, feed: Any, /) -> Any:
        return lag(response, request, feed) if chance.random() < 0.5 else response

    engine = start(discoveryInterval="0.05", settleTime="0.1")
    for step in range(6):
        publish(publisher, 40)
        if step == 2:
            publisher.split(0, into=2, method="starts-after")
        if step == 4:
            publisher.split(1, into=2, method="cursor-from")
        publisher.fail(half, times=None)
        engine.available_now()
        if step % 2:  # what a run did not get, the next one does, once replicas know it
            publisher.heal()
            engine.available_now()
            found = problems(engine.all_rows(), publisher.payloads())
            if ahead == "tail":  # an older place of the partition, from where events come again
                found = [one for one in found if one.startswith("lost")]
            assert found == []


# ---------------------------------------------------------------------- whom an idle query asks

SELDOM = {"pollInterval": "1000", "maxPollInterval": "2000"}
OFTEN = {"discoveryInterval": "0.01"}


@pytest.fixture
def wide() -> Iterator[Publisher]:
    publisher = Publisher(partitions=40, page_size=50, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def fill(publisher: Publisher, *partitions: int, n: int = 1) -> None:
    for partition in partitions:
        publisher.append(partition, {"entity": str(partition), "n": n})


def read(engine: MicroBatchEngine) -> set[int]:
    return {row["partition"] for row in engine.all_rows()}


def idle(engine: MicroBatchEngine) -> None:
    wait(engine, lambda: not engine.trigger() and report_of(engine)["caughtUp"] == 40)


@pytest.mark.parametrize(
    ("count", "given", "tasks"),
    [
        (5, {"maxPartitionsPerTask": "2"}, [2, 2, 1]),
        (5, {}, [1] * 5),
        (40, {}, [2] * 8 + [1] * 24),
    ],
)
def test_partitions_are_spread_evenly_over_tasks(
    wide: Publisher, tmp_path: Path, count: int, given: dict[str, str], tasks: list[int]
) -> None:
    fill(wide, *range(count))
    engine = query(wide, tmp_path, **given)
    assert engine.trigger()
    found = targets(engine, 0)
    assert [len(partitions) for partitions in found] == tasks
    assert sorted(partition for partitions in found for partition in partitions) == [*range(count)]


def targets(engine: MicroBatchEngine, batch: int) -> list[list[int]]:
    """The partitions that each task of a micro-batch reads."""
    before = engine.offsets.get(batch - 1)
    start = json.loads(before) if before else engine.reader.initialOffset()
    parts = engine.reader.partitions(start, json.loads(engine.offsets[batch]))
    return [[target.partition for target in part.task.targets] for part in parts]


def test_r15_idle_query_asks_nobody_that_is_not_due_and_an_epoch_reads_only_news(
    wide: Publisher, tmp_path: Path
) -> None:
    fill(wide, *range(40))
    engine = query(wide, tmp_path, **SELDOM)
    idle(engine)
    wide.clear_requests()
    for _ in range(20):
        assert not engine.trigger()
    assert wide.counters["fetch"] == 0
    batches = len(engine.rows)
    fill(wide, 7, 9, n=2)
    engine.restart_with(wide)
    engine.run()
    found = [targets(engine, batch) for batch in range(batches, len(engine.rows))]
    assert len(found) <= 2
    assert {p for tasks in found for task in tasks for p in task} == {7, 9}
    assert problems(engine.all_rows(), wide.payloads()) == []


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
def test_partition_split_while_idle_is_read_on_before_it_is_due(
    wide: Publisher, tmp_path: Path, method: Any
) -> None:
    wide.quirks = Quirks(last_cursor="closed")
    fill(wide, *range(40))
    engine = query(wide, tmp_path, **SELDOM, **OFTEN)
    idle(engine)
    children = wide.split(0, into=2, method=method)
    fill(wide, *children, n=2)
    wait(engine, lambda: read(engine) == {*range(40), *children})


# ---------------------------------------------------------------------- option partitions


def test_selection_of_an_unlisted_partition_is_an_error(wide: Publisher, tmp_path: Path) -> None:
    engine = query(wide, tmp_path, partitions="0,77")
    with pytest.raises(OptionError, match="option partitions names 77, which the feed does not"):
        engine.run()


@pytest.mark.parametrize("restarts", [True, False])
def test_descendants_that_come_later_are_selected_too(
    wide: Publisher, tmp_path: Path, restarts: bool
) -> None:
    fill(wide, 0, 1)
    engine = query(wide, tmp_path, partitions="1", **OFTEN)
    engine.run()
    selected, parent = {1}, 1
    for method in ("starts-after", "cursor-from"):
        children = wide.split(parent, into=2, method=method)  # type: ignore[arg-type]
        others = wide.split(wide.open_partitions()[0], into=2, method="starts-after")
        fill(wide, *children, *others, n=2 + len(selected))
        if restarts:
            engine.restart()
        selected, parent = selected | {*children}, children[0]
        wait(engine, lambda: read(engine) == selected)  # noqa: B023


def test_selected_partition_that_is_gone_before_its_turn_is_no_error(
    wide: Publisher, tmp_path: Path
) -> None:
    """Nor is what descends from it lost: its selection is planned before it has news."""
    fill(wide, 1)
    engine = query(wide, tmp_path, partitions="1", **OFTEN)
    engine.run()
    child, other = wide.split(1, into=2, method="starts-after")
    wait(engine, lambda: report_of(engine)["partitions"] == 3)
    engine.run()
    grandchildren = wide.split(child, into=2, method="cursor-from")
    fill(wide, other, *grandchildren, n=2)
    engine.restart()
    engine.run()
    assert read(engine) == {1, other, *grandchildren}
    assert problems(engine.all_rows(), wide.payloads()) == []


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
        given = query(publisher, tmp_path, lineage="1:0,2:0", **OFTEN)
        given.offsets, given.committed, given.rows = engine.offsets, engine.committed, engine.rows
        wait(given, lambda: len([*given.all_rows()]) == 3)
        assert problems(given.all_rows(), publisher.payloads()) == []
        epochs = [{row["partition"] for row in rows} for rows in given.rows.values()]
        assert not [read for read in epochs if 0 in read and read & {1, 2}]
