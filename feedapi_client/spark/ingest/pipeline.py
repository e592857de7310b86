"""Runs a pipeline: one streaming query that writes each micro-batch to all tables.

Works in a session of Spark itself and over Spark Connect, where micro-batches are written by a
process of the server. That is why a `BatchWriter` reports nothing: what was written is read from
the tables.

A pipeline can go on where its tables end, without the checkpoint that they were written with. Every
row of a table of all events says which partition it is from, its number within it, and the cursor
behind its batch: the last row of each partition is the place to go on from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import (
    last_batch,
    last_offset,
    note_outputs,
    note_resumed,
    noted_outputs,
    query_of,
    resumed_run,
)
from feedapi_client.spark.ingest.columns import EVENT, INGESTED_AT, Rows, empty_rows, payload_schema
from feedapi_client.spark.ingest.files import FileTable, read_table
from feedapi_client.spark.ingest.gold import GoldTable
from feedapi_client.spark.ingest.identity import Identity
from feedapi_client.spark.ingest.ingest_errors import MicroBatchError, plain_message
from feedapi_client.spark.ingest.job import (
    CORRUPT,
    Ingest,
    IngestError,
    Summary,
    trigger_options,
)
from feedapi_client.spark.ingest.publishing import Decision, Decisions, WrittenFiles, open_folder
from feedapi_client.spark.ingest.requirements import check_rows, check_session
from feedapi_client.spark.ingest.tables import CatalogTable, column
from feedapi_client.spark.registration import register, store_settings
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.staging.lease import QueryLease
from feedapi_client.spark.stream import ReadSoFar, seed

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

    An attempt may end anywhere. In a catalog each table is written in one commit, which replaces
    what an earlier attempt of the same micro-batch left. In folders the first attempt that wrote
    all tables counts for all of them.

    Arguments:
        lease: of the query. Over Spark Connect a process of the server gets a copy.
    """

    def __init__(self, job: Ingest, schema: StructType | None, lease: QueryLease) -> None:
        self.job = job
        self.schema = schema
        self.lease = lease
        self._tables: Tables | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch.

        Raises:
            FencedError: another run of the query is under way, or took the place of this one.
        """
        self.lease.acquire()
        self.lease.check()
        tables = self._tables_of(batch.sparkSession)
        if self.job.is_files:
            self._write_files(tables, batch, number)
        else:
            self._write(tables, batch, number)
            self.lease.check()
        if self.job.compact_every and (number + 1) % self.job.compact_every == 0:
            compact(batch.sparkSession, tables.names())

    def _tables_of(self, spark: SparkSession) -> Tables:
        if self._tables is None:
            query = query_of(spark, self.job.checkpoint_location)
            if query is None:
                raise IngestError(
                    f"the checkpoint {self.job.checkpoint_location} has no file metadata with the "
                    "query's id"
                )
            who = Identity(self.job.feed_name, query, epoch=self.lease.epoch)
            self._tables = Tables(self.job, who)
        return self._tables

    def _write_files(self, tables: Tables, batch: DataFrame, number: int) -> None:
        spark, location = batch.sparkSession, self.job.staging_location
        decisions = Decisions(location, str(tables.who.query), store_settings(spark, location))
        decision = decisions.find(number)
        if decision is None:
            written = self._write(tables, batch, number)
            self.lease.check()
            decision = decisions.decide(number, Decision(self.lease.epoch, written))
        self._publish(spark, decision.tables)

    def _write(self, tables: Tables, batch: DataFrame, number: int) -> list[WrittenFiles]:
        """Write to all tables. Return what is to be published."""
        rows = Rows(self.job, batch, self.schema)
        several = self.job.bronze or self.job.rejected or self.job.gold
        if several:
            rows.parsed = rows.parsed.persist()  # the staged events are read and parsed once
        try:
            return list(self._write_rows(tables, rows, number))
        finally:
            if several:
                rows.parsed.unpersist()

    def _write_rows(self, tables: Tables, rows: Rows, number: int) -> Iterator[WrittenFiles]:
        who, output = tables.who, self._transformed(rows.output(), number)
        if tables.bronze is not None:
            yield from tables.bronze.write(self._sized(rows.bronze()), who, number)
        if tables.rejected is not None:
            yield from tables.rejected.write(self._sized(rows.rejected()), who, number)
        if output is None:
            return
        sized = self._sized(output, *self.job.partition_by)
        yield from tables.output.write(sized, tables.typed, number)
        if tables.gold is not None:
            tables.gold.merge(output, tables.typed, number)

    def _transformed(self, output: DataFrame, number: int) -> DataFrame | None:
        """Return what is written to `output`, if anything. Raises before anything is written."""
        if self.job.transform is None:
            return output
        made = self.job.transform(output, number)
        if made is not None:
            check_rows(self.job, made)
        return made

    def complete(self, batch: DataFrame, who: Identity, number: int) -> None:
        """Write a micro-batch that an earlier query may have left unfinished."""
        written = self._write(Tables(self.job, who), batch, number)
        self._publish(batch.sparkSession, written)

    @staticmethod
    def _publish(spark: SparkSession, written: Sequence[WrittenFiles]) -> None:
        for one in written:
            folder = open_folder(one.table, store_settings(spark, one.table))
            folder.publish(one.attempt, one.final)

    def _sized(self, rows: DataFrame, *partition_by: str) -> DataFrame:
        if self.job.target_file_size is None:
            return rows
        rows.sparkSession.conf.set("spark.sql.adaptive.enabled", "true")
        rows.sparkSession.conf.set(_FILE_SIZE, self.job.target_file_size)
        return rows.hint("rebalance", *map(column, partition_by))


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
        parse_options({**job.options, "url": job.url})
        check_session(spark, job)
        schema = payload_schema(spark, job)
        location = job.staging_location
        self._lease = QueryLease(location, job.lease_name, settings=store_settings(spark, location))
        if not _is_connect(spark):  # whose server reaches the staging location, and this need not
            self._lease.acquire()
        try:
            self._committed = self._check(schema)
            self.query = self._start(schema)
        except BaseException:
            self._lease.release()
            raise
        self._lease.in_use = self._is_active

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the query ended within that time.

        Raises:
            MicroBatchError: the query failed.
        """
        try:
            ended = self.query.awaitTermination(seconds)  # type: ignore[arg-type]
        except StreamingQueryException as error:
            self._lease.release()
            raise MicroBatchError(plain_message(error)) from error
        if not self._is_active():
            self._lease.release()
        return seconds is None or bool(ended)

    def _is_active(self) -> bool:
        return bool(self.query.isActive)

    def summary(self) -> Summary:
        """Return what this run wrote until now, as far as that can be counted."""
        summary = Summary(self.job.output, seconds=time.monotonic() - self._began)
        try:
            self._count(summary)
        except Exception as error:  # noqa: BLE001 - what is written is written, whatever this is
            summary.uncounted = plain_message(error)
            _log.warning("what was written can't be counted: %s", summary.uncounted)
        return summary

    def _count(self, summary: Summary) -> None:
        job, spark, checkpoint = self.job, self.spark, self.job.checkpoint_location
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
            summary.apart = True

    def _check(self, schema: StructType | None) -> int:
        """Check everything that the checkpoint says. Return the last committed micro-batch."""
        spark, checkpoint = self.spark, self.job.checkpoint_location
        who = Identity(self.job.feed_name, query_of(spark, checkpoint))
        if self.job.resume_from_table:
            self._resume(who, schema)
        who = replace(who, resumed=resumed_run(spark, checkpoint) is not None)
        if who.query is not None:
            last = last_batch(spark, checkpoint)
            who = replace(who, last_batch=last, last_offset=last_offset(spark, checkpoint))
        rows = empty_rows(spark, self.job, schema)
        if self.job.transform is None:  # which may make any columns
            check_rows(self.job, rows.output())
        self._check_tables(who, rows)
        return who.last_batch

    def _resume(self, who: Identity, schema: StructType | None) -> None:
        """Let a new checkpoint begin where the tables end."""
        job, spark = self.job, self.spark
        if who.query is not None or _is_connect(spark):
            raise IngestError(
                "--resume-from-table begins a new checkpoint: give a location that holds none, and "
                "leave it out in later runs. It does not work over Spark Connect"
            )
        name = str(job.whole_table)
        table = read_table(spark, name) if job.is_files else spark.table(name)
        own = replace(who, epoch=self._lease.epoch)
        if job.bronze is not None:
            last = last_batch_of(table, own)
            if last is not None:
                self._complete(table, replace(own, query=last[0]), last[1], schema)
        else:
            own = replace(own, prefix=job.prefix if job.schema else "")
        note_resumed(spark, job.checkpoint_location, stage_resumption(job, table, own))

    def _complete(
        self, bronze: DataFrame, who: Identity, number: int, schema: StructType | None
    ) -> None:
        """Write a micro-batch of bronze to the other tables, which may lack it."""
        own = (column("query") == F.lit(who.query)) & (column("batch") == F.lit(number))
        batch = bronze.where(own)
        writer = BatchWriter(
            replace(self.job, bronze=None, resume_from_table=False), schema, self._lease
        )
        writer.complete(batch.select(*EVENT, "data"), who, number)

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
        staging = job.staging_location
        register(self.spark, staging=staging)
        run = resumed_run(self.spark, job.checkpoint_location)
        source = (
            self.spark.readStream.format("feedapi")
            .options(**{**job.options, "stagingLocation": staging, "url": job.url})
            .option("fenced", False)  # the pipeline's own lease is that of its tables, too
            .options(**({} if run is None else {"resumeRun": run}))
            .load()
        )
        writer = source.writeStream.foreachBatch(BatchWriter(job, schema, self._lease)).option(
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


def _is_connect(spark: SparkSession) -> bool:
    return getattr(spark, "sparkContext", None) is None


__all__ = ["IngestError", "Run", "compact", "run", "start"]


def stage_resumption(job: Ingest, rows: DataFrame, who: Identity) -> str:
    """Stage the place that the table ends at, and return the run that begins there.

    Arguments:
        rows: of the table of all events.
        who: names the feed, and the prefix of the table's columns.

    Raises:
        IngestError: the table holds no event of the feed.
        FeedError: the feed does not answer.
    """
    own = rows.where(column(who.column("feed")) == who.feed)
    cursor, sequence, depth = (column(who.column(n)) for n in ("cursor", "sequence", "depth"))
    last = F.max(F.struct(sequence.alias("sequence"), cursor.alias("cursor"), depth.alias("depth")))
    found = own.groupBy(column(who.column("partition")).alias("partition")).agg(last.alias("last"))
    read = {
        row["partition"]: ReadSoFar(
            row["last"]["cursor"], row["last"]["sequence"] + 1, row["last"]["depth"]
        )
        for row in found.collect()
    }
    if not read:
        raise IngestError(
            f"{job.whole_table} holds no event of feed {who.feed}: there is nothing to go on from. "
            "Leave out --resume-from-table, or name the feed as before with --feed"
        )
    return seed(parse_options({**job.options, "url": job.url}), job.staging_location, read)


def last_batch_of(rows: DataFrame, who: Identity) -> tuple[str, int] | None:
    """Return query and number of the micro-batch that was written last, None without one."""
    own = rows.where(column(who.column("feed")) == who.feed)
    newest = F.max_by(F.struct(column("query"), column("batch")), column(INGESTED_AT))
    row: Any = own.agg(newest.alias("last")).first()
    return None if row is None or row["last"] is None else (row["last"][0], int(row["last"][1]))
