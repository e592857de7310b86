"""Several feeds as the union of a load of each, with a column that tells them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from feedapi_client.testing import Publisher
from tests.spark import driver
from tests.spark.micro_batches import Row, problems, publish

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


def wrong(publishers: list[Publisher], rows: list[Row]) -> list[str]:
    """What is lost, doubled or out of order, feed by feed."""
    by_feed: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_feed[row["feed"]].append(row)
    found = [p for one in publishers for p in problems(by_feed[str(one.url)], one.payloads())]
    return found + sorted(by_feed.keys() - {str(one.url) for one in publishers})


@pytest.mark.spark
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.slow
def test_stream_of_two_feeds_is_exact_through_a_failure_and_a_split(
    spark: SparkSession, publishers: list[Publisher], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "sink": "foreach",
        "options": {
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
