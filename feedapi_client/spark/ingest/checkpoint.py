"""Which streaming query a checkpoint belongs to, how far it came, and the notes beside it.

Here are also the options that writes and reads name, because a session may set others.
Read with Spark, so that it works in any file system of the cluster and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

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


@dataclass(frozen=True)
class QueryCheckpoint:
    """What a checkpoint says; -1: no micro-batch. Spark never changes the id of the query."""

    query: str | None
    begun: int
    committed: int
    outputs: Mapping[str, Any]
    resumed: Mapping[str, Any]


def read_checkpoint(spark: SparkSession, location: str) -> QueryCheckpoint:
    """Raises `IngestError` where nobody knows its query, or a note is damaged, or newer."""
    query: str | None = None
    last = {"offsets": -1, "commits": -1}
    notes: dict[str, dict[str, Any]] = {"outputs": {}, "resumed": {}}
    location = location.rstrip("/")
    lost = IngestError(
        f"{location}/metadata, which has the id of the query, is missing or damaged: "
        "put the checkpoint back from a backup, or give a new one with --resume-from-table"
    )
    pattern = f"{location}/{{metadata,offsets,commits,feedapi/{{outputs,resumed}}}}"
    for path, text in contents(spark, pattern, "{part-*,metadata,[0-9]*}").items():
        *_, folder, name = path.split("/")
        if name == "metadata":
            try:
                query = str(json.loads(text)["id"])
            except (ValueError, TypeError, KeyError):
                raise lost from None
        elif folder in notes and text:
            notes[folder] = checked_note(text, path)
        elif folder in last and name.isdigit():
            last[folder] = max(last[folder], int(name))
    if query is None and last["offsets"] >= 0:
        raise lost
    if notes["outputs"].get("version") == 1:
        notes["outputs"] = {}
    return QueryCheckpoint(query, last["offsets"], last["commits"], **notes)


def contents(spark: SparkSession, pattern: str, names: str) -> dict[str, str]:
    """Return texts of files by path, also in sub-folders. Other `names` are copies of an editor."""
    options = {**READING, "recursiveFileLookup": "true", "pathGlobFilter": names}
    files = spark.read.format("binaryFile").options(**options)
    # Spark logs a warning with a stack trace for a single path that does not exist. Spark Connect
    # finds that out in `collect`, not in `load`.
    try:
        found = files.load([pattern, pattern]).select("path", "content").collect()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        found = []
    return {row["path"]: bytes(row["content"]).decode().strip() for row in found}


def checked_note(line: str, path: str) -> dict[str, Any]:
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


def note(spark: SparkSession, checkpoint: str, name: str, **content: Any) -> None:
    line = json.dumps({"version": VERSION, **content})
    rows = spark.createDataFrame([(line,)], "value STRING").coalesce(1).write.mode("overwrite")
    path = f"{checkpoint.rstrip('/')}/feedapi/{name}"
    rows.options(**WRITING, compression="none").text(path)
