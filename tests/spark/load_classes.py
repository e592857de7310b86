"""A short life of Spark, so that a JVM loads the classes that tests need: a program for `jvm`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from feedapi_client.spark.ingest import Ingest
from feedapi_client.testing import Publisher
from tests.spark.slow_workers import run


def main() -> None:
    spark = (
        SparkSession.builder.master("local[2,8]").config("spark.ui.enabled", "false").getOrCreate()
    )
    publisher = Publisher(partitions=2, seed=1)
    for n in range(20):
        publisher.publish(f"e{n % 3}", {"entity": f"e{n % 3}", "n": n, "gone": False})
    with tempfile.TemporaryDirectory() as folder, publisher.serve() as url:
        out = Path(folder)
        job = Ingest(
            url=url,
            output=str(out / "silver"),
            bronze=str(out / "bronze"),
            rejected=str(out / "rejected"),
            schema="entity STRING, n INT, gone BOOLEAN",
            checkpoint=str(out / "checkpoint"),
            staging=(out / "staging").as_uri(),
        )
        assert run(spark, job).rows == 20
        assert spark.read.parquet(str(out / "silver")).groupBy("entity").count().count() == 3
    spark.stop()


if __name__ == "__main__":
    main()
