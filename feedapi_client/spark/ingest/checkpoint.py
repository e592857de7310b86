"""Which streaming query a checkpoint belongs to, and how far it came.

Here are also the options that writes and reads name, because a session may set others.
Read with Spark, so that it works in any file system of the cluster and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.staging.staging_errors import newer_format

READING = {
    "mergeSchema": "true",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "ignoredPathSegmentRegex": "^[._]",
}
"""Options of every read: what would be skipped is a row, or a note, that is there, and what is in
hidden folders are attempts."""
WRITING = {
    "partitionOverwriteMode": "static",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "true",
}
"""Options of every write. With `dynamic` an overwrite leaves what an earlier attempt left, and
without a mark of success a write without rows leaves no folder, as one that got lost."""
VERSION = 1
"""Of the format of the notes beside a checkpoint, and in a folder of files."""


def checked_note(line: str, path: str) -> dict[str, Any]:
    """Return a note. Raises `IngestError` for one of a newer version of this package."""
    note: dict[str, Any] = json.loads(line)
    if note["version"] > VERSION:
        raise IngestError(newer_format(f"the note {path}", note["version"], VERSION))
    return note


def write_note(
    spark: SparkSession, path: str, note: Mapping[str, Any], mode: str = "overwrite"
) -> None:
    """Write a note into a folder of its own, in place of earlier ones or after them."""
    line = spark.createDataFrame([(json.dumps(note),)], "value STRING").coalesce(1)
    line.write.mode(mode).options(**WRITING).text(path)


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
    files = spark.read.format(format).options(**READING, **options)
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


def last(spark: SparkSession, checkpoint: str, log: str) -> int:
    """Return the number of the last micro-batch in a log of the checkpoint, -1 when it is empty.

    Arguments:
        log: ``commits``, or ``offsets`` of those that were begun.
    """
    found = paths(spark, f"{checkpoint.rstrip('/')}/{log}/*")
    names = (path.rpartition("/")[2] for path in found)
    return max((int(name) for name in names if name.isdigit()), default=-1)


def noted(spark: SparkSession, checkpoint: str, name: str) -> dict[str, Any]:
    """Return the last note of that name beside the checkpoint's own files, {} before there is one.

    Arguments:
        name: ``outputs``, the tables that the query writes to, or ``resumed``, the run where it
            begins.
    """
    path = f"{checkpoint.rstrip('/')}/feedapi/{name}"
    lines = read_text(spark, path)
    return checked_note(lines[0], path) if lines else {}


def note(spark: SparkSession, checkpoint: str, name: str, **content: Any) -> None:
    """Write a note that `noted` returns."""
    path = f"{checkpoint.rstrip('/')}/feedapi/{name}"
    write_note(spark, path, {"version": VERSION, **content})
