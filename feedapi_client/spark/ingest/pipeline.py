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
import uuid
from collections.abc import Mapping
from dataclasses import replace

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import (
    QueryCheckpoint,
    last_batches,
    lost_query,
    note,
    read_checkpoint,
)
from feedapi_client.spark.ingest.columns import Rows, payload_schema
from feedapi_client.spark.ingest.delta_table import DeltaTable, GoldTable, column
from feedapi_client.spark.ingest.ingest_errors import MicroBatchError, plain_message
from feedapi_client.spark.ingest.ingest_table import Identity, forgotten
from feedapi_client.spark.ingest.job import (
    CORRUPT,
    Ingest,
    IngestError,
    Summary,
    trigger_options,
)
from feedapi_client.spark.ingest.parquet_table import (
    Decision,
    Decisions,
    ParquetTable,
    WrittenFiles,
    read_table,
)
from feedapi_client.spark.ingest.preflight import check_session
from feedapi_client.spark.schema import spark_schema
from feedapi_client.spark.source import is_connect, register
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.stream import ReadSoFar, seed

_log = logging.getLogger(__name__)


class Tables:
    """The tables of a pipeline, and who writes to them.

    Arguments:
        optional: whether `output` and `gold` may lack batches, which a transform wrote itself.
    """

    def __init__(self, job: Ingest, who: Identity, *, optional: bool = False) -> None:
        kind = ParquetTable if job.is_files else DeltaTable
        self.who = who  # of tables whose columns are all ours
        self.typed = replace(who, prefix=job.prefix if job.schema else "")
        self.output = kind(job, "output", optional=optional)
        self.bronze = kind(job, "bronze") if job.bronze else None
        self.rejected = kind(job, "rejected") if job.rejected else None
        self.gold = GoldTable(job, "gold", optional=optional) if job.gold else None

    def identity(self, table: ParquetTable | DeltaTable) -> Identity:
        """Return who writes to one of them."""
        return self.typed if table in (self.output, self.gold) else self.who

    def all(self) -> list[ParquetTable | DeltaTable]:
        """Return all tables, in the order in which they are written.

        Bronze is the last one: no other table lacks what bronze has.
        """
        tables = (self.rejected, self.output, self.gold, self.bronze)
        return [table for table in tables if table is not None]

    def places(self, spark: SparkSession) -> dict[str, str]:
        """Return where they are, by their roles."""
        return {one.role: one.place(spark) for one in self.all()}

    def folders(self) -> dict[str, ParquetTable]:
        """Return the tables that are folders, by their roles."""
        return {one.role: one for one in self.all() if isinstance(one, ParquetTable)}

    def check(self, spark: SparkSession, columns: Mapping[str, StructType]) -> None:
        """Raise `IngestError` when the query must not write to them.

        Arguments:
            columns: by role; none where a transform makes them.
        """
        for table in self.all():
            role = "output" if table is self.gold else table.role
            table.check(spark, self.identity(table), columns.get(role))


