"""A Spark driver in a process of its own.

``python -m tests.spark.driver '{"master": ..., "url": ...}'`` runs one query, to be killed. Its
sink ``parquet`` is Spark's own, and ``ingest`` the ready pipeline into folders below the output,
as ``delta`` is into Delta tables.
``foreach`` shows each batch under its number, unless an earlier attempt did. ``die`` ends the
process with SIGKILL in batch ``at``: "read" (fetched and staged, nothing written), "written"
(before Spark commits the batch), or "next" (after that). With "error" the query ends in place of
the process, after the sink has written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery

from feedapi_client.spark import ingest
from feedapi_client.spark.ingest import Ingest
from tests.spark.sessions import OF_SEVERAL, session
from tests.spark.slow_workers import despite_slow_workers


def end_with_parent() -> None:
    """End when the test run is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    end()


def start(spark: SparkSession, given: dict[str, Any]) -> StreamingQuery:
    if given["sink"] == "delta":
        open_database(spark, Path(given["output"]))
    if given["sink"] in ("ingest", "delta"):
        return ingest.start(spark, pipeline(given)).query
    reader = spark.readStream.format("feedapi").options(**given["options"])
    feeds = [reader.load(url).withColumn("feed", F.lit(url)) for url in given.get("urls", ())]
    stream = reduce(DataFrame.union, feeds or [reader.load()])
    writer = stream.writeStream.option("checkpointLocation", given["checkpoint"])
    if given["sink"] == "parquet":
        writer = writer.format("parquet").option("path", given["output"])
    else:
        writer = writer.foreachBatch(lambda batch, number: write(given, batch, number))
    trigger = {"availableNow": True} if given.get("finish") else {"processingTime": "0 seconds"}
    return writer.trigger(**trigger).start()


def pipeline(given: dict[str, Any]) -> Ingest:
    """Every event, those that fit, and those that don't."""
    options = dict(given["options"])
    delta: dict[str, Any] = {}
    if given["sink"] == "delta":
        delta = {"format": "delta", "gold": "killed.gold", "key": ["entity"], "delete_when": "gone"}
    output = "killed." if delta else f"{given['output']}/"
    return Ingest(
        url=options.pop("url"),
        staging=options.pop("stagingLocation"),
        checkpoint=given["checkpoint"],
        bronze=f"{output}bronze",
        output=f"{output}silver",
        rejected=f"{output}rejected",
        schema="entity STRING NOT NULL, n INT, gone BOOLEAN",
        trigger="available-now" if given.get("finish") else "50ms",
        options=options,
        **delta,
    )


def open_database(spark: SparkSession, folder: Path) -> None:
    """Make the database known to a session whose catalog is in memory, with the tables in it."""
    spark.sql(f"CREATE DATABASE IF NOT EXISTS killed LOCATION '{folder}'")
    for log in folder.glob("*/_delta_log"):
        if any(log.glob("*.json")):
            table = log.parent
            spark.sql(
                f"CREATE TABLE IF NOT EXISTS killed.{table.name} USING delta LOCATION '{table}'"
            )


def run(spark: SparkSession, given: dict[str, Any]) -> None:
    """Run the query to its end."""
    despite_slow_workers(lambda: start(spark, given).awaitTermination())


def write(given: dict[str, Any], batch: DataFrame, number: int) -> None:
    at, die = given.get("at", -1), given.get("die")
    if die == "next" and number == at + 1:
        end()
    if die == "read" and number == at:
        batch.count()
        end()
    final = f"{given['output']}/batch={number}"
    attempt = f"{given['output']}/attempt-{uuid.uuid4().hex}"
    batch.write.parquet(attempt)
    with suppress(OSError):  # it is there: of several attempts the first counts
        Path(attempt).rename(final)
    if die == "written" and number == at:
        end()
    if die == "error" and number == at:
        raise RuntimeError("after the sink has written")


def end() -> None:
    os.killpg(0, signal.SIGKILL)
    time.sleep(60)


def main(argument: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    given = json.loads(argument)
    spark = session(given["master"], OF_SEVERAL)
    run(spark, given)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
