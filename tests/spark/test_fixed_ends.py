"""Batch reads and ``availableNow`` end, also on a feed that grows faster than it is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.spark.batch import Chain, FeedReader
from feedapi_client.spark.source import FeedDataSource
from feedapi_client.spark.source_options import OptionError
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import options_for, query

pytestmark = pytest.mark.slow

Growth = Callable[[], None]


class GrowingFeed(Publisher):
    """A feed that gets more events with each fetch than the answer to that fetch holds."""

    growth = 0
    published = 0

    def respond(self, request: Any) -> Any:
        if request.kind == "fetch":
            self.grow(self.growth)
        return super().respond(request)

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


def read(publisher: Publisher, **given: Any) -> list[int]:
    reader = FeedReader(options_for(publisher, **given))
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
    respond = publisher.respond

    def without(request: Any) -> Any:
        for name in ("pagesizehint", "pageSizeHint"):
            request.query.pop(name, None)
        return respond(request)

    publisher.respond = without  # type: ignore[method-assign]


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
        reader = FeedReader(options_for(publisher))
        (part,) = reader.partitions()
        publisher.extend(0, history)
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
    assert [json.loads(row["data"]) for row in rows[:1005]] == history


def test_end_at_a_checkpoint_is_not_read_beyond(publisher: GrowingFeed) -> None:
    reader = FeedReader(options_for(publisher, startingCursors="first"))
    parts = reader.partitions()
    publisher.checkpoint_every = 1
    publisher.grow(500)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert len(rows) == 1005


@pytest.mark.parametrize("growth", [1, 500])
def test_read_is_cut_at_its_end_and_its_last_cursor_leads_to_the_rest(
    publisher: GrowingFeed, growth: int
) -> None:
    """No checkpoint lies there: neither this read nor the next one begins or ends at another."""
    reader = FeedReader(options_for(publisher))
    parts = reader.partitions()
    publisher.grow(growth)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(json.loads(row["data"])["n"] for row in rows) == list(range(1005))
    last = {str(row["partition"]): row["cursor"] for row in rows}
    later = rows_of(FeedReader(options_for(publisher, startingCursors=json.dumps(last))))
    assert sorted(json.loads(row["data"])["n"] for row in later) == list(range(1005, 1005 + growth))


def cursors(publisher: Publisher, **places: int) -> str:
    """Return option ``endingCursors``: the end of the n-th row of each partition."""
    rows = rows_of(FeedReader(options_for(publisher, pageSizeHint="7")))
    by_partition: dict[str, list[Any]] = {"p0": [], "p1": []}
    for row in rows:
        by_partition[f"p{row['partition']}"].append(row["cursor"])
    return json.dumps({name[1:]: by_partition[name][at] for name, at in places.items()})


def rows_of(reader: FeedReader) -> list[dict[str, Any]]:
    parts = reader.partitions()
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("closed", [False, True])
def test_ending_cursors_bound_a_batch_read(publisher: GrowingFeed, closed: bool) -> None:
    publisher.checkpoint_every = 10
    publisher.growth = 0
    ends = cursors(publisher, p0=200)
    if closed:
        publisher.close(0)
    rows = rows_of(FeedReader(options_for(publisher, endingCursors=ends)))
    first = [row for row in rows if row["partition"] == 0]
    assert first[-1]["cursor"] == json.loads(ends)["0"]
    assert [json.loads(row["data"])["n"] for row in first] == list(range(0, 2 * len(first), 2))
    assert 200 < len(first) < 503
    assert sum(row["partition"] == 1 for row in rows) == 502


def test_ending_cursor_that_no_longer_comes_as_a_checkpoint_is_searched(
    publisher: GrowingFeed,
) -> None:
    publisher.checkpoint_every = 7
    ends = cursors(publisher, p0=20)
    publisher.checkpoint_every = 50
    rows = rows_of(FeedReader(options_for(publisher, endingCursors=ends)))
    first = [row for row in rows if row["partition"] == 0]
    assert first[-1]["cursor"] == json.loads(ends)["0"]
    assert 20 < len(first) < 30


def test_ending_cursor_that_never_comes_is_an_error(publisher: GrowingFeed) -> None:
    unknown = json.dumps({"0": publisher.end_cursor(1)})
    with pytest.raises(OptionError, match=r"endingCursors.*partition 0"):
        rows_of(FeedReader(options_for(publisher, endingCursors=unknown)))


def test_ending_cursor_before_the_start_is_an_error(publisher: GrowingFeed) -> None:
    ends = cursors(publisher, p0=20)
    start = cursors(publisher, p0=200, p1=0)
    with pytest.raises(OptionError, match=r"endingCursors.*partition 0"):
        rows_of(FeedReader(options_for(publisher, startingCursors=start, endingCursors=ends)))


def test_ending_cursor_of_an_unlisted_partition_and_of_a_stream_are_refused(
    publisher: GrowingFeed,
) -> None:
    with pytest.raises(OptionError, match="endingCursors names 7, which the feed does not list"):
        FeedReader(options_for(publisher, endingCursors='{"7": "a"}')).partitions()
    source = FeedDataSource({"url": str(publisher.url), "endingCursors": '{"0": "a"}'})
    with pytest.raises(OptionError, match="bounds a batch read"):
        source.streamReader(source.schema())


def test_scans_of_one_dataframe_see_one_end(publisher: GrowingFeed) -> None:
    publisher.growth = 3
    publisher.checkpoint_every = 1
    source = FeedDataSource({"url": str(publisher.url)})
    first, second = (pickle.loads(pickle.dumps(source)).reader(source.schema()) for _ in "ab")
    plans = [reader.partitions() for reader in (first, second)]
    publisher.growth = 0
    seen = [
        sorted(r["data"] for p in parts for b in first.read(p) for r in b.to_pylist())
        for parts in plans
    ]
    assert seen[0] == seen[1]
    assert sorted(row["data"] for row in rows_of(second)) == seen[0]  # planned once more
    later = rows_of(FeedDataSource(dict(source.options)).reader(source.schema()))
    assert len(later) == publisher.published > len(seen[0])


def test_scans_of_two_dataframes_see_an_end_each(publisher: GrowingFeed) -> None:
    readers = []
    for _ in "ab":
        source = FeedDataSource({"url": str(publisher.url)})
        readers.append(source.reader(source.schema()))
    readers[0].partitions()
    publisher.grow(10)
    assert len(rows_of(readers[1])) == 1015


def test_snapshot_is_not_shared_for_long(
    publisher: GrowingFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FeedDataSource({"url": str(publisher.url)})
    reader = source.reader(source.schema())
    reader.partitions()
    publisher.grow(10)
    monkeypatch.setattr("feedapi_client.spark.batch.SHARED_SECONDS", 0.0)
    assert len(rows_of(reader)) == 1015


def test_read_from_the_end_asks_for_nothing(publisher: GrowingFeed) -> None:
    reader = FeedReader(options_for(publisher, startingCursors="last"))
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
    engine = query(publisher, tmp_path, maxEventsPerPartition="200")
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
        engine = query(publisher, tmp_path)
        publisher.growth = growth
        engine.available_now()
        numbers = [json.loads(row["data"])["n"] for row in engine.all_rows()]
    assert len(numbers) == len(set(numbers))
    assert set(range(1005)) <= set(numbers)
    assert len(numbers) < 50_000, "the run did not end by itself"


def test_available_now_of_an_idle_feed_asks_each_partition_once(
    publisher: GrowingFeed, tmp_path: Path
) -> None:
    engine = query(publisher, tmp_path)
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
        reader = FeedReader(options_for(publisher))
        (part,) = reader.partitions()
        assert isinstance(part, Chain)
        publisher.extend(0, [{"same": True}] * 3)
        publisher.extend(0, [{"later": n} for n in range(20)])
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(rows) >= 533


def test_events_that_repeat_in_a_pattern_are_not_taken_for_the_end() -> None:
    publisher = GrowingFeed(partitions=1, page_size=50, checkpoint_every=10)
    with publisher.serve():
        for _ in range(60):
            publisher.extend(0, [{"state": state} for state in range(20)])
        reader = FeedReader(options_for(publisher))
        (part,) = reader.partitions()
        for _ in range(20):
            publisher.extend(0, [{"state": state} for state in range(20)])
        rows = [row for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(rows) >= 1200
