"""Which streaming query a checkpoint belongs to, and how far it came.

Here are also the options that writes and reads name, because a session may set others.
Read with Spark, so that it works in any file system of the cluster and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from feedapi_client.spark.ingest.job import IngestError

READING = {"mergeSchema": "true", "ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}
"""Options of every read: what would be skipped is a row, or a note, that is there."""
WRITING = {"partitionOverwriteMode": "static"}
"""Options of every write. With `dynamic` an overwrite leaves what an earlier attempt left."""
VERSION = 1
"""Of the format of the notes beside a checkpoint, and in a folder of files."""


def checked_note(line: str, path: str) -> dict[str, Any]:
    """Return a note. Raises `IngestError` for one of a newer version of this package."""
    note: dict[str, Any] = json.loads(line)
    if note["version"] > VERSION:
        raise IngestError(
            f"the note {path} was written by a newer version of feedapi_client (format "
            f"{note['version']}, this one reads up to {VERSION}): run the query with that version"
        )
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


def last_batch(spark: SparkSession, checkpoint: str) -> int:
    """Return the number of the last committed micro-batch, -1 when there is none."""
    return _last(spark, checkpoint, "commits")


def last_offset(spark: SparkSession, checkpoint: str) -> int:
    """Return the number of the last micro-batch that was begun, -1 when there is none."""
    return _last(spark, checkpoint, "offsets")


def _last(spark: SparkSession, checkpoint: str, log: str) -> int:
    found = paths(spark, f"{checkpoint.rstrip('/')}/{log}/*")
    names = (path.rpartition("/")[2] for path in found)
    return max((int(name) for name in names if name.isdigit()), default=-1)


def noted_outputs(spark: SparkSession, checkpoint: str) -> list[str] | None:
    """Return the tables that `note_outputs` noted last, None before."""
    lines = read_text(spark, _outputs(checkpoint))
    if not lines:
        return None
    return list(map(str, checked_note(lines[0], _outputs(checkpoint))["tables"]))


def note_outputs(spark: SparkSession, checkpoint: str, tables: Sequence[str]) -> None:
    """Note beside the checkpoint's own files which tables the query writes to."""
    write_note(spark, _outputs(checkpoint), {"version": VERSION, "tables": list(tables)})


def resumed_run(spark: SparkSession, checkpoint: str) -> str | None:
    """Return the run that `note_resumed` noted, None for a query that began by itself."""
    lines = read_text(spark, _resumed(checkpoint))
    return str(checked_note(lines[0], _resumed(checkpoint))["run"]) if lines else None


def note_resumed(spark: SparkSession, checkpoint: str, run: str) -> None:
    """Note beside the checkpoint's own files where the query begins."""
    write_note(spark, _resumed(checkpoint), {"version": VERSION, "run": run})


def _outputs(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/feedapi/outputs"


def _resumed(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/feedapi/resumed"
