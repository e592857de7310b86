"""Runs a pipeline: one streaming query that writes each micro-batch to all tables.

Works in a session of Spark itself and over Spark Connect, where micro-batches are written by a
process of the server. That is why a `BatchWriter` reports nothing: Spark counts what is read, and
tells it after each micro-batch.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import note, read_checkpoint
from feedapi_client.spark.ingest.columns import Rows, payload_schema
from feedapi_client.spark.ingest.delta_table import DeltaTable, column
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import (
    Ingest,
    IngestError,
    MicroBatchError,
    Summary,
    plain_message,
    trigger_options,
)
from feedapi_client.spark.ingest.parquet_table import Decision, WrittenFiles, read_table
from feedapi_client.spark.ingest.preflight import Tables, check_session, check_tables, columns_of
from feedapi_client.spark.source import is_connect, register
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.stream import ReadSoFar, seed

_COUNTED = "feedapi"
_LAST_EVENT = 10.0
"""Seconds that Spark's last event of a query may take. From a stopped context none comes."""


class BatchWriter:
    """The function of ``foreachBatch``, for micro-batches that `Rows` has parsed. Picklable.

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
        tables = self._tables = self._tables or self._find_tables(batch.sparkSession)
        if not self.job.is_files:
            self._write(tables, batch, number)
            return
        decisions = tables.decisions()
        decision = decisions.find(number)
        if decision is None:
            tables["output"].check_ahead(tables.identity("output"), number, decisions.last())
            written = self._write(tables, batch, number)
            decision = decisions.decide(number, Decision(written))
        decisions.publish(number, decision)

    def _find_tables(self, spark: SparkSession) -> Tables:
        found = read_checkpoint(spark, self.job.checkpoint_location)
        run = found.resumed.get("run")
        return Tables(self.job, Identity(self.job.feed_name, found.query, run=run))

    def _write(self, tables: Tables, batch: DataFrame, number: int) -> list[WrittenFiles]:
        self._rows = self._rows or Rows(self.job, self.schema)
        several = len(tables) > 1 or self.job.transform is not None
        if several:
            batch.persist()  # the staged events are read and parsed once
        try:
            return self._write_rows(tables, self._rows.tables(batch), number)
        finally:
            if several:
                batch.unpersist()

    def _write_rows(
        self, tables: Tables, rows: Mapping[str, DataFrame], number: int
    ) -> list[WrittenFiles]:
        output = self._transformed(rows["output"], number)
        parts: dict[str, DataFrame | None] = {**rows, "output": output, "gold": output}
        writing = [(role, part) for role in tables if (part := parts[role]) is not None]
        for role, part in writing:
            tables[role].prepare(part, tables.identity(role), number)
        written: list[WrittenFiles | None] = []
        for role, part in writing:
            who = tables.identity(role)
            source = tables["output"] if role == "gold" and self.job.transform else None
            if isinstance(source, DeltaTable):
                # What a transform computes, such as a time, is the same in both tables.
                there = source.batch(part.sparkSession, who, number)
                part = there.select(*map(column, part.columns))
            written.append(tables[role].write(part, who, number))
        return [one for one in written if one is not None]

    def _transformed(self, output: DataFrame, number: int) -> DataFrame | None:
        if self.job.transform is None:
            return output
        try:
            return self.job.transform(output, number)
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit: the JVM would wait for an answer
            raise IngestError(f"the transform raised {type(error).__name__} {error}") from error


class _Counts(StreamingQueryListener):
    """What Spark counted in the micro-batches of each run of a session's queries.

    Spark calls it from a thread of its own.
    """

    def __init__(self) -> None:
        self.of_run: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.ended: set[str] = set()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        if "addBatch" in progress.durationMs:
            found = progress.observedMetrics.get(_COUNTED)
            counts = {} if found is None else found.asDict()
            self.of_run[str(progress.runId)].update(counts, batches=1)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self.ended.add(str(event.runId))


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
        self._began, self._ended = time.monotonic(), False
        parse_options({**job.options, "url": job.url})
        check_session(spark, job)
        schema = payload_schema(job)
        # The key belongs to gold, in Delta, which takes other letters where a session may not.
        spelled = {name.lower(): name for name in (() if schema is None else schema.names)}
        self.job = job = replace(job, key=[spelled.get(name.lower(), name) for name in job.key])
        self._counts = _Counts()
        spark.streams.addListener(self._counts)
        try:
            rows = Rows(job, schema)
            self.query = self._start(rows, BatchWriter(job, schema), self._check(rows))
            self._id = str(self.query.runId)
        except BaseException:
            self._end()
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the query ended within that time.

        Raises:
            MicroBatchError: the query failed.
        """
        try:
            ended = self.query.awaitTermination(seconds)  # type: ignore[arg-type]
        except StreamingQueryException as error:
            self._end()
            raise MicroBatchError(plain_message(error)) from error
        if not self.query.isActive:
            until = time.monotonic() + _LAST_EVENT
            while self._id not in self._counts.ended and time.monotonic() < until:
                time.sleep(0.01)
            self._end()
        return seconds is None or bool(ended)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.spark.streams.removeListener(self._counts)

    def summary(self) -> Summary:
        """Return what this run has written until now."""
        found, apart = self._counts.of_run[self._id], self.job.rejected is not None
        return Summary(
            self.job.output,
            batches=found["batches"],
            rows=found["events"] - (found["unfit"] if apart else 0),
            unparsed=found["unfit"],
            seconds=time.monotonic() - self._began,
            apart=apart,
        )

    def _check(self, rows: Rows) -> str | None:
        job, spark = self.job, self.spark
        found = read_checkpoint(spark, job.checkpoint_location)
        who = Identity(job.feed_name, found.query, found.committed, found.begun)
        columns, run = columns_of(spark, job, rows), found.resumed.get("run")
        if job.resume_from_table:
            run = resume(spark, job, columns, who)
        check_tables(spark, job, columns, replace(who, run=run), found.outputs)
        return run

    def _start(self, rows: Rows, writer: BatchWriter, run: str | None) -> StreamingQuery:
        job = self.job
        register(self.spark)
        source = (
            self.spark.readStream.format("feedapi")
            .options(**{**job.options, "stagingLocation": job.staging_location, "url": job.url})
            .options(**({"resumeRun": run} if run else {}))
            .load()
        )
        events, unfit = F.count(F.lit(1)).alias("events"), F.count(rows.reason).alias("unfit")
        stream = rows.parse(source).observe(_COUNTED, events, unfit).writeStream
        stream = stream.foreachBatch(writer).trigger(**trigger_options(job.trigger))
        return stream.option("checkpointLocation", job.checkpoint_location).start()


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


