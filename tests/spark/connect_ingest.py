"""Ingests over Spark Connect, in a process of its own.

``python -m tests.spark.connect_ingest '{"url": ..., "output": ...}'`` starts a Spark Connect server
in this process's JVM, connects to it and prints what two runs wrote, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from pyspark.sql import SparkSession

from feedapi_client.spark.ingest import Ingest, MicroBatchError, parquet_table
from tests.spark.sessions import configuration
from tests.spark.slow_workers import run


def no_folder(*arguments: Any) -> Any:
    raise AssertionError(f"the client looks into a folder of the server: {arguments}")


def main(given: dict[str, Any]) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.remote("local[2]")
    for name, value in configuration().items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    results: dict[str, Any] = {"session": type(spark).__module__}
    try:
        results["first"] = asdict(run(spark, Ingest(**given)))
        # The client may lack the server's credentials, and its folders.
        parquet_table.open_folder = no_folder
        results["second"] = asdict(run(spark, Ingest(**given)))
        try:
            run(spark, Ingest(**{**given, "url": "http://127.0.0.1:9/feed", "feed": "x"}))
        except (MicroBatchError, ValueError) as error:
            results["error"] = str(error)
    finally:
        spark.stop()
    sys.stdout.write(f"{json.dumps(results)}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
