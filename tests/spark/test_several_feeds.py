"""Several feeds as the union of a load of each, with a column that tells them apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from feedapi_client.testing import Publisher
from tests.spark import driver
from tests.spark.micro_batches import problems, publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_stream_of_two_feeds_is_exact_through_a_failure_and_a_split(
    spark: SparkSession, tmp_path: Path
) -> None:
    feeds = [Publisher(partitions=2, page_size=100, checkpoint_every=20, seed=n) for n in (1, 2)]
    for feed in feeds:
        publish(feed, 300)
    with feeds[0].serve() as one, feeds[1].serve() as other:
        given: dict[str, Any] = {
            "sink": "foreach",
            "options": {
                "stagingLocation": (tmp_path / "staging").as_uri(),
                "maxEventsPerPartition": "60",
                "settleTime": "0.5",
            },
            "urls": [str(one), str(other)],
            "checkpoint": str(tmp_path / "checkpoint"),
            "output": str(tmp_path / "output"),
        }
        with pytest.raises(StreamingQueryException, match="after the sink has written"):
            driver.run(spark, {**given, "die": "error", "at": 1})
        feeds[1].split(0, into=2, method="starts-after")
        for feed in feeds:
            publish(feed, 200)
        driver.run(spark, {**given, "finish": True})
    files = sorted((tmp_path / "output").glob("batch=*/*.parquet"))
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    assert {row["feed"] for row in rows} == set(given["urls"])
    for url, feed in zip(given["urls"], feeds, strict=True):
        assert problems((row for row in rows if row["feed"] == url), feed.payloads()) == []
