"""`FileTable`: a folder of files.

A micro-batch is the folder ``feed=<name>/query=<id>/batch=<number>``, which appears as a whole and
is never changed (see `feedapi_client.spark.ingest.publishing`). Spark reads those names as columns.
What can't be changed later is noted in the folder ``_feedapi/table``, one line for each change.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from obstore.exceptions import BaseError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from feedapi_client.spark.ingest.checkpoint import (
    READING,
    VERSION,
    WRITING,
    checked_note,
    contents,
    paths,
    write_note,
)
from feedapi_client.spark.ingest.ingest_errors import plain_message
from feedapi_client.spark.ingest.ingest_table import Identity, Table
from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.ingest.names import as_url, folded, in_folder, unquoted
from feedapi_client.spark.ingest.publishing import Decisions, TableFolder, WrittenFiles, open_folder
from feedapi_client.spark.source import is_connect
from feedapi_client.spark.staging.location import harmless, reason

_NOTES = "_feedapi/table"
_ATTEMPTS = "_feedapi/attempts"
_FEEDS = "_feedapi/feeds"
"""Files 0, 1, ... of each feed, with the query that wrote first, the one that wrote next, ...

For a query that goes on where those before it ended, it is the run that it began with."""
_RESUMED = "-resumed"
"""Follows the number of such a run."""
_ATTEMPT = re.compile(r"(\d+)-(\d+)-")


class FileTable(Table):
    """One folder. Writing from several queries at once is safe: each has its own folders."""

    _uri = ""
    _noted: StructType | None = None
    """The columns of the last micro-batch that was written; the URI is known then."""

    def check(self, spark: SparkSession, who: Identity, schema: StructType | None) -> None:
        """Raise `IngestError` when the query must not write here. No schema: a transform's."""
        noted, uri = _notes(spark, self.name)
        if who.query is None:
            self._check_new(spark, who)
        else:
            self._check_query(spark, who, noted.get("queries", {}).get(who.query))
            self.check_old_checkpoint(who, self._last_batch(spark, who, uri))
        self._compare(spark, noted, schema, who)
        self._try_out(spark, schema)
        if "://" in self.name and not is_connect(spark):
            open_folder(self.name)

    def _try_out(self, spark: SparkSession, schema: StructType | None) -> None:
        """Raise `IngestError` when no folder can have these columns and writer options.

        Spark says so only when it writes: an empty folder, beside the checkpoint.
        """
        if not self.job.writer_options:
            return
        place = f"{self.job.checkpoint_location.rstrip('/')}/feedapi/tried/{self.role}"
        rows = spark.createDataFrame([], schema or StructType().add("n", "int")).write
        options = {**self.job.writer_options, **WRITING}
        try:
            rows.format(self.job.format).options(**options).mode("overwrite").save(place)
        except PySparkException as error:
            what = ", ".join(["these columns", *self.job.writer_options])
            raise IngestError(
                f"{self.name} can't be written with {what}: {plain_message(error)}"
            ) from error

    def _check_query(self, spark: SparkSession, who: Identity, feed: str | None) -> None:
        """Raise when the batches of a query that ran before are not here."""
        if feed == who.feed or self._found(spark, who):
            return
        if feed is not None or self._found(spark, who, feed="*"):
            self.refuse_other_feed(who)
        self.check_missing(who)
        self._check_new(spark, who)

    def _check_new(self, spark: SparkSession, who: Identity) -> None:
        """Raise when others wrote what a new query would write again."""
        if not self.may_add(who) and self._found(spark, who, query="*"):
            self.refuse_new_query(who)

    def _found(self, spark: SparkSession, who: Identity, **any: str) -> bool:
        """Whether there is a folder of the query. Lists it, which takes long for large tables."""
        feed = any.get("feed", in_folder(who.feed))
        query = any.get("query", who.query)
        folder = f"{who.column('feed')}={feed}/{who.column('query')}={query}"
        return bool(paths(spark, f"{self.name}/{folder}"))

    def write(self, rows: DataFrame, who: Identity, number: int) -> list[WrittenFiles]:
        """Write an attempt of a micro-batch. Readers see it when it is published."""
        spark = rows.sparkSession
        before: dict[str, Any] | None = None
        if rows.schema != self._noted:
            before, self._uri = _notes(spark, self.name)
            self._compare(spark, before, rows.schema, who)
            if before:
                self._take_place(spark, who)
            self._delete_old_attempts(spark, who, number)
        options = {**self.job.writer_options, **WRITING}
        writer = rows.write.format("parquet").options(**options)
        if self.partition_by:
            writer = writer.partitionBy(*self.partition_by)
        name = f"{number}-{who.epoch}-{uuid.uuid4().hex[:8]}"
        attempt = f"{_ATTEMPTS}/{who.query}/{name}"
        writer.save(f"{self.name}/{attempt}")
        if before is not None:  # what a write that failed would have noted can't be changed later
            self._uri = self._note(spark, rows.schema, who, before)
            self._noted = rows.schema
            if not self._uri:
                raise IngestError(
                    f"{self.name} does not show the note just written to {_NOTES}: what this "
                    "session sets hides its files"
                )
            if not before:  # only now is the folder there, and its URI known
                self._take_place(spark, who)
        final = f"{_folder_of(who)}/{who.column('batch')}={number}"
        return [WrittenFiles(self.role, attempt, final)]

    def publish(self, spark: SparkSession, who: Identity, written: WrittenFiles) -> None:
        """Show readers what was written."""
        folder = self.folder(spark)
        if self._noted is not None and not folder.names(_NOTES):
            raise IngestError(
                f"{self.name} was deleted while the query runs: its events would be missing. Put "
                "it back, or start over with another checkpoint and staging"
            )
        self._take_place(spark, who)
        folder.publish(written.attempt, written.final)

    def _take_place(self, spark: SparkSession, who: Identity) -> None:
        """Take a place behind the queries of the feed, or have one.

        Raises:
            IngestError: another query has it, or goes on from where this one ended.
        """
        folder, places = self.folder(spark), f"{_FEEDS}/feed={in_folder(who.feed)}"
        own, undo = who.run or str(who.query), f"delete {self.name}/{places}"
        place = 0
        while (holder := folder.first(f"{places}/{place}", own)) != own:
            if not self.may_add(who) and not folder.names(_folder_of(who)):
                self.refuse_new_query(who, holder or "?", f"{undo}, too")
            place += 1
        if who.run:
            folder.first(f"{places}/{place}{_RESUMED}", own)
        names = [name for name in folder.names(places) if name.endswith(_RESUMED)]
        newest = max((int(name.removesuffix(_RESUMED)) for name in names), default=-1)
        if newest > place:
            file = f"{newest}{_RESUMED}"
            self.refuse_old_query(who, folder.first(f"{places}/{file}", ""), f"{undo}/{file}")

    def take_over(self, spark: SparkSession, who: Identity) -> None:
        """As `DeltaTable.take_over`. Raises `IngestError` where another run does it, too."""
        if _notes(spark, self.name)[0]:
            self._take_place(spark, who)

    def folder(self, spark: SparkSession) -> TableFolder:
        """Return the folder, for what Spark has no function for. It was written to before."""
        uri = self._uri or _notes(spark, self.name)[1] or unquoted(as_url(self.name))
        return open_folder(uri)

    def _delete_old_attempts(self, spark: SparkSession, who: Identity, number: int) -> None:
        """Delete what runs left that were killed: none of it counts, or it is published."""
        attempts, decisions = f"{_ATTEMPTS}/{who.query}", self._decisions(who)
        with harmless(f"old attempts in {self.name} were not deleted"):
            folder = self.folder(spark)
            for attempt in filter(None, map(_ATTEMPT.match, folder.names(attempts))):
                of, epoch = int(attempt[1]), int(attempt[2])
                again = of == number and epoch < who.epoch
                if of < number or (again and decisions.close(number, epoch)):
                    folder.delete(f"{attempts}/{attempt.string}")

    def _decisions(self, who: Identity) -> Decisions:
        return Decisions(self.job.staging_location, str(who.query))

    def order(self, spark: SparkSession, _: Identity) -> dict[str, int]:
        """Return the queries that wrote here, with numbers that rise in the order they began in."""
        queries = _notes(spark, self.name)[0].get("queries", {})
        return {query: number for number, query in enumerate(queries)}

    def _last_batch(self, spark: SparkSession, who: Identity, uri: str) -> int:
        """Return the last micro-batch of the query that readers see, -1 without one."""
        folder = _folder_of(who)
        if uri and not is_connect(spark):  # whose server reaches the folder, and this need not
            try:
                names = open_folder(uri).names(folder)
            except (BaseError, OSError) as error:
                raise IngestError(f"could not list {self.name}: {reason(error, uri)}") from None
        else:
            files = paths(spark, f"{self.name}/{folder}")
            names = {file.rpartition(f"/{folder}/")[2].partition("/")[0] for file in files}
        batch = re.compile(re.escape(who.column("batch")) + r"=(\d+)")  # others are not ours
        return max((int(found[1]) for found in map(batch.fullmatch, names) if found), default=-1)

    def batches(
        self, spark: SparkSession, who: Identity, numbers: Sequence[int]
    ) -> DataFrame | None:
        """Return the rows of these micro-batches of the query, None when there are none."""
        if not numbers:
            return None
        some = ",".join(map(str, numbers))
        folders = f"{self.name}/{_folder_of(who)}/{who.column('batch')}={{{some}}}"
        # Folders of `partition_by` may lie below, and are columns, seen from the table.
        options = {**READING, "mergeSchema": "false", "basePath": self.name}
        try:
            rows = spark.read.options(**options).parquet(folders)
            _ = rows.schema  # Spark Connect looks at the files only now
        except AnalysisException as error:
            if error.getCondition() in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                return None
            raise
        return rows

    # ------------------------------------------------------------------ what can't be changed

    def _compare(
        self, spark: SparkSession, noted: dict[str, Any], schema: StructType | None, who: Identity
    ) -> None:
        if not noted:
            if schema is not None:  # else a transform may have written here by itself
                self._check_no_other_files(spark, who)
            return
        ours = {"format": self.job.format, "partition_by": self.partition_by, "prefix": who.prefix}
        for name, value in ours.items():
            if noted[name] != value:
                raise IngestError(
                    f"{self.name} was written with {name} {noted[name]!r}, not {value!r}: files "
                    "of both can't be read as one table. Keep it, or write to another folder"
                )
        fold = folded(spark, self.job)
        columns = {fold(name): kind for name, kind in noted["columns"].items()}
        self.check_types(
            columns,
            schema,
            fold,
            "column {} was {} and would become {}: files of both can't be read as one table. "
            "Keep the type, or write to another folder",
        )

    def _check_no_other_files(self, spark: SparkSession, who: Identity) -> None:
        """Raise where readers see files that would not be rows of this table, or hide its rows."""
        ours = [f"/{who.column(name)}=" for name in ("feed", "query", "batch")]
        others = [p for p in paths(spark, self.name) if not all(name in p for name in ours)]
        if others:
            raise IngestError(
                f"{self.name} holds files of another program, such as {others[0]}: they and the "
                "table's own can't be read as one table. Write to another folder"
            )

    def _note(
        self, spark: SparkSession, schema: StructType, who: Identity, before: dict[str, Any]
    ) -> str:
        """Note the columns and the query. Return the URI of the folder as Spark resolves it.

        Arguments:
            before: what was noted before the write, and fits.
        """
        noted, uri = _notes(spark, self.name)
        if noted != before:
            self._compare(spark, noted, schema, who)
        columns = {field.name: field.dataType.simpleString() for field in schema}
        known = noted.get("columns", {})
        if noted and {**known, **columns} == known and who.query in noted["queries"]:
            return uri
        note = {
            "version": VERSION,
            "revision": int(noted["revision"]) + 1 if noted else 0,
            "format": self.job.format,
            "partition_by": self.partition_by,
            "prefix": who.prefix,
            "columns": columns,
            "queries": {who.query: who.feed},
        }
        # A folder for each query: two writes into one would delete each other's temporary files.
        write_note(spark, f"{self.name}/{_NOTES}/{who.query}", note, "append")
        return uri or _notes(spark, self.name)[1]


