"""Queries on a busy machine, where a Python worker may need longer than Spark waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pyspark.errors import PySparkException

from feedapi_client.spark import ingest
from feedapi_client.spark.ingest import Ingest, Summary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOW_WORKER = "failed to connect back"
"""Spark gives a Python worker ten seconds to start. No setting changes that."""

T = TypeVar("T")


def despite_slow_workers(query: Callable[[], T]) -> T:
    """Call `query`, which starts one. Call it again when a Python worker was too slow."""
    while True:
        try:
            return query()
        except PySparkException as error:
            if SLOW_WORKER not in str(error):
                raise


def run(spark: SparkSession, job: Ingest) -> Summary:
    """Run the pipeline."""
    return despite_slow_workers(lambda: ingest.run(spark, job))
