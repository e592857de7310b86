"""Several feeds in one query on a real Spark, through SIGKILL of the driver."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException, PySparkException

from feedapi_client.testing import Publisher
from tests.spark import driver
from tests.spark.micro_batches import Row, problems
from tests.spark.processes import DriverProcess
from tests.spark.sessions import LOCAL
from tests.spark.slow_workers import despite_slow_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT = 600.0

pytestmark = [pytest.mark.spark, pytest.mark.timeout(TIMEOUT)]


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


def urls(publishers: list[Publisher]) -> str:
    return "\n".join(str(publisher.url) for publisher in publishers)


def wrong(publishers: list[Publisher], rows: list[Row]) -> list[str]:
    """What is lost, doubled or out of order, feed by feed."""
    by_feed: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_feed[row["feed"]].append(row)
    found = [p for one in publishers for p in problems(by_feed[str(one.url)], one.payloads())]
    return found + sorted(by_feed.keys() - {str(one.url) for one in publishers})


def test_batch_of_two_feeds_has_a_feed_column(
    spark: SparkSession, publishers: list[Publisher]
) -> None:
    publishers[1].split(0, into=2, method="starts-after")
    publish(publishers[1], 200)
    table = spark.read.format("feedapi").option("urls", urls(publishers)).load()
    assert table.columns[:2] == ["feed", "partition"]
    assert not table.schema["feed"].nullable
    rows = despite_slow_workers(table.orderBy("feed", "depth", "sequence").collect)
    assert wrong(publishers, [row.asDict() for row in rows]) == []


def test_url_without_the_option_has_the_columns_it_had(
    spark: SparkSession, publishers: list[Publisher]
) -> None:
    reader = spark.read.format("feedapi").option("url", publishers[0].url)
    columns = ["partition", "cursor", "sequence", "data", "headers", "depth"]
    assert reader.load().columns == columns
    assert reader.option("feedColumn", "true").load().columns == ["feed", *columns]


def test_url_and_urls_exclude_each_other(spark: SparkSession, publishers: list[Publisher]) -> None:
    reader = spark.read.format("feedapi").option("urls", urls(publishers))
    with pytest.raises((AnalysisException, PySparkException), match="exclude each other"):
        _ = reader.load(str(publishers[0].url)).columns


@pytest.mark.slow
def test_stream_of_two_feeds_is_exact_through_a_kill_and_a_split(
    spark: SparkSession, publishers: list[Publisher], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "master": LOCAL,
        "format": "feedapi",
        "sink": "foreach",
        "options": {
            "urls": urls(publishers),
            "stagingLocation": (tmp_path / "staging").as_uri(),
            "maxEventsPerPartition": "60",
        },
        "checkpoint": str(tmp_path / "checkpoint"),
        "output": str(tmp_path / "output"),
    }
    killed = DriverProcess([json.dumps({**given, "die": "written", "at": 1})], tmp_path / "log")
    try:
        assert killed.wait(TIMEOUT) == -signal.SIGKILL, killed.log()
    finally:
        killed.kill()
    publishers[1].split(0, into=2, method="starts-after")
    for publisher in publishers:
        publish(publisher, 200)
    driver.run(spark, {**given, "finish": True})
    files = sorted((tmp_path / "output").glob("batch=*/*.parquet"))
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    assert wrong(publishers, rows) == []
