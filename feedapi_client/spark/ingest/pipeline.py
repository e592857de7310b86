"""Runs a pipeline: one streaming query that writes each micro-batch to all tables.

Works in a session of Spark itself and over Spark Connect, where micro-batches are written by a
process of the server. That is why a `BatchWriter` reports nothing: what was written is read from
the tables.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import last_batch, note_outputs, noted_outputs, query_of
from feedapi_client.spark.ingest.columns import Rows, empty_rows, payload_schema
from feedapi_client.spark.ingest.errors import MicroBatchError, plain_message
from feedapi_client.spark.ingest.files import FileTable
from feedapi_client.spark.ingest.gold import GoldTable
from feedapi_client.spark.ingest.identity import Identity
from feedapi_client.spark.ingest.job import (
    CORRUPT,
    FILE_FORMATS,
    Ingest,
    IngestError,
    Summary,
    trigger_options,
)
from feedapi_client.spark.ingest.tables import CatalogTable
from feedapi_client.spark.registration import register

_log = logging.getLogger(__name__)

_FILE_SIZE = "spark.sql.adaptive.advisoryPartitionSizeInBytes"


class Tables:
    """The tables of a pipeline, and who writes to them.

    Arguments:
        optional: whether `output` and `gold` may lack batches, which a transform wrote itself.
    """

    def __init__(self, job: Ingest, who: Identity, *, optional: bool = False) -> None:
        kind = FileTable if job.is_files else CatalogTable
        self.who = who  # of tables whose columns are all ours
        self.typed = replace(who, prefix=job.prefix if job.schema else "")
        self.output = kind(job, job.output, job.partition_by, optional=optional)
        self.bronze = kind(job, job.bronze) if job.bronze else None
        self.rejected = kind(job, job.rejected) if job.rejected else None
        self.gold = GoldTable(job, job.gold, optional=optional) if job.gold else None

    def check(self, spark: SparkSession, rows: Rows) -> None:
        """Raise `IngestError` when the query must not write to them."""
        own = rows.job.transform is not None
        output = None if own else rows.output().schema
        self.output.check(spark, self.typed, output)
        if self.gold is not None:
            self.gold.check(spark, self.typed, output)
        if self.bronze is not None:
            self.bronze.check(spark, self.who, rows.bronze().schema)
        if self.rejected is not None:
            self.rejected.check(spark, self.who, rows.rejected().schema)

    def names(self) -> list[str]:
        """The names of all tables."""
        tables = (self.output, self.bronze, self.rejected)
        names = [t.name for t in tables if isinstance(t, CatalogTable)]
        return names + ([self.gold.name] if self.gold else [])


class BatchWriter:
    """The function of ``foreachBatch``. Picklable.

    Each table is written in one commit that replaces what an earlier attempt of the same
    micro-batch left, so that an attempt may end anywhere.
    """

    def __init__(self, job: Ingest, schema: StructType | None) -> None:
        self.job = job
        self.schema = schema
        self._tables: Tables | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch."""
        spark = batch.sparkSession
        if self._tables is None:
            query = query_of(spark, self.job.checkpoint_location)
            if query is None:
                raise IngestError(
                    f"the checkpoint {self.job.checkpoint_location} has no file metadata with the "
                    "query's id"
                )
            self._tables = Tables(self.job, Identity(self.job.feed_name, query))
        rows = Rows(self.job, batch, self.schema)
        several = self.job.bronze or self.job.rejected or self.job.gold
        if several:
            rows.parsed = rows.parsed.persist()  # the staged events are read and parsed once
        try:
            self._write(self._tables, rows, number)
        finally:
            if several:
                rows.parsed.unpersist()
        if self.job.compact_every and (number + 1) % self.job.compact_every == 0:
            compact(spark, self._tables.names())

    def _write(self, tables: Tables, rows: Rows, number: int) -> None:
        if tables.bronze is not None:
            tables.bronze.write(self._sized(rows.bronze()), tables.who, number)
        if tables.rejected is not None:
            tables.rejected.write(self._sized(rows.rejected()), tables.who, number)
        output: DataFrame | None = rows.output()
        if self.job.transform is not None and output is not None:
            output = self.job.transform(output, number)
        if output is None:
            return
        tables.output.write(self._sized(output, *self.job.partition_by), tables.typed, number)
        if tables.gold is not None:
            tables.gold.merge(output, tables.typed, number)

    def _sized(self, rows: DataFrame, *partition_by: str) -> DataFrame:
        if self.job.target_file_size is None:
            return rows
        rows.sparkSession.conf.set("spark.sql.adaptive.enabled", "true")
        rows.sparkSession.conf.set(_FILE_SIZE, self.job.target_file_size)
        return rows.hint("rebalance", *partition_by)


