"""Batch reads and ``availableNow`` end, also on a feed that grows faster than it is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.spark.batch import FeedReader
from feedapi_client.spark.source import FeedDataSource
from feedapi_client.spark.source_options import OptionError
from feedapi_client.testing import Publisher, Quirks
from tests.spark.micro_batches import MicroBatchEngine, options_for, query, rows_of

pytestmark = pytest.mark.slow


class GrowingFeed(Publisher):
    """A feed that gets more events with each fetch than the answer to that fetch holds.

    With `entities` their events may come in another order each time. Page sizes may be `ignored`.
    """

    growth = published = 0
    entities, ignored = False, False

    def respond(self, request: Any) -> Any:
        if request.kind == "fetch":
            self.grow(self.growth)
            for name in ("pagesizehint", "pageSizeHint") if self.ignored else ():
                request.query.pop(name, None)
        return super().respond(request)

    def grow(self, count: int) -> None:
        places = self.open_partitions()
        for n in range(self.published, self.published + count):
            named = {"entity": f"e{n % 7}"} if self.entities else {}
            self.append(places[n % len(places)], {**named, "n": n})
        self.published += count


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[GrowingFeed]:
    publisher = GrowingFeed(partitions=2, page_size=50, checkpoint_every=10, seed=3)
    publisher.vary = publisher.entities = getattr(request, "param", "in order") == "shuffled"
    publisher.grow(1005)
    with publisher.serve():
        yield publisher


SHUFFLED = pytest.mark.parametrize("publisher", ["shuffled"], indirect=True)
"""Its cursors are places in an order, and that of the end is not met again."""


def reader(publisher: Publisher, **given: Any) -> FeedReader:
    return FeedReader(options_for(publisher, **given))


def numbers(rows: Any, partition: int | None = None) -> list[int]:
    of = [row for row in rows if partition in (None, row["partition"])]
    return [json.loads(row["data"])["n"] for row in of]


def check(rows: list[Any]) -> list[int]:
    """Every event of the time of the call is there, once; the feed's order is kept."""
    found = numbers(rows)
    assert len(found) == len(set(found)) < 50_000, "the read does not end"
    assert set(range(1005)) <= set(found)
    return found


# ---------------------------------------------------------------------- batch


@pytest.mark.parametrize(
    ("growth", "every"), [(1, 1), (3, 1), (150, 1), (700, 1), (3, 10), (150, 10), (700, 10)]
)
@pytest.mark.parametrize("listed", ["always", "never"])
def test_batch_read_of_a_feed_that_grows_with_each_fetch_ends(
    publisher: GrowingFeed, growth: int, listed: Any, every: int
) -> None:
    """Also where no checkpoint lies at the end."""
    publisher.quirks = Quirks(last_cursor=listed)
    publisher.checkpoint_every, publisher.growth = every, growth
    rows = rows_of(reader(publisher))
    check(rows)
    for partition in (0, 1):  # up to one event, without a gap
        found = numbers(rows, partition)
        assert found == list(range(partition, found[-1] + 1, 2))


@SHUFFLED
def test_batch_read_that_is_faster_than_a_feed_in_another_order_each_time_ends(
    publisher: GrowingFeed,
) -> None:
    publisher.growth = 1
    check(rows_of(reader(publisher)))


def test_batch_read_without_page_sizes_ends_where_it_is_faster_than_its_feed(
    publisher: GrowingFeed,
) -> None:
    publisher.ignored, publisher.growth = True, 1
    check(rows_of(reader(publisher)))
    publisher.growth = 10
    with pytest.raises(ProtocolError, match="no end of it can be found") as caught:
        rows_of(reader(publisher))
    assert caught.value.partition in (0, 1)


HISTORY = [{"n": n} for n in range(1005)]
SAME, STATES = [{"same": True}], [{"state": state} for state in range(20)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HISTORY, HISTORY),  # a publisher sends its whole history again
        (SAME * 30 + HISTORY[:500] + SAME * 3, SAME * 3 + [{"later": n} for n in range(20)]),
        (STATES * 60, STATES * 20),
    ],
)
def test_payloads_that_repeat_are_not_taken_for_the_end(before: Any, after: Any) -> None:
    publisher = Publisher(partitions=1, page_size=50, checkpoint_every=10)
    with publisher.serve():
        publisher.extend(0, before)
        batch = reader(publisher)
        parts = batch.partitions()
        publisher.extend(0, after)
        rows = rows_of(batch, parts)
    assert [json.loads(row["data"]) for row in rows[: len(before)]] == before


@pytest.mark.parametrize(("growth", "every"), [(1, 10), (500, 10), (500, 1)])
def test_read_is_cut_at_its_end_and_its_last_cursor_leads_to_the_rest(
    publisher: GrowingFeed, growth: int, every: int
) -> None:
    """Also where no checkpoint lies there: neither read begins or ends at another."""
    batch = reader(publisher)
    parts = batch.partitions()
    publisher.checkpoint_every = every
    publisher.grow(growth)
    rows = rows_of(batch, parts)
    assert sorted(numbers(rows)) == list(range(1005))
    last = json.dumps({str(row["partition"]): row["cursor"] for row in rows})
    later = rows_of(reader(publisher, startingCursors=last))
    assert sorted(numbers(later)) == list(range(1005, 1005 + growth))


def cursors(publisher: Publisher, **places: int) -> str:
    """Return a value of ``endingCursors``: the end of the n-th row of each partition."""
    rows = rows_of(reader(publisher, pageSizeHint="7"))
    of = {f"p{p}": [row["cursor"] for row in rows if row["partition"] == p] for p in (0, 1)}
    return json.dumps({name[1:]: of[name][at] for name, at in places.items()})


