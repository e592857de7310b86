"""Start at a time: what comes before it is dropped, once and for all, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.batch import FeedReader
from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.fetch import PartitionReader
from feedapi_client.spark.plan.epoch_planner import EpochPlanner
from feedapi_client.spark.source_options import OptionError, SourceOptions, parse_options
from feedapi_client.spark.start_time import microseconds, parse_timestamp
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.spark.target import Target
from feedapi_client.testing import Publisher
from tests.spark.micro_batches import Crash, MicroBatchEngine

URL = "https://service/feed"
START = 1_000


def event(n: int, time: Any) -> dict[str, Any]:
    return {"n": n, "meta": {"at": time}}


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=20, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def options_of(publisher: Publisher, **given: str) -> SourceOptions:
    start = {"startingTimestamp": str(START), "eventTime": "$.meta.at"}
    polls = {"pollInterval": "0.001", "maxPollInterval": "0.001", "settleTime": "0.01"}
    return parse_options({"url": str(publisher.url), **start, **polls, **given})


def engine_of(publisher: Publisher, staging: Path, **given: str) -> MicroBatchEngine:
    options = options_of(publisher, **given)
    return MicroBatchEngine(lambda: FeedStreamReader(options, staging.as_uri()))


def numbers(rows: Any) -> list[int]:
    return [json.loads(row["data"])["n"] for row in rows]


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1767225600000", 1_767_225_600_000_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600_000_000),
        ("2026-01-01T01:00:00.5+01:00", 1_767_225_600_500_000),
        ("2026-01-01T00:00:00", 1_767_225_600_000_000),
        ("2026-01-01", 1_767_225_600_000_000),
        ("1969-12-31T23:59:59Z", -1_000_000),
    ],
)
def test_start_is_milliseconds_or_iso_8601(given: str, expected: int) -> None:
    assert parse_timestamp(given) == expected


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1.5, "s", 1_500_000),
        (7, "us", 7),
        ("7", "ms", 7_000),
        (True, "ms", None),
        (None, "ms", None),
        ("soon", "ms", None),
        ("9" * 5000, "ms", None),
        ({}, "ms", None),
        ([], "ms", None),
    ],
)
def test_time_of_an_event_is_a_number_or_text(value: Any, unit: str, expected: int | None) -> None:
    assert microseconds(value, unit) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"startingTimestamp": "yesterday"}, "startingTimestamp must be milliseconds since 1970"),
        ({"startingTimestamp": "0"}, "startingTimestamp needs eventTime"),
        ({"eventTime": "at"}, "eventTime needs startingTimestamp"),
        ({"missingEventTime": "skip"}, "missingEventTime needs startingTimestamp"),
        ({"startingTimestamp": "0", "eventTime": "$.a[0]"}, "eventTime must be the path"),
        ({"startingTimestamp": "0", "eventTime": "a", "eventTimeUnit": "h"}, "s or ms or us"),
        (
            {"startingTimestamp": "0", "eventTime": "a", "startingCursors": "last"},
            "startingTimestamp and startingCursors exclude each other",
        ),
    ],
)
def test_options_that_make_no_start_are_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError, match="option") as caught:
        parse_options({"url": URL, **given})
    assert problem in str(caught.value)


# ---------------------------------------------------------------------- one partition


def test_all_is_kept_from_the_first_event_at_or_after_the_start(publisher: Publisher) -> None:
    times = [*range(985, 1_005), 3, "1970-01-01T00:00:00Z", None, 2_000]
    publisher.extend(0, [event(n, time) for n, time in enumerate(times)])
    with FeedConnection(options_of(publisher)) as connection:
        kept: list[CheckpointedEvents] = []
        reader = PartitionReader(connection, Target(0, "_first", seek=True))
        result = reader.read(kept.append)
    found = [one.json()["n"] for batch in kept for one in batch.events]
    assert found == list(range(15, len(times)))
    assert (result.started, result.skipped, result.events) == (True, 15, len(found))


def test_dropped_events_count_for_the_limit_of_an_epoch(publisher: Publisher) -> None:
    publisher.extend(0, [event(n, n) for n in range(100)])
    with FeedConnection(options_of(publisher)) as connection:
        result = PartitionReader(connection, Target(0, "_first", seek=True), limit=30).read()
    assert (result.started, result.skipped, result.events) == (False, 30, 0)


@pytest.mark.parametrize("time", [None, "soon", {"nested": 3}])
def test_event_without_a_time_before_the_start_is_an_error(
    publisher: Publisher, time: object
) -> None:
    publisher.extend(0, [event(0, 1), event(1, time), event(2, START)])
    with FeedConnection(options_of(publisher)) as connection:
        reader = PartitionReader(connection, Target(0, "_first", seek=True))
        with pytest.raises(ProtocolError, match=r"has no time at \$\.meta\.at") as caught:
            reader.read()
    assert caught.value.partition == 0


def test_event_without_a_time_before_the_start_is_dropped_on_request(publisher: Publisher) -> None:
    publisher.extend(0, [event(0, 1), event(1, None), event(2, START), event(3, None)])
    publisher.extend(1, [{"n": 4}, {"n": 5}])
    parts = FeedReader(options_of(publisher, missingEventTime="skip"))
    rows = [r for part in parts.partitions() for b in parts.read(part) for r in b.to_pylist()]
    assert numbers(rows) == [2, 3]


def test_batch_read_starts_at_the_time_in_each_partition(publisher: Publisher) -> None:
    publisher.extend(0, [event(n, 990 + n) for n in range(30)])
    publisher.extend(1, [event(100 + n, n) for n in range(30)])
    reader = FeedReader(options_of(publisher))
    parts = reader.partitions()
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert numbers(rows) == list(range(10, 30))
    assert [row["sequence"] for row in rows] == list(range(20))


# ---------------------------------------------------------------------- a query


@pytest.mark.parametrize("point", ["planned", "logged", "staged", "sunk"])
def test_crashes_and_restarts_change_nothing(
    publisher: Publisher, tmp_path: Path, point: str
) -> None:
    """Epochs are smaller than the history: most only drop, one begins in its middle."""
    for partition in (0, 1):
        publisher.extend(partition, [event(100 * partition + n, 945 + n) for n in range(90)])
    engine = engine_of(publisher, tmp_path, maxEventsPerPartition="20")
    engine.reread = 2
    left = 4

    def crash_at(reached: str) -> None:
        nonlocal left
        if reached == point and left:
            left -= 1
            raise Crash

    engine.crash_at = crash_at
    engine.run()
    assert left == 0
    rows = list(engine.all_rows())
    assert sorted(numbers(rows)) == [*range(55, 90), *range(155, 190)]
    for partition in (0, 1):
        assert [r["sequence"] for r in rows if r["partition"] == partition] == list(range(35))


def test_r07_what_comes_after_the_present_end_is_kept_whatever_its_time(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.extend(0, [event(n, n) for n in range(5)])  # partition 1 is empty
    engine = engine_of(publisher, tmp_path)
    engine.run()
    assert list(engine.all_rows()) == []
    engine.restart()
    publisher.append(0, event(10, 3))
    publisher.append(1, event(11, 3))
    engine.run()
    assert sorted(numbers(engine.all_rows())) == [10, 11]


def test_children_of_the_first_discovery_seek_and_later_ones_do_not(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.extend(0, [event(n, n) for n in range(5)])
    publisher.split(0, into=(2, 3))
    publisher.extend(2, [event(10, 20), event(11, START), event(12, 20)])
    engine = engine_of(publisher, tmp_path, discoveryInterval="0.001")
    engine.run()
    assert numbers(engine.all_rows()) == [11, 12]
    publisher.split(2, into=(4,))
    publisher.append(4, event(13, 20))
    engine.restart()
    engine.run()
    assert numbers(engine.all_rows()) == [11, 12, 13]


def test_r09_successor_goes_on_seeking_where_its_ancestor_did(publisher: Publisher) -> None:
    publisher.extend(0, [event(n, n) for n in range(50)])
    with FeedConnection(options_of(publisher)) as connection:
        planner = EpochPlanner(connection.options, [connection])
        plan = planner.next_plan(20)
        assert plan is not None
        assert plan.feeds[0].seeking == [0]  # a poll found the end of the empty partition 1
        task = plan.feeds[0].task(0, 0, connection.fetch_options)
        results = [PartitionReader(connection, t, limit=20).read() for t in task.targets]
        publisher.split(0, into=(2, 3), method="cursor-from")
        connection.discover()
        restored = EpochPlanner(connection.options, [connection], plan)
        restored.add_results({plan.feeds[0].feed: results}, fresh=False)
        after = restored.next_plan(20)
        assert after is not None
        assert 3 in after.feeds[0].seeking  # which has the rest of 0
        assert 2 not in after.feeds[0].seeking  # which has none
        assert restored.summary()["seekingPartitions"] == 1


def test_end_of_the_search_is_kept_over_a_restart(publisher: Publisher) -> None:
    """A poll found the end of an empty partition: the next plan says so, and has no rows."""
    with FeedConnection(options_of(publisher)) as connection:
        planner = EpochPlanner(connection.options, [connection])
        plan = planner.next_plan(20)
        assert plan is not None
        assert plan.feeds[0].groups == []
        assert plan.feeds[0].seeking == []
        assert planner.summary()["seekingPartitions"] == 0
        assert planner.next_plan(20) is None
