"""Runs a pipeline: one streaming query that writes each micro-batch to all tables.

Works in a session of Spark itself and over Spark Connect, where micro-batches are written by a
process of the server. That is why a `BatchWriter` reports nothing: Spark counts what is read, and
tells it after each micro-batch.
"""

from __future__ import annotations

import time
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

from feedapi_client.spark.ingest.checkpoint import read_checkpoint
from feedapi_client.spark.ingest.columns import Rows, payload_schema
from feedapi_client.spark.ingest.delta_table import column
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import Ingest, IngestError, Summary, trigger_options
from feedapi_client.spark.ingest.parquet_table import Decision, WrittenFiles
from feedapi_client.spark.ingest.plain_messages import MicroBatchError, plain_message
from feedapi_client.spark.ingest.preflight import Tables, check_session, check_tables, columns_of
from feedapi_client.spark.ingest.resume import resume
from feedapi_client.spark.source import register
from feedapi_client.spark.source_options import parse_options

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
            if role == "gold" and self.job.transform is not None:
                # What a transform computes, such as a time, is the same in both tables.
                there = tables["output"].batches(part.sparkSession, who, [number])
                part = part if there is None else there.select(*map(column, part.columns))
            written.append(tables[role].write(part, who, number))
        return [one for one in written if one is not None]

    def _transformed(self, output: DataFrame, number: int) -> DataFrame | None:
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
