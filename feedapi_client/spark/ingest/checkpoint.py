"""Which streaming query a checkpoint belongs to, and how far it came.

Here are also the options that writes and reads name, because a session may set others.
Read with Spark, so that it works in any file system of the cluster and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession

from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.staging import newer_format

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
    "mapreduce.output.basename": "part",
}
"""Options of every write. With `dynamic` an overwrite leaves what an earlier attempt left, without
a mark of success a write without rows leaves no folder, as one that got lost, and files of another
name may be hidden."""
VERSION = 2
"""Of the format of the notes beside a checkpoint. Since 2 the tables are noted by their roles."""


def checked_note(line: str, path: str) -> dict[str, Any]:
    """Return a note. Raises `IngestError` for a damaged one, or one of a newer version."""
    try:
        note: dict[str, Any] = json.loads(line)
        newer = note["version"] > VERSION
    except (ValueError, TypeError, KeyError) as error:
        raise IngestError(
            f"the note {path} is damaged ({type(error).__name__}): put it back from a backup"
        ) from None
    if newer:
        raise IngestError(newer_format(f"the note {path}", note["version"], VERSION))
    return note


def contents(spark: SparkSession, pattern: str, names: str = "{part-*,metadata}") -> dict[str, str]:
    """Return the texts of notes and of a checkpoint's metadata that match, by their paths.

    Arguments:
        names: others are copies of an editor, and the like.
    """
    found = _read(spark, pattern, "path", "content", pathGlobFilter=names)
    return {row["path"]: bytes(row["content"]).decode().strip() for row in found}


def paths(spark: SparkSession, pattern: str) -> list[str]:
    """Return the paths of the files that match, also in sub-folders."""
    return list(dict.fromkeys(row["path"] for row in _read(spark, pattern, "path")))


def _read(spark: SparkSession, pattern: str, *columns: str, **more: str) -> list[Row]:
    # Spark logs a warning with a stack trace for a single path that does not exist. Spark Connect
    # finds that out in `collect`, not in `load`.
    options = {**READING, "recursiveFileLookup": "true", **more}
    files = spark.read.format("binaryFile").options(**options)
    try:
        return files.load([pattern, pattern]).select(*columns).collect()
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return []
        raise


@dataclass(frozen=True)
class QueryCheckpoint:
    """Which query a checkpoint is of, and the notes beside its own files.

    Arguments:
        query: id of the query, None when none ran with it. Spark writes it before the first
            micro-batch and never changes it.
        outputs: the tables that the query writes to.
        resumed: the run where it begins.
    """

    query: str | None
    outputs: Mapping[str, Any]
    resumed: Mapping[str, Any]


def read_checkpoint(spark: SparkSession, location: str) -> QueryCheckpoint:
    """Return what a checkpoint says; nothing where there is none."""
    query: str | None = None
    notes: dict[str, dict[str, Any]] = {"outputs": {}, "resumed": {}}
    pattern = f"{location.rstrip('/')}/{{metadata,feedapi/{{outputs,resumed}}}}"
    for path, text in contents(spark, pattern).items():
        *_, name, file = path.split("/")
        if file == "metadata":
            try:
                query = str(json.loads(text)["id"])
            except (ValueError, TypeError, KeyError):
                raise lost_query(location) from None
        elif name in notes and text:
            notes[name] = checked_note(text, path)
    if notes["outputs"].get("version") == 1:
        notes["outputs"] = {}
    return QueryCheckpoint(query, **notes)


def lost_query(location: str) -> IngestError:
    """Return the error of a checkpoint of which nobody knows the query."""
    return IngestError(
        f"{location.rstrip('/')}/metadata, which has the id of the query, is missing or damaged: "
        "put the checkpoint back from a backup, or give a new one with --resume-from-table"
    )


def last_batches(spark: SparkSession, location: str) -> tuple[int, int]:
    """Return the last micro-batch that was begun, and the last committed; -1 before the first."""
    last = {"offsets": -1, "commits": -1}
    for path in paths(spark, f"{location.rstrip('/')}/{{offsets,commits}}"):
        *_, log, name = path.split("/")
        if name.isdigit() and log in last:
            last[log] = max(last[log], int(name))
    return last["offsets"], last["commits"]


def note(spark: SparkSession, checkpoint: str, name: str, **content: Any) -> None:
    """Write a note of `QueryCheckpoint`, in place of the one before."""
    line = json.dumps({"version": VERSION, **content})
    rows = spark.createDataFrame([(line,)], "value STRING").coalesce(1).write.mode("overwrite")
    path = f"{checkpoint.rstrip('/')}/feedapi/{name}"
    rows.options(**WRITING, compression="none").text(path)
