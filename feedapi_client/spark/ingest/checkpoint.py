"""Which streaming query a checkpoint belongs to, and how far it came.

Read with Spark, so that it works in any file system of the cluster and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession


def read_text(spark: SparkSession, path: str) -> list[str]:
    """Return the different lines of a file or folder, none when it does not exist."""
    return _read(spark, "text", path, "value", {})


def paths(spark: SparkSession, pattern: str) -> list[str]:
    """Return the paths of the files that match, also in sub-folders."""
    return _read(spark, "binaryFile", pattern, "path", {"recursiveFileLookup": "true"})


def _read(
    spark: SparkSession, format: str, path: str, column: str, options: Mapping[str, str]
) -> list[str]:
    # Spark logs a warning with a stack trace for a single path that does not exist. Spark Connect
    # finds that out in `collect`, not in `load`.
    files = spark.read.format(format).options(**options)
    try:
        return list(
            dict.fromkeys(row[0] for row in files.load([path, path]).select(column).collect())
        )
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return []
        raise


def query_of(spark: SparkSession, checkpoint: str) -> str | None:
    """Return the id of the checkpoint's query, None when no query ran with it.

    Spark writes it before the first micro-batch and never changes it.
    """
    lines = read_text(spark, f"{checkpoint.rstrip('/')}/metadata")
    return str(json.loads(lines[0])["id"]) if lines else None


def last_batch(spark: SparkSession, checkpoint: str) -> int:
    """Return the number of the last committed micro-batch, -1 when there is none."""
    commits = paths(spark, f"{checkpoint.rstrip('/')}/commits/*")
    names = (path.rpartition("/")[2] for path in commits)
    return max((int(name) for name in names if name.isdigit()), default=-1)


def noted_outputs(spark: SparkSession, checkpoint: str) -> list[str] | None:
    """Return the tables that `note_outputs` noted last, None before."""
    lines = read_text(spark, _outputs(checkpoint))
    return list(map(str, json.loads(lines[0]))) if lines else None


def note_outputs(spark: SparkSession, checkpoint: str, tables: Sequence[str]) -> None:
    """Note beside the checkpoint's own files which tables the query writes to."""
    line = spark.createDataFrame([(json.dumps(list(tables)),)], "value STRING")
    line.coalesce(1).write.mode("overwrite").text(_outputs(checkpoint))


def _outputs(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/feedapi/outputs"
