"""A feed as a streaming DataFrame: revenue by minute and the current state of every order.

Both tables are exactly once.

    python examples/spark_pipeline.py                         # against a publisher in this process
    python examples/spark_pipeline.py https://service/orders /data/orders

Events are ``{"entity", "status", "amount", "time"}``. It needs the extras ``spark`` and, without a
URL, ``testing``.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from feedapi_client.spark import FeedDataSource

SCHEMA = "entity STRING, status STRING, amount DOUBLE, time TIMESTAMP"


def orders(spark: SparkSession, url: str, folder: str) -> DataFrame:
    """The feed with typed columns. `depth` and `sequence` tell which event of an order is later."""
    spark.dataSource.register(FeedDataSource)  # not needed where the wheel is installed
    feed = (
        spark.readStream.format("feedapi").option("stagingLocation", f"{folder}/staging").load(url)
    )
    return feed.select("depth", "sequence", F.from_json("data", SCHEMA).alias("event")).select(
        "depth", "sequence", "event.*"
    )


def revenue(events: DataFrame, folder: str) -> StreamingQuery:
    """Paid amounts by minute of event time. A minute is written once it is ten minutes old."""
    paid = events.where("status = 'paid'").withWatermark("time", "10 minutes")
    minutes = paid.groupBy(F.window("time", "1 minute")).agg(
        F.sum("amount").alias("amount"), F.count("*").alias("payments")
    )
    rows = minutes.select(F.col("window.start").alias("minute"), "amount", "payments")
    writer = (
        rows.writeStream.format("parquet").outputMode("append").option("path", f"{folder}/revenue")
    )
    return (
        writer.option("checkpointLocation", f"{folder}/checkpoints/revenue")
        .trigger(availableNow=True)
        .start()
    )


def current_state(events: DataFrame, folder: str) -> StreamingQuery:
    """The latest event of each order.

    Version n of the table is made from version n-1 and micro-batch n, however often that batch is
    attempted.
    """

    def apply(batch: DataFrame, number: int) -> None:
        before = Path(folder, "state", f"version={number - 1}")
        known = [batch.sparkSession.read.parquet(str(before))] if before.exists() else []
        latest = Window.partitionBy("entity").orderBy(F.desc("depth"), F.desc("sequence"))
        everything = known[0].unionByName(batch) if known else batch
        newest = (
            everything.withColumn("rank", F.row_number().over(latest))
            .where("rank = 1")
            .drop("rank")
        )
        newest.write.mode("overwrite").parquet(f"{folder}/state/version={number}")
        shutil.rmtree(Path(folder, "state", f"version={number - 2}"), ignore_errors=True)

    writer = events.writeStream.foreachBatch(apply).option(
        "checkpointLocation", f"{folder}/checkpoints/state"
    )
    return writer.trigger(availableNow=True).start()


def state_table(spark: SparkSession, folder: str) -> DataFrame:
    """The newest version."""
    newest = max(
        Path(folder, "state").glob("version=*"),
        key=lambda version: int(version.name.partition("=")[2]),
    )
    return spark.read.parquet(str(newest)).drop("depth", "sequence")


def pipeline(spark: SparkSession, url: str, folder: str) -> None:
    """Bring both tables up to date. The next call continues there, also after a crash."""
    events = orders(spark, url, folder)
    for query in [revenue(events, folder), current_state(events, folder)]:
        query.awaitTermination()


def main() -> None:
    if len(sys.argv) == 3:
        url, folder = sys.argv[1:]
        pipeline(session(), url, folder)
        return
    from feedapi_client.testing import Publisher

    publisher = Publisher(partitions=2)
    publish(publisher, orders=200)
    with publisher.serve() as url, tempfile.TemporaryDirectory() as folder:
        spark = session()
        pipeline(spark, url, folder)
        publisher.split(0, into=2)
        publish(publisher, orders=200, first=200)
        pipeline(spark, url, folder)
        spark.read.parquet(f"{folder}/revenue").orderBy("minute").show(5, truncate=False)
        state_table(spark, folder).groupBy("status").count().show()
        spark.stop()


def session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark: SparkSession = (
        SparkSession.builder.appName("orders")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    return spark


def publish(publisher, *, orders: int, first: int = 0) -> None:
    """Orders that are created and mostly paid, two a minute."""
    chance = random.Random(first)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(first, first + orders):
        time = begin + timedelta(seconds=30 * number)
        event = {"entity": f"order-{number}", "amount": 10.0 + number % 5}
        publisher.publish(event["entity"], {**event, "status": "created", "time": time.isoformat()})
        if chance.random() < 0.8:
            publisher.publish(
                event["entity"],
                {**event, "status": "paid", "time": (time + timedelta(seconds=20)).isoformat()},
            )


if __name__ == "__main__":
    main()
