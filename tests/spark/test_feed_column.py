"""Option ``feedColumn``, and several feeds as the union of a load of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import EqualTo, GreaterThan, In

from feedapi_client.spark.batch import FeedReader, FilteringFeedReader
from feedapi_client.spark.source_options import parse_options
from feedapi_client.testing import Publisher
from tests.spark import driver
from tests.spark.micro_batches import Row, problems
from tests.spark.slow_workers import despite_slow_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT = 600.0


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    publishers = [
        Publisher(partitions=2, page_size=100, checkpoint_every=20, seed=n) for n in (1, 2)
    ]
    with publishers[0].serve(), publishers[1].serve():
        for publisher in publishers:
            publish(publisher, 300)
        yield publishers


def publish(publisher: Publisher, count: int) -> None:
    first = len(publisher.payloads())
    for n in range(first, first + count):
        entity = f"e{n % 7}"
        publisher.publish(entity, {"entity": entity, "n": n})


def wrong(publishers: list[Publisher], rows: list[Row]) -> list[str]:
    """What is lost, doubled or out of order, feed by feed."""
    by_feed: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_feed[row["feed"]].append(row)
    found = [p for one in publishers for p in problems(by_feed[str(one.url)], one.payloads())]
    return found + sorted(by_feed.keys() - {str(one.url) for one in publishers})


def rows_of(reader: FeedReader) -> list[dict[str, Any]]:
    parts = reader.partitions()
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_filters_of_a_query_choose_partitions_and_feeds(publishers: list[Publisher]) -> None:
    url = str(publishers[0].url)
    options = parse_options({"url": url, "feedColumn": "true", "pushFilters": "true"})
    reader = FilteringFeedReader(options)
    wanted = [In(("partition",), (1, 7)), EqualTo(("feed",), url)]
    others = [GreaterThan(("partition",), 0), EqualTo(("data",), "x")]
    assert list(reader.pushFilters([*wanted, *others])) == [*wanted, *others]
    assert {row["partition"] for row in rows_of(reader)} == {1}
    other = FilteringFeedReader(options)
    list(other.pushFilters([EqualTo(("feed",), "https://another/feed")]))
    publishers[0].clear_requests()
    assert other.partitions() == []
    assert publishers[0].requests == []


def test_r19_feed_column_names_the_feed_without_its_query(publishers: list[Publisher]) -> None:
    url = str(publishers[0].url)
    reader = FeedReader(parse_options({"url": f"{url}?key=x1", "feedColumn": "true"}))
    assert {row["feed"] for row in rows_of(reader)} == {url}


@pytest.mark.spark
@pytest.mark.timeout(TIMEOUT)
def test_feed_is_a_column_where_the_option_says_so(
    spark: SparkSession, publishers: list[Publisher]
) -> None:
    reader = spark.read.format("feedapi").option("url", publishers[0].url)
    columns = ["partition", "cursor", "sequence", "data", "headers", "depth"]
    assert reader.load().columns == columns
    assert reader.option("feedColumn", "true").load().columns == ["feed", *columns]


@pytest.mark.spark
@pytest.mark.timeout(TIMEOUT)
def test_several_feeds_are_a_union(spark: SparkSession, publishers: list[Publisher]) -> None:
    publishers[1].split(0, into=2, method="starts-after")
    publish(publishers[1], 200)
    reader = spark.read.format("feedapi").options(feedColumn="true", settleTime="0.5")
    first, second = (reader.load(str(publisher.url)) for publisher in publishers)
    rows = despite_slow_workers(first.union(second).orderBy("feed", "depth", "sequence").collect)
    assert wrong(publishers, [row.asDict() for row in rows]) == []


@pytest.mark.spark
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.slow
def test_stream_of_two_feeds_is_exact_through_a_failure_and_a_split(
    spark: SparkSession, publishers: list[Publisher], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "format": "feedapi",
        "sink": "foreach",
        "options": {
            "feedColumn": "true",
            "stagingLocation": (tmp_path / "staging").as_uri(),
            "maxEventsPerPartition": "60",
            "settleTime": "0.5",
        },
        "urls": [str(publisher.url) for publisher in publishers],
        "checkpoint": str(tmp_path / "checkpoint"),
        "output": str(tmp_path / "output"),
    }
    with pytest.raises(StreamingQueryException, match="after the sink has written"):
        driver.run(spark, {**given, "die": "error", "at": 1})
    publishers[1].split(0, into=2, method="starts-after")
    for publisher in publishers:
        publish(publisher, 200)
    driver.run(spark, {**given, "finish": True})
    files = sorted((tmp_path / "output").glob("batch=*/*.parquet"))
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    assert wrong(publishers, rows) == []
