"""A streaming query in a process of its own, to be killed: ``python -m tests.spark.pipeline '{"url": ..., ...}'``.

The sink ``parquet`` is Spark's own; ``foreach`` writes each batch under its number, in place of an earlier attempt. ``die`` ends the process with SIGKILL
within batch ``at``: "read" (fetched and staged, nothing written), "written" (before Spark commits the batch), or "next" (after that).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from feedapi_client.spark import FeedDataSource
from tests.spark.refetching import RefetchingSource


def session(master: str) -> SparkSession:
    builder: Any = SparkSession.builder
    return (
        builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "600m")
        .config("spark.executor.memory", "1024m")
        .config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.numRecentProgressUpdates", "20")
        .config("spark.task.maxFailures", "8")
        .config("spark.executorEnv.PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        .getOrCreate()
    )


def orphan_watch() -> None:
    """No test is left: neither shall be its query."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    end()


def main(given: dict[str, Any]) -> None:
    threading.Thread(target=orphan_watch, daemon=True).start()
    spark = session(given["master"])
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(FeedDataSource)
    spark.dataSource.register(RefetchingSource)
    stream = spark.readStream.format(given["format"]).options(**given["options"]).load()
    writer = stream.writeStream.option("checkpointLocation", given["checkpoint"])
    if given["sink"] == "parquet":
        writer = writer.format("parquet").option("path", given["output"])
    else:
        writer = writer.foreachBatch(lambda batch, number: write(given, batch, number))
    trigger = {"availableNow": True} if given.get("finish") else {"processingTime": "0 seconds"}
    query = writer.trigger(**trigger).start()
    print("started", flush=True)
    query.awaitTermination()
    spark.stop()


def write(given: dict[str, Any], batch: DataFrame, number: int) -> None:
    at, die = given.get("at", -1), given.get("die")
    if die == "next" and number == at + 1:
        end()
    if die == "read" and number == at:
        batch.count()
        end()
    batch.write.mode("overwrite").parquet(f"{given['output']}/batch={number}")
    if die == "written" and number == at:
        end()


def end() -> None:
    os.killpg(0, signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