class BatchWriter:
    """The function of ``foreachBatch``. Picklable.

    An attempt may end anywhere. In a catalog each table is written in one commit, which the next
    attempt does not make again. In folders the first attempt that wrote all tables counts for all
    of them.
    """

    def __init__(self, job: Ingest, schema: StructType | None) -> None:
        self.job = job
        self.schema = schema
        self._tables: Tables | None = None
        self._rows: Rows | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch."""
        tables = self._tables_of(batch.sparkSession)
        if self.job.is_files:
            self._write_files(tables, batch, number)
        else:
            self.write(tables, batch, number)

    def _tables_of(self, spark: SparkSession) -> Tables:
        if self._tables is None:
            checkpoint = read_checkpoint(spark, self.job.checkpoint_location)
            if checkpoint.query is None:
                raise lost_query(self.job.checkpoint_location)
            run = checkpoint.resumed.get("run")
            self._tables = Tables(self.job, Identity(self.job.feed_name, checkpoint.query, run=run))
        return self._tables

    def _write_files(self, tables: Tables, batch: DataFrame, number: int) -> None:
        decisions = Decisions(tables.folders(), tables.typed)
        decision = decisions.find(number)
        if decision is None:
            tables.output.check_ahead(tables.typed, number, decisions.last())
            written = self.write(tables, batch, number)
            decision = decisions.decide(number, Decision(written))
        decisions.publish(number, decision)

    def write(self, tables: Tables, batch: DataFrame, number: int) -> list[WrittenFiles]:
        """Write to all tables. Return what is to be published."""
        self._rows = self._rows or Rows(self.job, self.schema)
        parsed = self._rows.parse(batch)
        several = self.job.bronze or self.job.rejected or self.job.gold
        if several:
            parsed.persist()  # the staged events are read and parsed once
        try:
            return self._write_rows(tables, self._rows.tables(parsed), number)
        finally:
            if several:
                parsed.unpersist()

    def _write_rows(
        self, tables: Tables, rows: Mapping[str, DataFrame], number: int
    ) -> list[WrittenFiles]:
        output = self._transformed(rows["output"], number)
        parts: dict[str, DataFrame | None] = {**rows, "output": output, "gold": output}
        writing = [(one, part) for one in tables.all() if (part := parts[one.role]) is not None]
        for table, part in writing:
            table.prepare(part, tables.identity(table), number)
        written: list[WrittenFiles] = []
        for table, part in writing:
            who = tables.identity(table)
            if table is tables.gold and self.job.transform is not None:
                # What a transform computes, such as a time, is the same in both tables.
                there = tables.output.batches(part.sparkSession, who, [number])
                part = part if there is None else there.select(*map(column, part.columns))
            if isinstance(table, ParquetTable):
                written.append(table.write(part, who, number))
            else:
                table.write(part, who, number)
        return written

    def _transformed(self, output: DataFrame, number: int) -> DataFrame | None:
        """Return what is written to `output`, if anything. Raises before anything is written."""
        if self.job.transform is None:
            return output
        try:
            made = self.job.transform(output, number)
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit: the JVM would wait for an answer
            raise IngestError(f"the transform raised {type(error).__name__} {error}") from error
        if made is not None and not isinstance(made, DataFrame):
            raise IngestError(f"the transform returned a {type(made).__name__}, not a DataFrame")
        return made


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
    _resumed: str | None
    """The run that the query began with where the tables ended, None for others."""

    def __init__(self, spark: SparkSession, job: Ingest) -> None:
        self.spark = spark
        self._began = time.monotonic()
        parse_options({**job.options, "url": job.url})
        check_session(spark, job)
        schema = payload_schema(job)
        # The key belongs to gold, in Delta, which takes other letters where a session may not.
        spelled = {name.lower(): name for name in (() if schema is None else schema.names)}
        self.job = job = replace(job, key=[spelled.get(name.lower(), name) for name in job.key])
        self._committed = self._check(schema)
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
        """Return what this run wrote until now, as far as that can be counted."""
        summary = Summary(self.job.output, seconds=time.monotonic() - self._began)
        try:
            self._count(summary)
        except Exception as error:  # noqa: BLE001 - what is written is written, whatever this is
            summary.uncounted = plain_message(error)
            _log.warning("what was written can't be counted: %s", summary.uncounted)
        return summary

    def _count(self, summary: Summary) -> None:
        job, spark = self.job, self.spark
        checkpoint = read_checkpoint(spark, job.checkpoint_location)
        summary.batches = last_batches(spark, job.checkpoint_location)[1] - self._committed
        tables = Tables(job, Identity(job.feed_name, checkpoint.query))
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
        job, spark = self.job, self.spark
        checkpoint = read_checkpoint(spark, job.checkpoint_location)
        begun, committed = last_batches(spark, job.checkpoint_location)
        if checkpoint.query is None and begun >= 0:
            raise lost_query(job.checkpoint_location)
        who = Identity(job.feed_name, checkpoint.query, committed, begun)
        columns = self._columns(schema)
        self._resumed = checkpoint.resumed.get("run")
        if job.resume_from_table:
            self._resumed = self._resume(who)
        who = replace(who, run=self._resumed)
        self._check_tables(columns, who, checkpoint)
        return who.last_batch

    def _columns(self, schema: StructType | None) -> dict[str, StructType]:
        """Return the columns of the tables by role, without those that a transform makes."""
        rows = Rows(self.job, schema)
        try:
            made = rows.tables(rows.parse(self.spark.createDataFrame([], spark_schema())))
            columns = {role: table.schema for role, table in made.items()}
        except PySparkException as error:
            what = f"schema {self.job.schema!r} can't be read from JSON: {plain_message(error)}"
            raise IngestError(what) from error
        if self.job.transform is not None:
            del columns["output"]
        return columns

    def _check_tables(
        self, columns: Mapping[str, StructType], who: Identity, checkpoint: QueryCheckpoint
    ) -> None:
        """Check the tables, and note which ones there are: they stay the same."""
        job, spark, known = self.job, self.spark, checkpoint.outputs.get("tables", {})
        begun = bool(known) and who.last_offset >= 0
        tables = Tables(job, who, optional=job.transform is not None and bool(known))
        places, place = tables.places(spark), job.lease_name  # with which folders may move
        moved = checkpoint.outputs.get("location") != place
        changed = places.keys() ^ known.keys() if moved else dict(places.items() ^ known.items())
        if begun and checkpoint.outputs["feed"] != job.feed_name:
            raise IngestError(
                f"the checkpoint's query {who.query} wrote another feed than {job.feed_name}: give "
                "the feed's own checkpoint. If the feed moved to another URL, keep its name with "
                "--feed"
            )
        if begun and changed:
            raise IngestError(
                f"earlier runs wrote {', '.join(known.values())}: with another "
                f"{', '.join(sorted(changed))} events would be missing. Give the same tables, or a "
                f"new checkpoint and staging{'' if job.is_files else forgotten(spark)}"
            )
        tables.check(spark, columns)
        places = tables.places(spark)  # of those that were made just now, too
        if len(set(places.values())) < len(places):
            raise IngestError(
                f"tables must be different: two are the same of {', '.join(places.values())}"
            )
        if known != places or moved:
            noted = {"tables": places, "location": place, "feed": job.feed_name}
            note(spark, job.checkpoint_location, "outputs", **noted)

    def _resume(self, who: Identity) -> str:
        """Let a new checkpoint begin where the tables end. Return the run that it begins with."""
        job, spark = self.job, self.spark
        if who.query is not None or is_connect(spark):
            raise IngestError(
                "--resume-from-table begins a new checkpoint: give a location that holds none, and "
                "leave it out in later runs. It does not work over Spark Connect"
            )
        tables = Tables(job, who)
        whole, own = tables.output, tables.typed
        if tables.bronze is not None:
            whole, own = tables.bronze, tables.who

        def events() -> DataFrame:
            table = read_table(spark, whole.name) if job.is_files else spark.table(whole.name)
            return table.where(column(own.column("feed")) == own.feed)

        if events().isEmpty():
            raise IngestError(
                f"{whole.name} holds no event of feed {own.feed}: there is nothing to go on from. "
                "Leave out --resume-from-table, or name the feed as before with --feed"
            )
        run = uuid.uuid4().hex
        for one in tables.all():  # a query that still runs writes nothing more that would be missed
            one.take_over(spark, replace(tables.identity(one), run=run))
        earlier = tables.output.owners(spark, tables.typed).keys() - {run}
        for query in earlier if job.is_files else ():
            Decisions(tables.folders(), replace(tables.typed, query=query)).take_over(run)
        rows, order = events(), whole.owners(spark, own)  # with what was published just now
        if tables.bronze is not None:
            self._end_with_bronze(rows, tables, order)
        options = parse_options({**job.options, "url": job.url})
        seed(options, job.staging_location, _read_so_far(rows, own, order), run)
        note(spark, job.checkpoint_location, "resumed", run=run)
        return run

    def _end_with_bronze(self, bronze: DataFrame, tables: Tables, order: Mapping[str, int]) -> None:
        """Check the other tables, and bring them to the end of bronze, which is written last."""
        last: dict[str, int] = dict(bronze.groupBy("query").agg(F.max("batch")).collect())
        newest = max((order.get(query, 0) for query in last), default=0)
        names = {place: query for query, place in order.items()}
        # Older queries that bronze has no row of any more have expired there.
        last |= {query: -1 for query, place in order.items() if place > newest}
        for table in tables.all():
            who = tables.identity(table)
            known = table.owners(self.spark, who)
            if newest and self.job.transform is None and names[newest] not in known:
                raise IngestError(
                    f"{table.name} was never written by query {names[newest]}, which wrote "
                    f"{self.job.bronze}: earlier events would be missing. Give the table that they "
                    "are in, or leave it out"
                )
            if isinstance(table, DeltaTable) and table is not tables.bronze:
                table.delete_newer(self.spark, who, last)

    def _start(self, schema: StructType | None) -> StreamingQuery:
        job = self.job
        staging = job.staging_location
        register(self.spark)
        source = (
            self.spark.readStream.format("feedapi")
            .options(**{**job.options, "stagingLocation": staging, "url": job.url})
            .options(**({"resumeRun": self._resumed} if self._resumed else {}))
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


def _read_so_far(rows: DataFrame, who: Identity, order: Mapping[str, int]) -> dict[int, ReadSoFar]:
    """Return how far each partition was read, as a table of all events of the feed tells.

    Arguments:
        order: of the queries. The last one that read a partition tells: those before it may have
            counted its events from another one on.
    """
    cursor, sequence, depth = (column(who.column(n)) for n in ("cursor", "sequence", "depth"))
    newest = F.max_by(F.struct(cursor, sequence + 1, depth), sequence)
    by = [column(who.column(name)) for name in ("partition", "query")]
    found = rows.groupBy(*by).agg(newest).collect()
    read = [(order.get(query, 0), partition, ReadSoFar(*last)) for partition, query, last in found]
    read.sort(key=lambda one: (one[0], one[2].events))
    return {partition: last for _, partition, last in read}
