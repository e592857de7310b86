"""Batch reads and ``availableNow`` end, also on a feed that grows faster than it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.spark.batch import ChainPartition, FeedReader
from feedapi_client.spark.options import SourceOptions, parse_options
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import MicroBatchEngine

pytestmark = pytest.mark.waits

Growth = Callable[[], None]


class GrowingFeed(Publisher):
    """A feed that gets more events with each fetch than the answer to that fetch holds."""

    growth = 0
    published = 0

    def record_request(self, request: Any) -> Any:
        if request.kind == "fetch":
            self.grow(self.growth)
        return super().record_request(request)

    def grow(self, count: int) -> None:
        for n in range(self.published, self.published + count):
            self.append(n % 2, self.payload(n))
        self.published += count

    def payload(self, n: int) -> dict[str, Any]:
        return {"n": n}


class ShuffledFeed(GrowingFeed):
    """The same with several entities, whose events may come in another order each time."""

    def payload(self, n: int) -> dict[str, Any]:
        return {"entity": f"e{n % 7}", "n": n}


def no_last_cursor(response: Any, request: Any, publisher: Any, /) -> Any:
    """A publisher that answers a fetch of ``_last`` without a cursor."""
    if request.cursor == "_last":
        response.body = b""
    return response


@pytest.fixture
def publisher() -> Iterator[GrowingFeed]:
    publisher = GrowingFeed(partitions=2, page_size=50, checkpoint_every=10)
    publisher.grow(1005)
    with publisher.serve():
        yield publisher


def options_of(publisher: Publisher, **given: Any) -> SourceOptions:
    at_once = {"pollInterval": "0.001", "maxPollInterval": "0.001", "availableNowTimeout": "60"}
    return parse_options({"url": str(publisher.url), **at_once, **given})


def read(publisher: Publisher, **given: Any) -> list[int]:
    reader = FeedReader(options_of(publisher, **given))
    numbers = []
    for part in reader.partitions():
        for batch in reader.read(part):
            numbers += [json.loads(row["data"])["n"] for row in batch.to_pylist()]
            assert len(numbers) < 50_000, "the read does not end"
    return sorted(numbers)


@pytest.mark.parametrize("growth", [1, 3, 150, 700])
@pytest.mark.parametrize("listed", ["closed", "always", "never"])
def test_batch_read_of_a_feed_that_grows_with_each_fetch_ends(
    publisher: GrowingFeed, growth: int, listed: Any
) -> None:
    publisher.quirks = Quirks(last_cursor=listed)
    publisher.checkpoint_every = 1
    publisher.growth = growth
    numbers = read(publisher)
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)


@pytest.mark.parametrize("growth", [3, 150, 700])
@pytest.mark.parametrize("listed", ["always", "never"])
def test_batch_read_ends_where_no_checkpoint_lies_at_the_end(
    publisher: GrowingFeed, growth: int, listed: Any
) -> None:
    publisher.quirks = Quirks(last_cursor=listed)
    publisher.growth = growth
    numbers = read(publisher)
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)
    for partition in (0, 1):  # up to one event, without a gap
        found = [n for n in numbers if n % 2 == partition]
        assert found == list(range(partition, found[-1] + 1, 2))


def test_batch_read_that_is_faster_than_a_feed_in_another_order_each_time_ends() -> None:
    """Its cursors are places in an order, and that of the end is not met again."""
    publisher = ShuffledFeed(partitions=2, page_size=50, checkpoint_every=10, seed=3)
    publisher.grow(1005)
    publisher.growth = 1
    with publisher.serve():
        numbers = read(publisher)
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)


def no_page_sizes(publisher: GrowingFeed) -> None:
    """Ignore page sizes, as publishers may."""
    respond = publisher.record_request

    def record(request: Any) -> Any:
        for name in ("pagesizehint", "pageSizeHint"):
            request.query.pop(name, None)
        return respond(request)

    publisher.record_request = record  # type: ignore[method-assign]


def test_batch_read_that_is_faster_than_its_feed_ends_without_page_sizes(
    publisher: GrowingFeed,
) -> None:
    no_page_sizes(publisher)
    publisher.growth = 1
    numbers = read(publisher)
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)


def test_batch_read_that_finds_no_end_is_refused(publisher: GrowingFeed) -> None:
    no_page_sizes(publisher)
    publisher.growth = 10
    with pytest.raises(ProtocolError, match="no end of it can be found") as caught:
        read(publisher)
    assert caught.value.partition in (0, 1)


def test_batch_read_takes_no_repeated_events_for_its_end() -> None:
    """A publisher sends its whole history again: the events behind the end were there before."""
    publisher = GrowingFeed(partitions=1, page_size=50, checkpoint_every=10)
    history = [{"n": n} for n in range(1005)]
    with publisher.serve():
        publisher.extend(0, history)
        reader = FeedReader(options_of(publisher))
        (part,) = reader.partitions()
        publisher.extend(0, history)
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
    assert [json.loads(row["data"]) for row in rows[:1005]] == history


def test_end_at_a_checkpoint_is_not_read_beyond(publisher: GrowingFeed) -> None:
    reader = FeedReader(options_of(publisher, startingCursors="first"))
    parts = reader.partitions()
    publisher.checkpoint_every = 1
    publisher.grow(500)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert len(rows) == 1005


def test_read_from_the_end_asks_for_nothing(publisher: GrowingFeed) -> None:
    reader = FeedReader(options_of(publisher, startingCursors="last"))
    parts = reader.partitions()
    publisher.clear_requests()
    assert [batch for part in parts for batch in reader.read(part)] == []
    assert publisher.counters["fetch"] == 0


def test_publisher_without_an_end_is_read_until_caught_up(publisher: GrowingFeed) -> None:
    publisher.fail(no_last_cursor, times=None)
    assert read(publisher) == list(range(1005))


@pytest.mark.parametrize("growth", [1, 3, 20])
def test_available_now_ends_on_a_feed_that_grows_with_each_fetch(
    publisher: GrowingFeed, tmp_path: Path, growth: int
) -> None:
    options = options_of(publisher, maxEventsPerPartition="200")
    engine = MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))
    publisher.growth = growth
    engine.available_now()
    numbers = [json.loads(row["data"])["n"] for row in engine.all_rows()]
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)
    first_run = len(numbers)
    publisher.growth = 0
    engine.available_now()
    numbers = [json.loads(row["data"])["n"] for row in engine.all_rows()]
    assert sorted(numbers) == list(range(publisher.published))
    assert len(numbers) > first_run


@pytest.mark.parametrize("growth", [1, 3, 20])
def test_available_now_ends_where_each_page_has_another_order(tmp_path: Path, growth: int) -> None:
    publisher = ShuffledFeed(partitions=2, page_size=50, checkpoint_every=10, seed=3)
    publisher.grow(1005)
    with publisher.serve():
        options = options_of(publisher)
        engine = MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))
        publisher.growth = growth
        engine.available_now()
        numbers = [json.loads(row["data"])["n"] for row in engine.all_rows()]
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)
    assert len(numbers) < 50_000, "the run did not end by itself"


def test_available_now_of_an_idle_feed_asks_each_partition_once(
    publisher: GrowingFeed, tmp_path: Path
) -> None:
    options = options_of(publisher)
    engine = MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))
    engine.available_now()
    assert len(list(engine.all_rows())) == 1005
    engine.restart()
    engine.reader.prepareForTriggerAvailableNow()  # type: ignore[attr-defined]
    publisher.clear_requests()
    assert not engine.trigger()
    assert publisher.counters["fetch"] == 2


def test_identical_payloads_are_not_taken_for_the_end(tmp_path: Path) -> None:
    publisher = GrowingFeed(partitions=1, page_size=50, checkpoint_every=10)
    with publisher.serve():
        publisher.extend(0, [{"same": True}] * 30)
        publisher.extend(0, [{"n": n} for n in range(500)])
        publisher.extend(0, [{"same": True}] * 3)
        reader = FeedReader(options_of(publisher))
        (part,) = reader.partitions()
        assert isinstance(part, ChainPartition)
        publisher.extend(0, [{"same": True}] * 3)
        publisher.extend(0, [{"later": n} for n in range(20)])
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(rows) >= 533


def test_events_that_repeat_in_a_pattern_are_not_taken_for_the_end() -> None:
    publisher = GrowingFeed(partitions=1, page_size=50, checkpoint_every=10)
    with publisher.serve():
        for _ in range(60):
            publisher.extend(0, [{"state": state} for state in range(20)])
        reader = FeedReader(options_of(publisher))
        (part,) = reader.partitions()
        for _ in range(20):
            publisher.extend(0, [{"state": state} for state in range(20)])
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(rows) >= 1200