def _folder_of(who: Identity) -> str:
    """Return the folder of a query's micro-batches within the table."""
    return f"{who.column('feed')}={in_folder(who.feed)}/{who.column('query')}={who.query}"


def _notes(spark: SparkSession, folder: str) -> tuple[dict[str, Any], str]:
    """Return what all notes of a folder say, and its URI as Spark resolves it.

    Without a note these are an empty dictionary, and nothing.
    """
    texts = contents(spark, f"{folder}/{_NOTES}")
    read = [checked_note(line, path) for path, text in texts.items() for line in text.splitlines()]
    noted: dict[str, Any] = {}
    for note in sorted(read, key=lambda note: int(note["revision"])):
        for name in ("columns", "queries"):
            note[name] = {**noted.get(name, {}), **note[name]}
        noted = note
    return noted, next((path.rpartition(f"/{_NOTES}/")[0] for path in texts), "")


def read_table(spark: SparkSession, folder: str) -> DataFrame:
    """Return the rows of a folder of files, with all columns, and values as they were written.

    Spark guesses the type of a value that is in the name of a folder: of `partition_by`, text such
    as ``007`` would be the number 7. The table's own notes say what it is.

    Raises:
        IngestError: `Ingest` did not write the folder.
    """
    folder = folder.rstrip("/")
    noted, _ = _notes(spark, folder)
    if not noted:
        raise IngestError(f"{folder} is no table of feedapi ingest: it has no {_NOTES}")
    reader, prefix = spark.read.options(**READING), noted["prefix"]
    added: dict[str, DataType] = {
        f"{prefix}feed": StringType(),
        f"{prefix}query": StringType(),
        f"{prefix}batch": LongType(),
    }
    columns, types = noted["columns"], dict(added)
    spelled = {name.lower(): name for name in columns}
    for name in noted["partition_by"]:  # may be written in another case than the column
        own = name if name in columns else spelled[name.lower()]
        types[name] = types[own] = DataType.fromDDL(columns[own])
    try:
        found = list(reader.parquet(folder).schema)
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        # No micro-batch left a file: with `partition_by`, one without rows has none.
        kinds = {**{name: DataType.fromDDL(kind) for name, kind in columns.items()}, **added}
        found = [StructField(name, kind) for name, kind in kinds.items()]
    fields = [StructField(field.name, types.get(field.name, field.dataType)) for field in found]
    return reader.schema(StructType(fields)).parquet(folder)
