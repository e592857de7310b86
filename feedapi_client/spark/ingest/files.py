"""`FileTable`: a folder of files.

A micro-batch is the folder ``feed=<name>/query=<id>/batch=<number>``, which a repeated micro-batch
replaces. Spark reads those names as columns. What can't be changed later is noted in the folder
``_feedapi/table``, one line for each change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import paths, read_text
from feedapi_client.spark.ingest.identity import (
    Identity,
    check_missing,
    check_new_query,
    check_other_feed,
)
from feedapi_client.spark.ingest.job import Ingest, IngestError


class FileTable:
    """One folder. Writing from several queries at once is safe: each has its own folders.

    Arguments:
        optional: whether the table may lack batches of its query, which a transform writes.
    """

    def __init__(
        self,
        job: Ingest,
        folder: str,
        partition_by: Sequence[str] = (),
        *,
        optional: bool = False,
    ) -> None:
        self.job = job
        self.folder = folder.rstrip("/")
        self.partition_by = list(partition_by)
        self.optional = optional
        self._prepared = False

    def check(self, spark: SparkSession, who: Identity, schema: StructType | None) -> None:
        """Raise `IngestError` when the query must not write here.

        Arguments:
            schema: columns to be written; None when only a transform decides.
        """
        noted = self._noted(spark)
        if who.query is None:
            if not self.job.append and self._found(spark, who, query="*"):
                check_new_query(self.folder, who.feed)
        else:
            self._check_query(spark, who, noted.get("queries", {}).get(who.query))
        self._compare(noted, schema, who)

    def _check_query(self, spark: SparkSession, who: Identity, feed: str | None) -> None:
        """Raise when the batches of a query that ran before are not here."""
        if feed == who.feed or self._found(spark, who):
            return
        if feed is not None or self._found(spark, who, feed="*"):
            check_other_feed(self.folder, who.feed, str(who.query))
        if who.last_batch >= 0 and not self.optional:
            check_missing(self.folder, who.last_batch)

    def _found(self, spark: SparkSession, who: Identity, **any: str) -> bool:
        """Whether there is a folder of the query. Lists it, which takes long for large tables."""
        feed = any.get("feed", quote(who.feed, safe=""))
        query = any.get("query", who.query)
        folder = f"{who.column('feed')}={feed}/{who.column('query')}={query}"
        return bool(paths(spark, f"{self.folder}/{folder}"))

    def write(self, rows: DataFrame, who: Identity, number: int) -> None:
        """Write a micro-batch in place of an earlier attempt."""
        if not self._prepared:
            self._note(rows.sparkSession, rows.schema, who)
            self._prepared = True
        writer = rows.write.format(self.job.format).mode("overwrite")
        writer = writer.options(**self.job.writer_options)
        if self.partition_by:
            writer = writer.partitionBy(*self.partition_by)
        writer.save(f"{self._of_query(who)}/{who.column('batch')}={number}")

    def batches(
        self, spark: SparkSession, who: Identity, numbers: Sequence[int]
    ) -> DataFrame | None:
        """Return the rows of these micro-batches of the query, None when there are none."""
        if not numbers:
            return None
        some = ",".join(map(str, numbers))
        folders = f"{self._of_query(who)}/{who.column('batch')}={{{some}}}"
        try:
            rows = spark.read.format(self.job.format).load(folders)
            _ = rows.schema  # Spark Connect looks at the files only now
        except AnalysisException as error:
            # A JSON or CSV file without any row has no schema to infer.
            if error.getCondition() in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                return None
            raise
        return rows

    def _of_query(self, who: Identity) -> str:
        feed = f"{who.column('feed')}={quote(who.feed, safe='')}"
        return f"{self.folder}/{feed}/{who.column('query')}={who.query}"

    # ------------------------------------------------------------------ what can't be changed

    def _noted(self, spark: SparkSession) -> dict[str, Any]:
        """Return what all notes say, an empty dictionary without one."""
        lines = read_text(spark, f"{self.folder}/_feedapi/table")
        notes = sorted(map(json.loads, lines), key=lambda note: int(note["revision"]))
        noted: dict[str, Any] = {}
        for note in notes:
            for name in ("columns", "queries"):
                note[name] = {**noted.get(name, {}), **note[name]}
            noted = note
        return noted

    def _compare(self, noted: dict[str, Any], schema: StructType | None, who: Identity) -> None:
        ours = {"format": self.job.format, "partition_by": self.partition_by, "prefix": who.prefix}
        for name, value in ours.items():
            if noted and noted[name] != value:
                raise IngestError(
                    f"{self.folder} was written with {name} {noted[name]!r}, not {value!r}: files "
                    "of both can't be read as one table. Keep it, or write to another folder"
                )
        for field in schema or ():
            before = noted.get("columns", {}).get(field.name)
            if before not in (None, field.dataType.simpleString()):
                raise IngestError(
                    f"{self.folder}: column {field.name} was {before} and would become "
                    f"{field.dataType.simpleString()}: files of both can't be read as one table. "
                    "Keep the type, or write to another folder"
                )

    def _note(self, spark: SparkSession, schema: StructType, who: Identity) -> None:
        noted = self._noted(spark)
        self._compare(noted, schema, who)
        columns = {field.name: field.dataType.simpleString() for field in schema}
        known = noted.get("columns", {})
        if noted and {**known, **columns} == known and who.query in noted["queries"]:
            return
        note = {
            "version": 1,
            "revision": int(noted["revision"]) + 1 if noted else 0,
            "format": self.job.format,
            "partition_by": self.partition_by,
            "prefix": who.prefix,
            "columns": columns,
            "queries": {who.query: who.feed},
        }
        line = spark.createDataFrame([(json.dumps(note),)], "value STRING")
        line.coalesce(1).write.mode("append").text(f"{self.folder}/_feedapi/table")