@pytest.mark.parametrize(
    ("every", "now", "at", "closed"),
    [(10, 10, 200, False), (10, 10, 200, True), (7, 50, 20, False)],
)
def test_ending_cursors_bound_a_batch_read(
    publisher: GrowingFeed, every: int, now: int, at: int, closed: bool
) -> None:
    """Also where the cursor no longer comes as a checkpoint: it is searched."""
    publisher.checkpoint_every = every
    ends = cursors(publisher, p0=at)
    publisher.checkpoint_every = now
    if closed:
        publisher.close(0)
    rows = rows_of(reader(publisher, endingCursors=ends))
    found = numbers(rows, 0)
    assert [row["cursor"] for row in rows if row["partition"] == 0][-1] == json.loads(ends)["0"]
    assert found == list(range(0, 2 * len(found), 2))
    assert at < len(found) < at + 10
    assert len(numbers(rows, 1)) == 502


def test_ending_cursor_that_does_not_come_is_an_error(publisher: GrowingFeed) -> None:
    start = {"startingCursors": cursors(publisher, p0=200, p1=0)}
    for given, message in (
        ({"endingCursors": json.dumps({"0": publisher.end_cursor(1)})}, "endingCursors.*partiti"),
        ({"endingCursors": cursors(publisher, p0=20), **start}, "endingCursors.*partition 0"),
        ({"endingCursors": '{"7": "a"}'}, "endingCursors names 7, which the feed does not list"),
    ):
        with pytest.raises(OptionError, match=message):
            rows_of(reader(publisher, **given))
    source = FeedDataSource({"url": str(publisher.url), "endingCursors": '{"0": "a"}'})
    with pytest.raises(OptionError, match="bounds a batch read"):
        source.streamReader(source.schema())


def test_scans_of_one_dataframe_see_one_end_for_an_hour(
    publisher: GrowingFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.growth, publisher.checkpoint_every = 3, 1
    source = FeedDataSource({"url": str(publisher.url)})
    first, second = (pickle.loads(pickle.dumps(source)).reader(source.schema()) for _ in "ab")
    plans = [scan.partitions() for scan in (first, second)]
    publisher.growth = 0
    seen = [sorted(numbers(rows_of(first, parts))) for parts in plans]
    assert seen[0] == seen[1] == sorted(numbers(rows_of(second)))  # planned once more
    other = FeedDataSource(dict(source.options)).reader(source.schema())
    assert len(rows_of(other)) == publisher.published > len(seen[0])
    monkeypatch.setattr("feedapi_client.spark.batch.SHARED_SECONDS", 0.0)
    assert len(rows_of(first)) == publisher.published


def test_read_from_the_end_asks_for_nothing(publisher: GrowingFeed) -> None:
    batch = reader(publisher, startingCursors="last")
    parts = batch.partitions()
    publisher.clear_requests()
    assert rows_of(batch, parts) == []
    assert publisher.counters["fetch"] == 0


def test_publisher_without_an_end_is_read_until_caught_up(publisher: GrowingFeed) -> None:
    def no_last_cursor(response: Any, request: Any, publisher: Any, /) -> Any:
        response.body = b"" if request.cursor == "_last" else response.body
        return response

    publisher.fail(no_last_cursor, times=None)
    assert sorted(numbers(rows_of(reader(publisher)))) == list(range(1005))


# ---------------------------------------------------------------------- availableNow


def rows_after_run(engine: MicroBatchEngine) -> list[Any]:
    engine.available_now()
    return list(engine.all_rows())


@pytest.mark.parametrize("growth", [1, 3, 20])
def test_available_now_ends_on_a_feed_that_grows_with_each_fetch(
    publisher: GrowingFeed, tmp_path: Path, growth: int
) -> None:
    engine = query(publisher, tmp_path, maxEventsPerPartition="200")
    publisher.growth = growth
    first_run = check(rows_after_run(engine))
    publisher.growth = 0
    found = numbers(rows_after_run(engine))
    assert sorted(found) == list(range(publisher.published))
    assert len(found) > len(first_run)


@SHUFFLED
@pytest.mark.parametrize("growth", [1, 3, 20])
def test_available_now_ends_where_each_page_has_another_order(
    publisher: GrowingFeed, tmp_path: Path, growth: int
) -> None:
    engine = query(publisher, tmp_path)
    publisher.growth = growth
    check(rows_after_run(engine))


@pytest.mark.parametrize("change", ["token", "split"])
def test_r01_available_now_ends_on_a_growing_feed_that_changed_since_the_last_run(
    publisher: GrowingFeed, tmp_path: Path, change: str
) -> None:
    """The ends are asked for with what the watch has discovered, not with what a plan holds."""
    publisher.quirks = Quirks(last_cursor="closed")
    engine = query(publisher, tmp_path, maxEventsPerPartition="200")
    rows_after_run(engine)
    if change == "split":
        publisher.split(0, into=2, method="starts-after")
    else:
        publisher.rotate_token()
    publisher.grow(200)
    publisher.growth = 30
    assert set(range(1205)) <= set(check(rows_after_run(engine)))


def test_available_now_of_an_idle_feed_asks_each_partition_once(
    publisher: GrowingFeed, tmp_path: Path
) -> None:
    engine = query(publisher, tmp_path)
    assert len(rows_after_run(engine)) == 1005
    engine.restart()
    engine.reader.prepareForTriggerAvailableNow()
    publisher.clear_requests()
    assert not engine.trigger()
    assert publisher.counters["fetch"] == 2
