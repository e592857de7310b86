"""What is checked before the first micro-batch and Spark would not say, or too late.

All else is told by Spark, in its own words, where no rows are written to each table.
"""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from feedapi_client.spark.ingest.job import Ingest, IngestError

_TIMES = "spark.sql.legacy.timeParserPolicy"
_DELTA_JAR = re.compile(r"delta-spark_(\d+\.\d+)_2\.13")


def check_session(spark: SparkSession, job: Ingest) -> None:
    """Raise `IngestError` when the session would change values, or Delta can't work in it."""
    if job.schema and str(spark.conf.get(_TIMES)).upper() == "LEGACY":
        raise IngestError(
            f"this session would change values, such as times of nine digits below the second: "
            f"{_TIMES} is LEGACY. Set it to CORRECTED"
        )
    if not job.is_files:
        _check_delta_version(spark)


def _check_delta_version(spark: SparkSession) -> None:
    """A jar for another release of Spark fails in the first micro-batch only, in Java's words."""
    given = " ".join(
        spark.conf.get(name, "") or "" for name in ("spark.jars", "spark.jars.packages")
    )
    built_for = set(_DELTA_JAR.findall(given))
    here = ".".join(spark.version.split(".")[:2])
    if built_for and here not in built_for:
        raise IngestError(
            f"Delta's jar is built for Spark {', '.join(sorted(built_for))}, and this is Spark "
            f"{spark.version}: take delta-spark_{here}_2.13, or where there is none, the PySpark "
            "that the jar is built for"
        )
