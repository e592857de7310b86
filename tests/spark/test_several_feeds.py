"""Several feeds in one query, driven as Spark drives it, without a JVM."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, In

from feedapi_client.errors import FeedUnavailableError, LineageError, TransportError
from feedapi_client.spark.batch import FeedReader, FilteringFeedReader
from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.plan import epoch_planner as planning
from feedapi_client.spark.plan import probe
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.staging import first_fetch
from feedapi_client.spark.staging.format import compress, decompress, pack, unpack
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults.connection_faults import Hang
from feedapi_client.testing.publisher.faults.response_faults import Status
from tests.spark.micro_batches import Crash, MicroBatchEngine, problems

AT_ONCE = {
    "pollInterval": "0.001",
    "maxPollInterval": "0.001",
    "baseDelay": "0.01",
    "settleTime": "0.01",
}
IN_PLANS_BEFORE = {
    *("feed", "info", "positions", "sequences", "depths", "known", "selected", "groups"),
    *("limit", "chosen", "version", "ends", "seeking"),
}
"""What the plan of one feed held before a query could read several."""


class Feeds:
    """Two publishers, and queries that read them."""

    def __init__(self, staging: str) -> None:
        self.staging = staging
        made = [Publisher(partitions=2, page_size=40, checkpoint_every=10, seed=n) for n in (1, 2)]
        self.first, self.second = self.both = made

    def urls(self, *publishers: Publisher) -> str:
        return " ".join(str(one.url) for one in publishers or self.both)

    def reader(self, **given: Any) -> FeedStreamReader:
        if not given.keys() & {"url", "urls"}:
            given["urls"] = self.urls()
        return FeedStreamReader(parse_options({**AT_ONCE, **given}), self.staging)

    def query(
        self, crash_at: Callable[[str], None] = lambda point: None, **given: Any
    ) -> MicroBatchEngine:
        return MicroBatchEngine(lambda: self.reader(**given), crash_at)

    def restart(self, engine: MicroBatchEngine, **given: Any) -> None:
        """Start the query again with other options."""
        engine._make = lambda: self.reader(**given)
        engine.restart()

    def problems(self, rows: list[dict[str, Any]]) -> list[str]:
        """What is lost, doubled or out of order, feed by feed."""
        found = []
        for publisher in self.both:
            own = [row for row in rows if row["feed"] == publisher.url]
            found += problems(own, publisher.payloads())
        unknown = {row["feed"] for row in rows} - {publisher.url for publisher in self.both}
        return found + sorted(unknown)


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    feeds = Feeds(tmp_path.as_uri())
    with feeds.first.serve(), feeds.second.serve():
        yield feeds


@pytest.fixture
def no_patience(short_grace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a query waits for a feed that is down."""
    monkeypatch.setattr(planning, "_PATIENCE", 0.0)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task does not wait for a feed that is down."""
    monkeypatch.setattr(first_fetch, "GRACE_PERIOD", 0.05)
    monkeypatch.setattr(probe, "GRACE_PERIOD", 0.05)


def publish(publisher: Publisher, count: int) -> None:
    first = len(publisher.payloads())
    for n in range(first, first + count):
        entity = f"e{n % 7}"
        publisher.publish(entity, {"entity": entity, "n": n})


def crashing(seed: int) -> Callable[[str], None]:
    chance = random.Random(seed)

    def crash_at(point: str) -> None:
        if chance.random() < 0.25:
            raise Crash(point)

    return crash_at


def rows_of(engine: MicroBatchEngine) -> list[dict[str, Any]]:
    return list(engine.all_rows())


def plans(feeds: Feeds) -> list[Path]:
    return sorted(Path(feeds.staging.removeprefix("file://")).glob("*/plan/*"))


def stored(path: Path) -> dict[str, Any]:
    text = decompress(unpack(path.read_bytes(), path.name)[1][0], path.name)
    return msgspec.json.decode(text, type=dict[str, Any])


# ---------------------------------------------------------------------- exactly once


@pytest.mark.parametrize("seed", range(8))
def test_no_event_is_lost_or_doubled_through_crashes_and_splits(feeds: Feeds, seed: int) -> None:
    engine = feeds.query(crashing(seed), maxEventsPerPartition="30")
    chance = random.Random(seed)
    for step in range(10):
        publish(feeds.first, 30)
        publish(feeds.second, 30)
        for _ in range(chance.randrange(6)):
            engine.trigger()
        if step == 3:
            feeds.second.split(0, into=2, method=chance.choice(["starts-after", "cursor-from"]))
        if step == 6:
            feeds.first.rotate_token()
    engine.crash_at = lambda point: None
    engine.available_now()
    assert feeds.problems(rows_of(engine)) == []


def test_batch_read_covers_all_feeds(feeds: Feeds) -> None:
    publish(feeds.first, 100)
    publish(feeds.second, 100)
    feeds.second.split(0, into=2, method="starts-after")
    publish(feeds.second, 100)
    reader = FeedReader(parse_options({**AT_ONCE, "urls": feeds.urls()}))
    executor = pickle.loads(pickle.dumps(reader))
    parts = pickle.loads(pickle.dumps(reader.partitions()))
    rows = [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]
    assert feeds.problems(rows) == []


def test_filters_of_a_query_choose_partitions_and_feeds(feeds: Feeds) -> None:
    for one in feeds.both:
        publish(one, 20)
    options = parse_options({"urls": feeds.urls(), "pushFilters": "true"})
    reader = FilteringFeedReader(options)
    wanted = [In(("partition",), (1, 7)), EqualTo(("feed",), str(feeds.first.url))]
    others = [GreaterThan(("partition",), 0), EqualTo(("data",), "x")]
    assert list(reader.pushFilters([*wanted, *others])) == [*wanted, *others]
    pushed = [row for part in reader.partitions() for row in arrow_rows(reader, part)]
    everything = FeedReader(options)
    complete = [row for part in everything.partitions() for row in arrow_rows(everything, part)]
    expected = [row for row in complete if row["partition"] == 1 and row["feed"] == feeds.first.url]
    assert expected

    def events(rows: list[dict[str, Any]]) -> list[Any]:
        return sorted((row["feed"], row["partition"], row["data"]) for row in rows)

    assert events(pushed) == events(expected)


def arrow_rows(reader: FeedReader, part: Any) -> list[dict[str, Any]]:
    return [row for batch in reader.read(part) for row in batch.to_pylist()]


def test_r19_feed_column_names_the_feed_without_its_query(feeds: Feeds) -> None:
    publish(feeds.first, 3)
    reader = FeedReader(parse_options({"url": f"{feeds.first.url}?key=x1", "feedColumn": "true"}))
    rows = [row for part in reader.partitions() for b in reader.read(part) for row in b.to_pylist()]
    assert [row["feed"] for row in rows] == [feeds.first.url] * 3
    engine = feeds.query(url=f"{feeds.first.url}?key=x1", feedColumn="true")
    engine.run()
    assert [row["feed"] for row in rows_of(engine)] == [feeds.first.url] * 3
    assert all(b"x1" not in json.dumps(stored(path)).encode() for path in plans(feeds))


def test_tasks_name_their_feed(feeds: Feeds) -> None:
    publish(feeds.first, 10)
    publish(feeds.second, 10)
    reader = feeds.reader()
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    named = [str(feed.url) for part in reader.partitions(start, end) for feed in feeds.both
             if f"feed={feed.url}" in repr(part)]  # fmt: skip
    assert sorted(named) == sorted(2 * [str(feeds.first.url), str(feeds.second.url)])


# ---------------------------------------------------------------------- the size of an epoch


def test_limit_of_a_trigger_is_over_all_feeds(feeds: Feeds) -> None:
    for publisher in feeds.both:
        publisher.vary = False
        publish(publisher, 400)
    engine = feeds.query(maxEventsPerTrigger="200", maxEventsPerPartition="1000")
    engine.run()
    assert max(map(len, engine.rows.values())) <= 200
    assert feeds.problems(rows_of(engine)) == []


def test_limit_of_a_partition_is_of_each_partition_of_each_feed(feeds: Feeds) -> None:
    for publisher in feeds.both:
        publish(publisher, 200)
    engine = feeds.query(maxEventsPerPartition="35")
    engine.run()
    for rows in engine.rows.values():
        for feed, partition in {(row["feed"], row["partition"]) for row in rows}:
            own = [r for r in rows if (r["feed"], r["partition"]) == (feed, partition)]
            assert len(own) <= 35
    assert {row["feed"] for row in engine.rows[0]} == {str(one.url) for one in feeds.both}


def test_events_of_all_feeds_count_for_the_least_of_a_trigger(feeds: Feeds) -> None:
    publish(feeds.first, 30)
    engine = feeds.query(minEventsPerTrigger="50", maxTriggerDelay="900")
    assert not engine.trigger()
    publish(feeds.second, 20)
    engine.reader._planner._hold._next_count = 0.0  # type: ignore[attr-defined]
    for _ in range(20):
        if engine.trigger():
            break
    assert len(engine.rows[0]) == 50


def test_available_now_ends_at_the_ends_of_all_feeds(feeds: Feeds) -> None:
    publish(feeds.first, 100)
    publish(feeds.second, 20)
    engine = feeds.query(maxEventsPerPartition="20")

    def more(point: str) -> None:
        if point == "sunk":
            publish(feeds.first, 1)

    engine.crash_at = more
    engine.available_now()
    rows = rows_of(engine)
    counts = [sum(row["feed"] == one.url for row in rows) for one in feeds.both]
    assert 100 <= counts[0] < len(feeds.first.payloads())
    assert counts[1] == 20


# ---------------------------------------------------------------------- other feeds on a restart


def test_plan_of_one_feed_is_stored_as_before(feeds: Feeds) -> None:
    publish(feeds.first, 10)
    feeds.query(url=feeds.first.url).run()
    (path,) = plans(feeds)
    assert stored(path).keys() == IN_PLANS_BEFORE | {"name"}
    assert stored(path)["version"] == 2


@pytest.mark.parametrize("finished", [True, False])
def test_checkpoint_of_one_feed_goes_on_with_several(feeds: Feeds, finished: bool) -> None:
    """Also one of an earlier version, whose plan has no name."""
    publish(feeds.first, 60)
    publish(feeds.second, 60)

    def crash_at(point: str) -> None:
        if point == "logged" and not finished:
            raise Crash(point)

    engine = feeds.query(crash_at, url=feeds.first.url, feedColumn="true")
    engine.trigger()
    engine.crash_at = lambda point: None
    for path in plans(feeds):
        plan = stored(path)
        del plan["name"]
        path.write_bytes(pack({"kind": "plan"}, [[compress(msgspec.json.encode(plan))]]))
    feeds.restart(engine, urls=feeds.urls(feeds.second, feeds.first))
    publish(feeds.first, 60)
    engine.run()
    assert feeds.problems(rows_of(engine)) == []
    assert stored(plans(feeds)[-1])["version"] == 3
    feeds.restart(engine, urls=feeds.urls())  # in another order
    publish(feeds.first, 10)
    engine.run()
    assert feeds.problems(rows_of(engine)) == []


def test_feed_that_is_added_starts_where_the_option_says(feeds: Feeds) -> None:
    publish(feeds.first, 60)
    publish(feeds.second, 60)
    engine = feeds.query(urls=feeds.urls(feeds.first))
    engine.run()
    feeds.restart(engine, startingCursors="last")
    engine.run()
    publish(feeds.second, 5)
    engine.run()
    rows = rows_of(engine)
    assert [row["feed"] for row in rows].count(str(feeds.second.url)) == 5
    assert [row["feed"] for row in rows].count(str(feeds.first.url)) == 60


@pytest.mark.parametrize("point", ["planned", "logged", "staged", "sunk", None])
def test_feed_that_is_removed_goes_on_where_it_was_when_it_comes_back(
    feeds: Feeds, point: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def crash_at(reached: str) -> None:
        if reached == point and engine.committed == 0:
            raise Crash(reached)

    publish(feeds.first, 60)
    publish(feeds.second, 60)
    engine = feeds.query(crash_at, maxEventsPerPartition="20")
    engine.trigger()
    engine.trigger()
    engine.crash_at = lambda reached: None
    with caplog.at_level(logging.WARNING):
        feeds.restart(engine, urls=feeds.urls(feeds.first))
        engine.run()
    assert f"feed {feeds.second.url}: the checkpoint holds it" in caplog.text
    reader: Any = engine.reader
    assert reader.reportLatestOffset()["feedsNotRead"] == [feeds.second.url]
    del reader  # of a driver that ends below
    before = [row for row in rows_of(engine) if row["feed"] == feeds.second.url]
    assert 0 < len(before) < 60
    publish(feeds.first, 30)
    engine.run()
    assert before == [row for row in rows_of(engine) if row["feed"] == feeds.second.url]
    feeds.restart(engine)
    engine.run()
    assert feeds.problems(rows_of(engine)) == []


def test_checkpoint_of_none_of_the_feeds_is_refused(feeds: Feeds) -> None:
    publish(feeds.first, 10)
    engine = feeds.query()
    engine.run()
    with Publisher(partitions=1).serve() as url:
        feeds.restart(engine, urls=f"{url} {url}/other")
        with pytest.raises(LineageError, match="Name one, or start a new query"):
            engine.trigger()


@pytest.mark.parametrize("other", ["selection", "query", "slash"])
def test_other_selection_of_events_is_refused(feeds: Feeds, other: str) -> None:
    publish(feeds.first, 10)
    engine = feeds.query()
    engine.run()
    if other == "selection":
        feeds.restart(engine, eventTypes="a")
    else:
        feeds.restart(engine, urls=feeds.urls() + ("/" if other == "slash" else "?a=b"))
    with pytest.raises(LineageError, match="another selection of events"):
        engine.trigger()


def test_feed_that_moved_goes_on_after_a_run_with_its_old_url(feeds: Feeds) -> None:
    publish(feeds.first, 60)
    publish(feeds.second, 60)
    engine = feeds.query()
    engine.run()
    old = str(feeds.second.url)
    moved = old.replace("127.0.0.1", "localhost")
    feeds.restart(engine, url=moved, previousUrl=old, feedColumn="true")
    engine.available_now()
    publish(feeds.first, 10)
    publish(feeds.second, 10)
    feeds.restart(engine, urls=f"{feeds.first.url} {moved}")
    engine.run()
    rows = [
        {**row, "feed": old if row["feed"] == moved else row["feed"]} for row in rows_of(engine)
    ]
    assert feeds.problems(rows) == []


# ---------------------------------------------------------------------- one feed is down


def test_feed_that_is_down_at_the_first_start_is_an_error(feeds: Feeds) -> None:
    feeds.second.fail(Status(503), times=None, on="any")
    engine = feeds.query(giveUpAfter="0.05")
    with pytest.raises(TransportError, match=str(feeds.second.url)):
        engine.trigger()


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("fault", [Status(503), Hang()], ids=["503", "hangs"])
def test_r14_other_feeds_go_on_while_one_is_down(feeds: Feeds, fault: Any, restart: bool) -> None:
    publish(feeds.first, 20)
    publish(feeds.second, 20)
    engine = feeds.query(discoveryInterval="0.001", requestTimeout="0.2", maxDelay="0.02")
    engine.run()
    feeds.second.fail(fault, times=None, on="any")
    if restart:
        engine.restart()
    for _ in range(3):
        publish(feeds.first, 10)
        publish(feeds.second, 10)
        for _ in range(100):
            engine.trigger()
            read = sum(row["feed"] == feeds.first.url for row in rows_of(engine))
            if read == len(feeds.first.payloads()):
                break
        else:
            raise AssertionError("the other feed does not go on")
    reader: Any = engine.reader
    report = {one["feed"]: one for one in reader.reportLatestOffset()["feeds"]}
    assert report[str(feeds.first.url)]["failing"] == 0
    while not report[str(feeds.second.url)]["failing"]:  # one that hangs fails by its timeout
        engine.trigger()
        report = {one["feed"]: one for one in reader.reportLatestOffset()["feeds"]}
    feeds.second.heal()
    for _ in range(500):
        engine.trigger()
        if not feeds.problems(rows_of(engine)):
            return
    raise AssertionError(feeds.problems(rows_of(engine)))


@pytest.mark.usefixtures("no_patience")
def test_r14_feed_that_hangs_does_not_slow_the_others(feeds: Feeds) -> None:
    """Each request to it would take ten minutes."""
    for one in feeds.both:
        publish(one, 20)
    engine = feeds.query(requestTimeout="600", maxPollInterval="0.01")
    engine.run()
    feeds.second.fail(Hang(), times=None, on="any")
    for _ in range(5):
        publish(feeds.first, 20)
        for _ in range(500):
            engine.trigger()
            read = sum(row["feed"] == feeds.first.url for row in rows_of(engine))
            if read == len(feeds.first.payloads()):
                break
        else:
            raise AssertionError("the other feed does not go on")
    while asked(engine, feeds.second) is None:
        engine.trigger()
    report = asked(engine, feeds.second)
    assert report is not None
    assert (report["caughtUpPartitions"], report["reading"]) == (0, 2)
    behind = report["behindSeconds"]
    while (asked(engine, feeds.second) or {})["behindSeconds"] < behind + 0.05:
        engine.trigger()
    assert engine.reader.reportLatestOffset()["behindSeconds"] > behind  # type: ignore[attr-defined]


def asked(engine: MicroBatchEngine, publisher: Publisher) -> dict[str, Any] | None:
    """The report on a feed all of whose partitions are being asked; None before."""
    reader: Any = engine.reader
    (report,) = (
        one for one in reader.reportLatestOffset()["feeds"] if one["feed"] == publisher.url
    )
    return report if report["reading"] == 2 else None


@pytest.mark.usefixtures("short_grace")
def test_r14_replay_does_not_wait_for_a_feed_that_is_down(feeds: Feeds) -> None:
    def crash_at(point: str) -> None:
        if point == "logged":
            feeds.second.fail(Status(503), times=None, on="any")
            raise Crash(point)

    publish(feeds.first, 20)
    publish(feeds.second, 20)
    engine = feeds.query(crash_at, maxDelay="0.02")
    engine.trigger()
    engine.crash_at = lambda point: None
    engine.trigger()
    assert {row["feed"] for row in engine.rows[0]} == {feeds.first.url}
    feeds.second.heal()
    engine.available_now()
    assert feeds.problems(rows_of(engine)) == []


def run_on(engine: MicroBatchEngine) -> None:
    """Go on also while nothing is new, as a query does. For some seconds at least."""
    for _ in range(1000):
        engine.run()


@pytest.mark.usefixtures("no_patience")
def test_r14_feed_that_stays_down_ends_the_query_and_is_named(feeds: Feeds) -> None:
    publish(feeds.first, 20)
    engine = feeds.query(
        giveUpAfter="0.1", discoveryInterval="0.001", maxDelay="0.02", maxEventsPerPartition="1"
    )
    engine.run()
    feeds.second.fail(Status(503), times=None, on="any")
    publish(feeds.first, 1000)
    with pytest.raises(FeedUnavailableError, match=str(feeds.second.url)):
        run_on(engine)


# ---------------------------------------------------------------------- what a query says of itself


def test_progress_has_each_feed_and_the_sums(feeds: Feeds) -> None:
    publish(feeds.first, 20)
    feeds.second.split(0, into=2, method="starts-after")
    engine = feeds.query()
    engine.run()
    reader: Any = engine.reader
    report = reader.reportLatestOffset()
    assert [one["feed"] for one in report["feeds"]] == [feeds.first.url, feeds.second.url]
    assert [one["partitions"] for one in report["feeds"]] == [2, 4]
    assert (report["partitions"], report["caughtUpPartitions"]) == (6, 6)
    assert report["behindSeconds"] == 0.0
    assert "feed" not in report
    assert report["epoch"] == 0


def test_progress_of_one_feed_is_as_before(feeds: Feeds) -> None:
    publish(feeds.first, 20)
    engine = feeds.query(url=feeds.first.url)
    engine.run()
    reader: Any = engine.reader
    report = reader.reportLatestOffset()
    assert report["feed"] == feeds.first.url
    assert "feeds" not in report


def test_epoch_has_about_as_many_tasks_as_one_of_a_single_feed(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path.as_uri())
    feeds.first, feeds.second = feeds.both = [Publisher(partitions=64), Publisher(partitions=64)]
    with feeds.first.serve(), feeds.second.serve():
        for publisher in feeds.both:
            for partition in range(64):
                publisher.append(partition, {"entity": str(partition), "n": 1})
        reader = feeds.reader()
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert len(reader.partitions(start, end)) == 32


def test_connection_goes_on_from_an_earlier_discovery(feeds: Feeds) -> None:
    with FeedConnection(parse_options({"url": str(feeds.first.url)})) as connection:
        info = connection.discover()
    feeds.first.clear_requests()
    with FeedConnection(parse_options({"url": str(feeds.first.url)})) as connection:
        connection.restore(info)
        assert connection.fetch_options.selection() == {}
        assert connection.info is info
    assert feeds.first.requests == []