def compact(spark: SparkSession, tables: list[str]) -> None:
    """Join small files of Delta tables. A conflict with another writer is logged, and harmless."""
    for name in tables:
        try:
            spark.sql(f"OPTIMIZE {name}")
        except Exception as error:  # noqa: BLE001 - conflicts are py4j's errors in PySpark 4.2
            _log.warning("%s was not compacted: %s", name, plain_message(error))


class Run:
    """One run of a pipeline: a started query.

    Arguments:
        spark: a session, of Spark itself or of Spark Connect.
        job: what to ingest.

    Raises:
        IngestError: the tables and the checkpoint don't belong to this pipeline.
        PySparkException: Spark could not start the query.
    """

    query: StreamingQuery

    def __init__(self, spark: SparkSession, job: Ingest) -> None:
        self.spark = spark
        self.job = job
        self._began = time.monotonic()
        checkpoint = job.checkpoint_location
        schema = payload_schema(job)
        query = query_of(spark, checkpoint)
        self._committed = -1 if query is None else last_batch(spark, checkpoint)
        who = Identity(job.feed_name, query, self._committed)
        _check_installed(spark, job.format)
        self._check_tables(who, empty_rows(spark, job, schema))
        self.query = self._start(schema)

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the query ended within that time.

        Raises:
            MicroBatchError: the query failed.
        """
        try:
            ended = self.query.awaitTermination(seconds)  # type: ignore[arg-type]
        except StreamingQueryException as error:
            raise MicroBatchError(plain_message(error)) from error
        return seconds is None or bool(ended)

    def summary(self) -> Summary:
        """Return what this run wrote until now."""
        job, spark = self.job, self.spark
        summary = Summary(job.output, seconds=time.monotonic() - self._began)
        checkpoint = job.checkpoint_location
        summary.batches = last_batch(spark, checkpoint) - self._committed
        tables = Tables(job, Identity(job.feed_name, query_of(spark, checkpoint)))
        numbers = range(self._committed + 1, self._committed + 1 + summary.batches)
        output = tables.output.batches(spark, tables.typed, numbers)
        if output is not None:
            summary.rows = output.count()
            if CORRUPT in output.columns:
                summary.unparsed = output.where(F.col(CORRUPT).isNotNull()).count()
        if tables.rejected is not None:
            rejected = tables.rejected.batches(spark, tables.who, numbers)
            summary.unparsed = 0 if rejected is None else rejected.count()
        return summary

    def _check_tables(self, who: Identity, rows: Rows) -> None:
        """Raise `IngestError` when the query must not write to the tables.

        A transform may write elsewhere, so that `output` need not have batches of the query. The
        checkpoint therefore notes its name.
        """
        job, spark = self.job, self.spark
        if job.transform is None:
            Tables(job, who).check(spark, rows)
            return
        outputs = [job.output, job.gold or ""]
        noted = noted_outputs(spark, job.checkpoint_location)
        Tables(job, who, optional=noted == outputs).check(spark, rows)
        if noted != outputs:
            note_outputs(spark, job.checkpoint_location, outputs)

    def _start(self, schema: StructType | None) -> StreamingQuery:
        job = self.job
        staging = job.staging or _as_url(job.own_staging)
        register(self.spark, staging=staging)
        source = (
            self.spark.readStream.format("feedapi")
            .options(**{"stagingLocation": staging, **job.options, "url": job.url})
            .load()
        )
        writer = source.writeStream.foreachBatch(BatchWriter(job, schema)).option(
            "checkpointLocation", job.checkpoint_location
        )
        return writer.trigger(**trigger_options(job.trigger)).start()


def start(spark: SparkSession, job: Ingest) -> Run:
    """Start the query. Raises as `Run`."""
    return Run(spark, job)


def run(spark: SparkSession, job: Ingest) -> Summary:
    """Ingest until the trigger is done, or the query is stopped.

    Raises as `start`, and MicroBatchError when the query fails.
    """
    running = start(spark, job)
    running.wait()
    return running.summary()


def _check_installed(spark: SparkSession, format: str) -> None:
    nowhere = "/nowhere/at/all"
    try:
        # Twice: Spark logs a stack trace for a single path that does not exist.
        _ = spark.read.format(format).load([nowhere, nowhere]).schema
    except Exception as error:
        if not re.search("DATA_SOURCE_NOT_FOUND|FAILED_CLASS_LOAD", str(error)):
            return  # the format is there, and the path is not
        raise IngestError(
            f"format {format} is not installed in this Spark {spark.version}: start it with "
            "the format's runtime for that version (spark.jars.packages), or take another "
            f"of delta, {', '.join(FILE_FORMATS)}"
        ) from error


def _as_url(path: str) -> str:
    return path if "://" in path else Path(path.removeprefix("file:")).absolute().as_uri()


__all__ = ["IngestError", "Run", "compact", "run", "start"]
