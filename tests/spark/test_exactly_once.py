"""First fetch wins, driven as Spark drives it, with crashes at every point.

No JVM: `MicroBatchEngine` replaces Spark's loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import (
    CursorRejectedError,
    FencedError,
    LineageError,
    ProtocolError,
)
from feedapi_client.spark import feed_watch
from feedapi_client.spark.query_offsets import read_offsets
from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging import StagingError
from feedapi_client.spark.stream import FeedStreamReader, StreamPartition
from feedapi_client.stores.sqlite import MemoryCursorStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Status
from tests.spark.micro_batches import (
    Crash,
    MicroBatchEngine,
    options_for,
    problems,
    publish,
    query,
)

Start = Callable[..., MicroBatchEngine]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=40, checkpoint_every=10, seed=7)
    with publisher.serve():
        yield publisher


@pytest.fixture
def start(publisher: Publisher, tmp_path: Path) -> Start:
    return partial(query, publisher, tmp_path)


def test_first_micro_batch_of_a_feed_without_events_is_empty(start: Start) -> None:
    """Spark plans one, whatever the offset."""
    reader = start().reader
    before = reader.initialOffset()
    assert reader.latestOffset(before, reader.getDefaultReadLimit()) == before
    assert reader.partitions(before, before) == []


def crashing(seed: int, probability: float) -> Callable[[str], None]:
    chance = random.Random(seed)

    def crash_at(point: str) -> None:
        if chance.random() < probability:
            raise Crash(point)

    return crash_at


def finish(engine: MicroBatchEngine) -> None:
    engine.crash_at = lambda point: None
    engine.available_now()


def run_on(engine: MicroBatchEngine) -> None:
    """Go on also while nothing is new, as a query does."""
    while True:
        engine.run()


@pytest.mark.parametrize("seed", range(12))
def test_no_event_is_lost_or_doubled_through_crashes_splits_and_token_changes(
    start: Start, publisher: Publisher, seed: int
) -> None:
    """Nor by a sink that reads a micro-batch twice, or not at all."""
    engine = start(crashing(seed, 0.25), maxEventsPerPartition="30")
    engine.reread = 1 + seed % 2
    engine.skip = lambda batch: batch % 7 == seed % 5
    chance = random.Random(seed)
    for step in range(12):
        publish(publisher, 40)
        for _ in range(chance.randrange(6)):
            engine.trigger()
        if step == 3:
            publisher.split(0, into=2, method=chance.choice(["starts-after", "cursor-from"]))
        if step == 6:
            publisher.split(1, into=2, method=chance.choice(["starts-after", "cursor-from"]))
        if step == 8:
            publisher.rotate_token()
    finish(engine)
    rows = list(engine.all_rows())
    assert problems(rows, publisher.payloads()) == []
    for partition in {row["partition"] for row in rows}:
        numbers = [row["sequence"] for row in rows if row["partition"] == partition]
        assert numbers == list(range(len(numbers)))


def test_next_plan_holds_what_was_read_however_slowly_that_is_committed(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a driver that starts from that plan would read it again."""

    class SlowStore(MemoryCursorStore):
        async def save(self, *args: Any, **given: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().save(*args, **given)

    publish(publisher, 40)
    with monkeypatch.context() as patched:
        patched.setattr(feed_watch, "MemoryCursorStore", SlowStore)
        patched.setattr(feed_watch, "_PATIENCE", 0.0)
        engine = start(maxEventsPerTrigger="100")  # one partition an epoch
        while len(engine.rows) < 2:
            engine.trigger()
    engine.restart()
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_error_that_comes_while_an_epoch_runs_ends_the_query(
    start: Start, publisher: Publisher
) -> None:
    """Also where the feed answers again when the epoch is over."""

    def fail_at(point: str) -> None:
        if point != "staged":
            return
        publisher.fail(410, partition=1, times=None)
        while not engine.reader._watch.over:
            time.sleep(0.01)
        publisher.heal()

    engine = start(refusedFor="0.05")
    engine.run()
    publisher.append(0, {"entity": "a", "n": 1})
    engine.crash_at = fail_at
    while not engine.rows:
        engine.trigger()
    with pytest.raises(CursorRejectedError, match="partition 1"):
        engine.trigger()


def test_r09_successor_that_is_listed_during_the_first_epoch_comes_after_it(
    start: Start, publisher: Publisher
) -> None:
    """By `depth`: the ancestor has events, although its results are not there yet."""

    def split_at(point: str) -> None:
        if point != "staged":
            return
        engine.crash_at = lambda point: None
        (child,) = publisher.split(0, into=1, method="cursor-from")
        publisher.append(child, {"entity": "a", "n": 2})
        before = publisher.counters["discovery"]
        while publisher.counters["discovery"] < before + 2:
            time.sleep(0.01)

    engine = start(split_at, discoveryInterval="0.01")
    publisher.extend(0, [{"entity": "a", "n": n} for n in range(2)])
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("when", ["idle", "logged"])
@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
def test_r10_split_is_noticed_when_a_token_is_refused(
    start: Start, publisher: Publisher, method: Any, when: str
) -> None:
    def split_at(point: str) -> None:
        if point == when:
            engine.crash_at = lambda point: None
            publisher.split(0, into=2, method=method)

    engine = start()  # discovers once a minute
    publish(publisher, 40)
    engine.run()
    publish(publisher, 40)
    engine.crash_at = split_at
    split_at("idle")
    engine.run()
    publish(publisher, 40)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
def test_every_dialect_streams(tmp_path: Path, dialect: Any) -> None:
    publisher = Publisher(partitions=2, page_size=20, checkpoint_every=5, dialect=dialect, seed=1)
    publish(publisher, 100)
    with publisher.serve():
        given = {"v1Partitions": "2"} if dialect == "v1" else {}
        engine = query(publisher, tmp_path, **given)
        engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_batch_that_was_not_read_stays_empty(start: Start, publisher: Publisher) -> None:
    publish(publisher, 20)
    engine = start()
    engine.skip = lambda batch: batch == 0
    engine.trigger()
    late = engine.reader.partitions(engine.reader.initialOffset(), _offset(engine, 0))
    engine.run()
    assert [
        row for part in late for arrow in engine.reader.read(part) for row in arrow.to_pylist()
    ] == []


def _offset(engine: MicroBatchEngine, batch: int) -> Any:
    return json.loads(engine.offsets[batch])


def test_concurrent_attempts_of_one_task_deliver_the_same_rows(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 300)
    engine = start(maxEventsPerPartition="100")
    first = engine.reader.initialOffset()
    end = engine.reader.latestOffset(first, engine.reader.getDefaultReadLimit())
    (part, *_) = engine.reader.partitions(first, end)
    results: list[list[Any]] = []

    def task() -> None:
        results.append([row for arrow in engine.reader.read(part) for row in arrow.to_pylist()])

    threads = [threading.Thread(target=task) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0]
    assert all(rows == results[0] for rows in results)


def test_idle_triggers_write_no_batch(start: Start, publisher: Publisher) -> None:
    publish(publisher, 50)
    engine = start()
    engine.run()
    batches = len(engine.offsets)
    for _ in range(20):
        assert not engine.trigger()
    assert len(engine.offsets) == batches
    publish(publisher, 1)
    engine.run()
    assert len(engine.offsets) == batches + 1


def test_no_batch_is_empty_when_the_limit_is_at_the_end(start: Start, publisher: Publisher) -> None:
    publish(publisher, 140)
    engine = start(maxEventsPerPartition="10")
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []
    assert all(engine.rows.values())


def test_empty_pages_that_move_the_cursor_make_no_batch(start: Start, publisher: Publisher) -> None:
    publish(publisher, 10)
    engine = start()
    engine.run()
    batches = len(engine.offsets)
    for partition in publisher.open_partitions():
        publisher.append_internal(partition, 500)
    engine.run()
    assert len(engine.offsets) == batches
    publish(publisher, 10)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_limit_bounds_the_events_of_each_partition(start: Start, publisher: Publisher) -> None:
    publish(publisher, 500)
    engine = start(maxEventsPerPartition="35")
    engine.run()
    for rows in engine.rows.values():
        for partition in (0, 1):
            assert sum(row["partition"] == partition for row in rows) <= 35


def test_r13_batch_longer_than_the_limit_is_still_read(start: Start, publisher: Publisher) -> None:
    publish(publisher, 100)
    publisher.vary = False
    engine = start(maxEventsPerPartition="3")
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_r4_children_come_in_a_later_batch_than_their_parent(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 200)
    publisher.split(0, into=2, method="starts-after")
    publish(publisher, 200)
    engine = start(maxEventsPerPartition="50")
    engine.run()
    of = {
        partition: [
            batch
            for batch, rows in engine.rows.items()
            if any(row["partition"] == partition for row in rows)
        ]
        for partition in (0, 2, 3)
    }
    assert max(of[0]) < min(of[2] + of[3])
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_r4_unordered_reads_children_and_parents_together(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 200)
    publisher.split(0, into=2, method="starts-after")
    publish(publisher, 200)
    engine = start(maxEventsPerPartition="50", ordered="false")
    engine.trigger()
    assert {row["partition"] for row in engine.rows[0]} == {0, 1, 2, 3}


def test_r7_last_reads_only_events_published_after_the_start(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    engine = start(startingCursors="last")
    engine.run()
    assert list(engine.all_rows()) == []
    engine.restart()
    publish(publisher, 50)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()[100:]) == []


def test_r7_last_is_kept_through_a_restart_before_the_first_event(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    engine = start(startingCursors="last")
    engine.trigger()
    publish(publisher, 50)
    finish(engine)
    assert problems(engine.all_rows(), publisher.payloads()[100:]) == []


def test_r7_start_from_given_cursors(start: Start, publisher: Publisher) -> None:
    publisher.vary = False
    publish(publisher, 30)
    cursor = publisher.end_cursor(0)
    before = publisher.payloads(0)
    publish(publisher, 30)
    engine = start(startingCursors=f'{{"0": "{cursor}"}}')
    engine.run()
    assert (
        problems(
            engine.all_rows(), [event for event in publisher.payloads() if event not in before]
        )
        == []
    )


def test_offsets_can_be_printed_and_given_to_a_new_query(
    start: Start, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.vary = False
    publish(publisher, 100)
    engine = start(maxEventsPerPartition="20")
    engine.run()
    publisher.split(0, into=2)
    publish(publisher, 30)
    engine.trigger()  # the end of the parent, and no child yet
    before = list(engine.all_rows())
    run = json.loads(engine.offsets[engine.committed])["run"]
    offsets = read_offsets(tmp_path.as_uri(), run)
    assert (offsets.feed, offsets.epoch) == (publisher.url, engine.committed)
    assert offsets.before != offsets.after
    following = start(startingCursors=json.dumps(offsets.after))
    following.run()
    rows = [*before, *following.all_rows()]
    assert sorted(json.loads(row["data"])["n"] for row in rows) == list(range(130))
    with pytest.raises(StagingError, match="there is no run"):
        read_offsets(tmp_path.as_uri(), "0" * 32)


def test_r10_token_changes_between_plan_and_fetch(start: Start, publisher: Publisher) -> None:
    """The epoch is empty, and the driver discovers."""
    publish(publisher, 100)
    engine = start()
    rotated = []

    def rotate(point: str) -> None:
        if point == "logged" and not rotated:
            rotated.append(publisher.rotate_token())

    engine.crash_at = rotate
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []
    assert engine.rows[0] == []


def test_r10_first_that_is_refused_for_a_while_is_an_error_of_the_feed(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 10)
    publisher.fail(400, partition=0, times=None)
    engine = start(refusedFor="0.1")
    with pytest.raises(
        ProtocolError, match=r"partition 0.*The cursor can't be at fault, since it is _first"
    ):
        run_on(engine)


def test_r14_failing_partition_does_not_delay_the_others(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, 100)
    publisher.fail(503, partition=0, times=None)
    engine = start(maxPartitionsPerTask="1", giveUpAfter="none")
    engine.trigger()
    assert {row["partition"] for row in engine.all_rows()} == {1}
    publisher.heal()
    finish(engine)
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("dies", [False, True])
def test_old_epochs_are_deleted_also_after_a_driver_that_died_before_it_did(
    start: Start, publisher: Publisher, tmp_path: Path, dies: bool
) -> None:
    def crash_at(point: str) -> None:
        if dies and point == "logged" and len(engine.offsets) in (3, 6):
            raise Crash(point)

    engine = start(crash_at, maxEventsPerPartition="20")
    for _ in range(10):
        publish(publisher, 40)
        engine.run()
    epochs = {path.name for path in tmp_path.rglob("plan/*")}
    assert len(engine.offsets) >= 10
    assert len(epochs) <= 2
    assert len({path.parent.name for path in tmp_path.rglob("data/*/*")}) <= 2


def test_plan_of_a_driver_that_died_is_taken_up_while_the_feed_is_down(
    start: Start, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 10)
    engine = start()
    engine.run()
    publish(publisher, 10)
    next_plan = f"plan/{engine.committed + 1:012d}"

    def crash_at(point: str) -> None:
        if point == "planned" and list(tmp_path.rglob(next_plan)):
            raise Crash(point)

    engine.crash_at = crash_at
    while not list(tmp_path.rglob(next_plan)):
        engine.trigger()
    publisher.fail(503, on="any", times=None)
    publisher.clear_requests()
    last = json.loads(engine.offsets[engine.committed])
    planned = engine.reader.latestOffset(last, engine.reader.getDefaultReadLimit())
    assert planned == {**last, "epoch": last["epoch"] + 1}
    assert publisher.counters["fetch"] == 0


def test_several_queries_share_a_staging_location(start: Start, publisher: Publisher) -> None:
    publish(publisher, 200)
    engines = [start(maxEventsPerPartition=str(size)) for size in (20, 30, 1000)]
    for _ in range(30):
        for engine in engines:
            engine.trigger()
    for engine in engines:
        engine.run()
        assert problems(engine.all_rows(), publisher.payloads()) == []


def test_missing_plan_is_an_error(start: Start, publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 10)
    engine = start()
    engine.run()
    for path in tmp_path.rglob("plan/*"):
        path.unlink()
    engine.restart()
    with pytest.raises(StagingError, match="plan of epoch 0 is gone"):
        engine.trigger()


@pytest.mark.parametrize("again", ["restart", "same driver"])
def test_location_that_is_deleted_while_the_query_runs_is_an_error(
    start: Start, publisher: Publisher, tmp_path: Path, again: str
) -> None:
    publish(publisher, 200)
    engine = start()
    engine.trigger()
    shutil.rmtree(tmp_path)
    if again == "restart":
        engine.restart()
    with pytest.raises(StagingError, match="plan of epoch 0 is gone"):
        engine.trigger()


def test_staged_object_that_is_deleted_before_its_epoch_is_committed_is_fetched_again(
    start: Start, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 200)

    def crash_at(point: str) -> None:
        if point == "sunk":
            engine.crash_at = lambda point: None
            for path in tmp_path.rglob("data/*/*"):
                path.unlink()
            engine.rows.clear()
            raise Crash(point)

    engine = start(crash_at)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_r08_older_run_ends_at_its_next_plan_in_one_line(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 20)
    older = start()
    older.run()
    newer = start()
    newer.offsets, newer.rows, newer.committed = older.offsets, older.rows, older.committed
    newer.run()
    assert not older.trigger()  # nothing to plan
    publish(publisher, 20)
    with pytest.raises(FencedError, match="a later run took the place of this one: process"):
        older.run()
    newer.run()
    assert problems(newer.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize(("began", "now"), [("1", "0"), ("1", "0,1"), ("1", ""), ("", "1")])
def test_another_selection_of_partitions_is_refused(
    start: Start, publisher: Publisher, began: str, now: str
) -> None:
    publish(publisher, 100)
    engine = start(**({"partitions": began} if began else {}))
    engine.run()
    other = options_for(publisher, **({"partitions": now} if now else {}))
    location = engine.reader.location  # type: ignore[attr-defined]
    engine._make = lambda: FeedStreamReader(other, location)
    engine.restart()
    with pytest.raises(OptionError, match="partitions is not as it was when the query began"):
        engine.trigger()


def test_executor_that_does_not_see_the_staging_location_is_an_error(
    start: Start, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 10)
    engine = start()
    first = engine.reader.initialOffset()
    end = engine.reader.latestOffset(first, engine.reader.getDefaultReadLimit())
    (part, *_) = engine.reader.partitions(first, end)
    assert isinstance(part, StreamPartition)
    elsewhere = FeedStreamReader(options_for(publisher), (tmp_path / "elsewhere").as_uri())
    with pytest.raises(StagingError, match="not shared by driver and executors"):
        list(elsewhere.read(part))


def test_checkpoint_of_another_selection_is_refused(start: Start, publisher: Publisher) -> None:
    publish(publisher, 10)
    engine = start()
    engine.run()
    other = options_for(publisher, eventTypes="a;b")
    location = engine.reader.location  # type: ignore[attr-defined]
    engine._make = lambda: FeedStreamReader(other, location)
    engine.restart()
    with pytest.raises(LineageError, match="another selection of events"):
        engine.trigger()


def test_available_now_ends_while_the_publisher_goes_on(start: Start, publisher: Publisher) -> None:
    publish(publisher, 100)
    engine = start(maxEventsPerPartition="20")

    def more(point: str) -> None:
        if point == "sunk":
            publish(publisher, 1)

    engine.crash_at = more
    engine.available_now()
    assert len(list(engine.all_rows())) >= 100


def test_available_now_ends_at_its_timeout(start: Start, publisher: Publisher) -> None:
    publish(publisher, 100)
    engine = start(availableNowTimeout="0")
    engine.available_now()
    assert list(engine.all_rows()) == []


def test_selected_partitions_and_their_descendants_are_read(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    engine = start(partitions="1")
    engine.run()
    publisher.split(1, into=2, method="cursor-from")
    publisher.split(0, into=2, method="cursor-from")
    publish(publisher, 100)
    finish(engine)
    assert {row["partition"] for row in engine.all_rows()} == {1, 2, 3}


def test_progress_reports_the_number_of_partitions_in_each_state(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    publisher.split(0, into=2, method="starts-after")
    engine = start()
    engine.run()
    report = engine.reader.reportLatestOffset()
    assert report is not None
    assert report["partitions"] == 4
    assert report["drained"] == 1
    assert report["caughtUp"] == 3
    assert report["caughtUpPartitions"] == 4
    assert report["behindSeconds"] == 0
    assert report["feed"] == publisher.url


def test_progress_reports_requests_and_the_time_behind(start: Start, publisher: Publisher) -> None:
    publish(publisher, 200)
    engine = start(maxEventsPerPartition="20")
    engine.trigger()
    publisher.fail(503, partition=0, times=2)
    engine.trigger()
    engine.trigger()
    report = engine.reader.reportLatestOffset()
    assert report is not None
    assert report["behindSeconds"] is None  # never caught up yet
    engine.run()
    publish(publisher, 200)
    engine.trigger()
    assert not engine.trigger() or engine.trigger()
    report = engine.reader.reportLatestOffset()
    assert report is not None
    assert 0 <= report["behindSeconds"] < 600


def test_limit_of_a_trigger_bounds_the_events_of_an_epoch(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 1000)
    engine = start(maxEventsPerTrigger="250")
    engine.run()
    assert max(map(len, engine.rows.values())) <= 250
    assert {row["partition"] for row in engine.rows[0]} == {0, 1}
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_small_limit_of_a_trigger_lets_the_partitions_take_turns(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 400)
    engine = start(maxEventsPerTrigger="30")
    for _ in range(4):
        engine.trigger()
    assert max(map(len, engine.rows.values())) <= 30
    assert {row["partition"] for row in engine.all_rows()} == {0, 1}
    finish(engine)
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_limit_in_bytes_bounds_an_epoch_and_lets_partitions_take_turns(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 400)
    engine = start(maxBytesPerTrigger="4000", pageSizeHint="10")
    for _ in range(4):
        engine.trigger()
    # One batch of each partition is read, whatever its size: here at most 10 events.
    assert max(sum(len(row["data"]) for row in rows) for rows in engine.rows.values()) < 5000
    assert len(engine.rows) == 4
    assert {row["partition"] for row in engine.all_rows()} == {0, 1}
    finish(engine)
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_r07_query_of_a_feed_with_a_name_follows_it_to_another_url(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    engine = start()
    engine.run()
    location = engine.reader.location  # type: ignore[attr-defined]

    def restart_with(**given: str) -> None:
        options = options_for(publisher, **given)
        engine._make = lambda: FeedStreamReader(options, location)
        engine.restart()

    url = f"{publisher.url}?moved=1"
    for given in ({}, {"feedName": "orders"}):
        restart_with(url=url, **given)
        with pytest.raises(LineageError, match="goes on if option feedName named it before"):
            engine.trigger()
    restart_with(feedName="orders")
    publish(publisher, 100)
    engine.run()
    restart_with(url=url, feedName="orders")
    publish(publisher, 100)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize("fail", ["true", "false"])
def test_r10_refused_cursor_is_an_error_unless_data_may_be_lost(
    start: Start, publisher: Publisher, fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.extend(0, [{"n": n} for n in range(30)])
    engine = start(failOnDataLoss=fail, partitions="0", refusedFor="0.1")
    engine.run()
    old = publisher.end_cursor(0)
    publisher.fail(refuses(old), partition=0, times=None)
    publisher.extend(0, [{"n": n} for n in range(30, 40)])
    if fail == "true":
        with pytest.raises(CursorRejectedError):
            run_on(engine)
        return
    with caplog.at_level(logging.WARNING):
        while len(list(engine.all_rows())) < 70:
            engine.run()
    assert "It is read from the first event that is left on" in caplog.text
    assert len(list(engine.all_rows())) == 70
    assert [row["sequence"] for row in engine.all_rows()] == list(range(70))


def refuses(cursor: str) -> Any:
    """A publisher that no longer has what comes after a cursor."""

    def fault(response: Any, request: Any, publisher: Any, /) -> Any:
        return Status(410)(response, request, publisher) if request.cursor == cursor else response

    return fault