# ---------------------------------------------------------------------- to go on from the tables
# Every row of a table of all events says which partition it is from, its number within it, and the
# cursor behind its batch: the last row of each partition is the place to go on from.


def resume(
    spark: SparkSession, job: Ingest, columns: Mapping[str, StructType], who: Identity
) -> str:
    """Let a new checkpoint begin where the tables end. Return the run that it begins with."""
    if who.query is not None or is_connect(spark):
        raise IngestError(
            "--resume-from-table begins a new checkpoint: give a location that holds none, and "
            "leave it out in later runs. It does not work over Spark Connect"
        )
    tables = Tables(job, who)
    role = "bronze" if "bronze" in tables else "output"
    whole, own = tables[role], tables.identity(role)

    def events() -> DataFrame:
        table = read_table(spark, whole.name) if job.is_files else spark.table(whole.name)
        return table.where(column(own.column("feed")) == own.feed)

    if events().isEmpty():
        raise IngestError(
            f"{whole.name} holds no event of feed {own.feed}: there is nothing to go on from. "
            "Leave out --resume-from-table, or name the feed as before with --feed"
        )
    run = uuid.uuid4().hex
    for one, table in tables.items():
        if table.owners(spark, tables.identity(one)):  # what can't go on stops no query
            table.check(spark, replace(tables.identity(one), run=run), columns.get(one))
    # A query that still runs writes nothing more that would be missed.
    for one, table in tables.items():
        table.take_over(spark, replace(tables.identity(one), run=run))
    earlier = tables["output"].owners(spark, tables.identity("output")).keys() - {run}
    for query in earlier if job.is_files else ():
        tables.decisions(query).take_over(run)
    rows, queries = events(), list(whole.owners(spark, own))  # with what was published just now
    if role == "bronze":
        _end_with_bronze(spark, rows, tables, queries)
    options = parse_options({**job.options, "url": job.url})
    seed(options, job.staging_location, read_so_far(rows, own, queries), run)
    note(spark, job.checkpoint_location, "resumed", run=run)
    return run


def _end_with_bronze(
    spark: SparkSession, bronze: DataFrame, tables: Tables, queries: list[str]
) -> None:
    """Bring the other tables to the end of bronze. `queries`: its owners, the newest one last."""
    last: dict[str, int] = dict(bronze.groupBy("query").agg(F.max("batch")).collect())
    newest = next((query for query in reversed(queries) if query in last), None)
    # Those before it that bronze has no row of have expired there. Those behind it wrote none.
    behind = queries[queries.index(newest) + 1 :] if newest else queries
    last |= dict.fromkeys(behind, -1)
    for role, table in tables.items():
        who = tables.identity(role)
        if newest and table.job.transform is None and newest not in table.owners(spark, who):
            raise IngestError(
                f"{table.name} was never written by query {newest}, which wrote bronze: earlier "
                "events would be missing. Give the table that they are in, or leave it out"
            )
        if isinstance(table, DeltaTable) and role != "bronze":
            table.delete_newer(spark, who, last)


def read_so_far(rows: DataFrame, who: Identity, queries: list[str]) -> dict[int, ReadSoFar]:
    """Of the `queries`, in their order, the last one that read a partition tells how far."""
    names = ("partition", "cursor", "sequence", "depth", "query")
    partition, cursor, sequence, depth, query = (column(who.column(name)) for name in names)
    place = F.coalesce(F.array_position(F.array(*map(F.lit, queries)), query), F.lit(0))
    newest = F.max_by(F.struct(cursor, sequence + 1, depth), F.struct(place, sequence))
    found = rows.groupBy(partition).agg(newest).collect()
    return {number: ReadSoFar(*last) for number, last in found}
