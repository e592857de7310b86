"""First fetch wins, driven as Spark drives it, with crashes at every point.

No JVM: `MicroBatchEngine` replaces Spark's loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import (
    CursorRejectedError,
    FencedError,
    LineageError,
    ProtocolError,
)
from feedapi_client.model import FIRST
from feedapi_client.spark import feed_watch
from feedapi_client.spark.query_offsets import read_offsets
from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging import StagingError
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.stores.sqlite import MemoryCursorStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Status
from tests.spark.micro_batches import (
    Crash,
    MicroBatchEngine,
    Start,
    options_for,
    problems,
    publish,
    query,
    rows_of,
)


def exact(engine: MicroBatchEngine, publisher: Publisher) -> bool:
    return problems(engine.all_rows(), publisher.payloads()) == []


def plan(engine: MicroBatchEngine) -> Any:
    """Plan the first epoch, and return its tasks."""
    reader = engine.reader
    first = reader.initialOffset()
    return reader.partitions(first, reader.latestOffset(first, reader.getDefaultReadLimit()))


def test_first_micro_batch_of_a_feed_without_events_is_empty(start: Start) -> None:
    """Spark plans one, whatever the offset."""
    assert plan(start()) == []


# ---------------------------------------------------------------------- crashes and changes


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
    assert exact(engine, publisher)


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
    with pytest.raises(CursorRejectedError, match="partition 1"):
        run_on(engine)
    assert engine.rows


def run_on(engine: MicroBatchEngine) -> None:
    """Go on also while nothing is new, as a query does."""
    while True:
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
    assert exact(engine, publisher)


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
    assert exact(engine, publisher)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_r10_refused_cursor_is_an_error_unless_data_may_be_lost(
    start: Start, publisher: Publisher, fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    gone: set[str] = set()

    def refuse(response: Any, request: Any, publisher: Any, /) -> Any:
        """Its cursors are gone. Who begins anew is given others."""
        if request.cursor == FIRST:
            gone.clear()
        return Status(410)(response, request, publisher) if request.cursor in gone else response

    publisher.extend(0, [{"n": n} for n in range(30)])
    engine = start(failOnDataLoss=fail, partitions="0", refusedFor="0.1")
    engine.run()
    gone.add(publisher.end_cursor(0))
    publisher.fail(refuse, partition=0, times=None)
    publisher.extend(0, [{"n": n} for n in range(30, 40)])
    if fail == "true":
        with pytest.raises(CursorRejectedError):
            run_on(engine)
        return
    with caplog.at_level(logging.WARNING):
        while len(list(engine.all_rows())) < 70:
            engine.run()
    assert "It is read from the first event that is left on" in caplog.text
    assert [row["sequence"] for row in engine.all_rows()] == list(range(70))


def test_r10_first_that_is_refused_for_a_while_is_an_error_of_the_feed(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 10)
    publisher.fail(400, partition=0, times=None)
    message = r"partition 0.*The cursor can't be at fault, since it is _first"
    with pytest.raises(ProtocolError, match=message):
        run_on(start(refusedFor="0.1"))


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
def test_every_dialect_streams(tmp_path: Path, dialect: Any) -> None:
    publisher = Publisher(partitions=2, page_size=20, checkpoint_every=5, dialect=dialect, seed=1)
    publish(publisher, 100)
    with publisher.serve():
        given = {"v1Partitions": "2"} if dialect == "v1" else {}
        engine = query(publisher, tmp_path, **given)
        engine.run()
    assert exact(engine, publisher)


# ---------------------------------------------------------------------- attempts of a task


def test_batch_that_was_not_read_stays_empty(start: Start, publisher: Publisher) -> None:
    publish(publisher, 20)
    engine = start()
    engine.skip = lambda batch: batch == 0
    engine.trigger()
    reader = engine.reader
    late = reader.partitions(reader.initialOffset(), json.loads(engine.offsets[0]))
    engine.run()
    assert rows_of(reader, late) == []


def test_executor_that_does_not_see_the_staging_location_is_an_error(
    start: Start, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 10)
    elsewhere = FeedStreamReader(options_for(publisher), (tmp_path / "elsewhere").as_uri())
    with pytest.raises(StagingError, match="not shared by driver and executors"):
        rows_of(elsewhere, plan(start()))


def test_r08_older_run_ends_at_its_next_plan_in_one_line(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 20)
    older, newer = start(), start()
    older.run()
    newer.offsets, newer.rows, newer.committed = older.offsets, older.rows, older.committed
    newer.run()
    assert not older.trigger()  # nothing to plan
    publish(publisher, 20)
    with pytest.raises(FencedError, match="a later run took the place of this one: process"):
        older.run()
    newer.run()
    assert exact(newer, publisher)


# ---------------------------------------------------------------------- which epochs there are


@pytest.mark.parametrize("news", ["none", "empty pages"])
def test_idle_triggers_write_no_batch(start: Start, publisher: Publisher, news: str) -> None:
    """Nor do empty pages that move the cursor."""
    publish(publisher, 50)
    engine = start()
    engine.run()
    batches = len(engine.offsets)
    for partition in publisher.open_partitions() if news == "empty pages" else ():
        publisher.append_internal(partition, 500)
    engine.run()
    for _ in range(20):
        assert not engine.trigger()
    assert len(engine.offsets) == batches
    publish(publisher, 1)
    engine.run()
    assert len(engine.offsets) == batches + 1
    assert exact(engine, publisher)


@pytest.mark.parametrize(
    ("given", "events", "size"),
    [
        ({"maxEventsPerPartition": "35"}, 70, 10_000),
        ({"maxEventsPerPartition": "10"}, 20, 10_000),
        ({"maxEventsPerPartition": "3"}, 20, 10_000),  # R13: a batch is longer, and still read
        ({"maxEventsPerTrigger": "250"}, 250, 20_000),
        ({"maxEventsPerTrigger": "30"}, 30, 10_000),
        # One batch of each partition is read, whatever its size: here at most 10 events.
        ({"maxBytesPerTrigger": "4000", "pageSizeHint": "10"}, 400, 5000),
    ],
)
def test_limits_bound_each_epoch_and_partitions_take_turns(
    start: Start, publisher: Publisher, given: dict[str, str], events: int, size: int
) -> None:
    publisher.vary = False
    publish(publisher, 400)
    engine = start(**given)
    engine.run()
    epochs = list(engine.rows.values())
    assert all(epochs)  # also where the limit is at the end
    assert max(map(len, epochs)) <= events
    assert max(sum(len(row["data"]) for row in rows) for rows in epochs) < size
    assert {row["partition"] for rows in epochs[:4] for row in rows} == {0, 1}
    assert exact(engine, publisher)


def test_r4_children_come_in_a_later_batch_than_their_parent_unless_unordered(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 200)
    publisher.split(0, into=2, method="starts-after")
    publish(publisher, 200)
    engine, unordered = (start(maxEventsPerPartition="50", ordered=o) for o in ("true", "false"))
    engine.run()
    read = {batch: {row["partition"] for row in rows} for batch, rows in engine.rows.items()}
    parents = [batch for batch, partitions in read.items() if 0 in partitions]
    assert max(parents) < min(batch for batch, partitions in read.items() if partitions & {2, 3})
    assert exact(engine, publisher)
    unordered.trigger()
    assert {row["partition"] for row in unordered.rows[0]} == {0, 1, 2, 3}


def test_r14_failing_partition_does_not_delay_the_others(
    start: Start, publisher: Publisher
) -> None:
    publish(publisher, 100)
    publisher.fail(503, partition=0, times=None)
    engine = start(maxPartitionsPerTask="1", giveUpAfter="none")
    engine.trigger()
    assert {row["partition"] for row in engine.all_rows()} == {1}
    publisher.heal()
    engine.available_now()
    assert exact(engine, publisher)


def test_available_now_ends_at_its_timeout(start: Start, publisher: Publisher) -> None:
    publish(publisher, 100)
    engine = start(availableNowTimeout="0")
    engine.available_now()
    assert list(engine.all_rows()) == []


# ---------------------------------------------------------------------- where a query begins


@pytest.mark.parametrize("idle", [True, False])
def test_r7_last_reads_only_what_is_published_after_the_start(
    start: Start, publisher: Publisher, idle: bool
) -> None:
    """Also through a restart before the first event."""
    publish(publisher, 100)
    engine = start(startingCursors="last")
    engine.run() if idle else engine.trigger()
    assert list(engine.all_rows()) == []
    publish(publisher, 50)
    engine.available_now()
    assert problems(engine.all_rows(), publisher.payloads()[100:]) == []


def test_r7_start_from_given_cursors(start: Start, publisher: Publisher) -> None:
    publisher.vary = False
    publish(publisher, 30)
    cursor, before = publisher.end_cursor(0), publisher.payloads(0)
    publish(publisher, 30)
    engine = start(startingCursors=json.dumps({"0": cursor}))
    engine.run()
    later = [event for event in publisher.payloads() if event not in before]
    assert problems(engine.all_rows(), later) == []


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


MOVED = {"url": "?moved=1"}


@pytest.mark.parametrize(
    ("began", "now", "kind", "message"),
    [
        *(
            (began, now, OptionError, "partitions is not as it was when the query began")
            for began, now in (
                ({"partitions": "1"}, {"partitions": "0"}),
                ({"partitions": "1"}, {"partitions": "0,1"}),
                ({"partitions": "1"}, {}),
                ({}, {"partitions": "1"}),
            )
        ),
        ({}, {"eventTypes": "a;b"}, LineageError, "another selection of events"),
        ({}, MOVED, LineageError, "goes on if option feedName named it before"),
        ({}, {**MOVED, "feedName": "orders"}, LineageError, "goes on if option feedName named it"),
    ],
)
def test_r07_checkpoint_of_another_selection_or_feed_is_refused(
    start: Start, publisher: Publisher, began: Any, now: Any, kind: Any, message: str
) -> None:
    publish(publisher, 100)
    engine = start(**began)
    engine.run()
    url = {"url": f"{publisher.url}{now['url']}"} if "url" in now else {}
    engine.restart_with(publisher, **{**now, **url})
    with pytest.raises(kind, match=message):
        engine.trigger()


def test_r07_query_of_a_feed_with_a_name_follows_it_to_another_url(
    start: Start, publisher: Publisher
) -> None:
    engine = start()
    for given in ({}, {"feedName": "orders"}, {"feedName": "orders", "url": "?moved=1"}):
        url = f"{publisher.url}{given.pop('url', '')}"
        engine.restart_with(publisher, url=url, **given)
        publish(publisher, 100)
        engine.run()
    assert exact(engine, publisher)


# ---------------------------------------------------------------------- the staging location


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
    assert len(engine.offsets) >= 10
    assert len(list(tmp_path.rglob("plan/*"))) <= 2
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
        assert exact(engine, publisher)


@pytest.mark.parametrize(("lost", "restarts"), [("plans", True), ("all", True), ("all", False)])
def test_plan_that_is_gone_is_an_error(
    start: Start, publisher: Publisher, tmp_path: Path, lost: str, restarts: bool
) -> None:
    publish(publisher, 200)
    engine = start()
    engine.trigger()
    for folder in [tmp_path] if lost == "all" else [*tmp_path.glob("*/plan")]:
        shutil.rmtree(folder)
    if restarts:
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
    assert exact(engine, publisher)


# ---------------------------------------------------------------------- progress


def test_progress_reports_partitions_requests_and_the_time_behind(
    start: Start, publisher: Publisher
) -> None:
    def report() -> Any:
        return engine.reader.reportLatestOffset()

    publish(publisher, 200)
    publisher.split(0, into=2, method="starts-after")
    engine = start(maxEventsPerPartition="20")
    engine.trigger()
    publisher.fail(503, partition=0, times=2)
    engine.trigger()
    engine.trigger()
    assert report()["behindSeconds"] is None  # never caught up yet
    engine.run()
    states = {"partitions": 4, "drained": 1, "caughtUp": 3, "caughtUpPartitions": 4}
    assert states.items() <= report().items()
    assert (report()["behindSeconds"], report()["feed"]) == (0, publisher.url)
    publish(publisher, 200)
    engine.trigger()
    assert not engine.trigger() or engine.trigger()
    assert 0 <= report()["behindSeconds"] < 600
