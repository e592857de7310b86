"""Ingests a feed into a table, exactly once.

Run it as ``feedapi ingest``, as ``python -m feedapi_client.spark.ingest``, or with ``spark-submit``
of this file::

    feedapi ingest https://service/myfeed /data/orders \\
        --schema "id STRING, amount DOUBLE" --trigger available-now

Each micro-batch is written as a whole under its number and replaces what an earlier attempt of the
same batch left. This makes it exactly once, whatever reads the result. Files are written to
``OUTPUT/batch=<n>``. A table of another format (Iceberg, Delta) gets a column ``batch``, and the
rows of that batch are replaced.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.observation import Observation
from pyspark.sql.streaming.query import StreamingQuery

from feedapi_client.errors import FeedError
from feedapi_client.spark.source import FeedDataSource

Transform = Callable[[DataFrame, int], DataFrame | None]

FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro")
CORRUPT = "_corrupt"

_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_OWN_FOLDER = "_feedapi"


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """What to ingest, and how.

    Arguments:
        url: of the feed.
        output: folder for file formats, else the name of a table.
        format: one of `FILE_FORMATS`, or any installed table format.
        schema: columns of the payload, as DDL. A payload that does not fit is kept in column
            ``_corrupt``. Without a schema the payload stays JSON.
        partition_by: columns of the table's folders or partitions.
        trigger: ``available-now``, or an interval such as ``10s``.
        transform: called with each micro-batch and its number. Returns what to write, or None when
            it wrote by itself. It may be called again with the same batch.
        checkpoint, staging: locations of the query's own files. For file formats they default to
            a folder inside `output`.
        options: of the source.
        writer_options: of the format.

    Raises:
        ValueError: `trigger` is wrong, or a table format is given without checkpoint and staging.
    """

    url: str
    output: str
    format: str = "parquet"
    schema: str | None = None
    partition_by: Sequence[str] = ()
    trigger: str = "available-now"
    transform: Transform | None = None
    checkpoint: str | None = None
    staging: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    writer_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format not in FILE_FORMATS and (self.checkpoint is None or self.staging is None):
            raise ValueError(
                f"format {self.format} writes to a table: say with --checkpoint and --staging "
                "where the query keeps its own files"
            )
        trigger_options(self.trigger)


@dataclass
class Summary:
    """What one run wrote. `unparsed` is the number of events that did not fit the schema."""

    output: str
    batches: int = 0
    rows: int = 0
    unparsed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = f", {self.rows / self.seconds:,.0f} rows/s" if self.seconds else ""
        unparsed = (
            f", {self.unparsed:,} of them not fitting the schema (column {CORRUPT})"
            if self.unparsed
            else ""
        )
        return (
            f"{self.rows:,} rows{unparsed} in {self.batches} batches to {self.output} "
            f"in {self.seconds:.1f} s{rate}"
        )


def trigger_options(text: str) -> dict[str, Any]:
    """Return the keyword argument of ``DataStreamWriter.trigger``. Raises ValueError."""
    if text in ("available-now", "availableNow"):
        return {"availableNow": True}
    interval = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", text.strip())
    if interval is None:
        raise ValueError(
            f"trigger must be available-now or an interval such as 500ms, 10s, 5m, not {text!r}"
        )
    return {"processingTime": f"{interval[1]} {_UNITS[interval[2]]}"}


def start(spark: SparkSession, job: Ingest) -> tuple[StreamingQuery, Summary]:
    """Start the query.

    Returns:
        the query, and a summary that is updated with every batch.

    Raises:
        ValueError: another query wrote the output.
        PySparkException: Spark could not start the query.
    """
    checkpoint = job.checkpoint or f"{job.output.rstrip('/')}/{_OWN_FOLDER}/checkpoint"
    staging = job.staging or f"{_as_url(job.output).rstrip('/')}/{_OWN_FOLDER}/staging"
    _check_fresh(spark, job, checkpoint)
    spark.dataSource.register(FeedDataSource)
    summary = Summary(job.output)
    source = (
        spark.readStream.format("feedapi")
        .options(**{"stagingLocation": staging, **job.options, "url": job.url})
        .load()
    )
    writer = source.writeStream.foreachBatch(_writer(job, summary)).option(
        "checkpointLocation", checkpoint
    )
    return writer.trigger(**trigger_options(job.trigger)).start(), summary


def run(spark: SparkSession, job: Ingest) -> Summary:
    """Ingest until the trigger is done, or the query is stopped.

    Raises as `start`, and PySparkException when the query fails.
    """
    began = time.monotonic()
    query, summary = start(spark, job)
    try:
        query.awaitTermination()
    finally:
        summary.seconds = time.monotonic() - began
    return summary


# ---------------------------------------------------------------------- one batch


def _writer(job: Ingest, summary: Summary) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, number: int) -> None:
        rows: DataFrame | None = _typed(batch, job.schema)
        if job.transform is not None and rows is not None:
            rows = job.transform(rows, number)
        if rows is not None:
            # Observed last, because the write below is sure to run it: `Observation.get` waits
            # for ever for an observation that no action runs.
            counts = Observation()
            unparsed = F.count(F.col(CORRUPT)) if CORRUPT in rows.columns else F.count(F.lit(None))
            observed = rows.observe(
                counts, F.count(F.lit(1)).alias("rows"), unparsed.alias("unparsed")
            )
            (_write_files if job.format in FILE_FORMATS else _write_table)(job, observed, number)
            summary.rows += counts.get["rows"]
            summary.unparsed += counts.get["unparsed"]
        summary.batches += 1

    return write


def _typed(batch: DataFrame, schema: str | None) -> DataFrame:
    if schema is None:
        return batch
    parsed = F.from_json(
        "data", f"{schema}, {CORRUPT} STRING", {"columnNameOfCorruptRecord": CORRUPT}
    )
    return batch.withColumn("data", parsed).select(
        "partition", "cursor", "depth", "sequence", "headers", "data.*"
    )


def _write_files(job: Ingest, rows: DataFrame, number: int) -> None:
    writer = rows.write.format(job.format).mode("overwrite").options(**job.writer_options)
    if job.partition_by:
        writer = writer.partitionBy(*job.partition_by)
    writer.save(f"{job.output.rstrip('/')}/batch={number}")


def _write_table(job: Ingest, rows: DataFrame, number: int) -> None:
    numbered = rows.withColumn("batch", F.lit(number).cast("long"))
    if not rows.sparkSession.catalog.tableExists(job.output):
        create = (
            numbered.limit(0).writeTo(job.output).using(job.format).options(**job.writer_options)
        )
        if job.partition_by:
            create = create.partitionedBy(*[F.col(name) for name in job.partition_by])
        create.create()
    numbered.writeTo(job.output).options(**job.writer_options).overwrite(
        F.col("batch") == F.lit(number)
    )


def _check_fresh(spark: SparkSession, job: Ingest, checkpoint: str) -> None:
    """Raise ValueError when the output holds batches of another query.

    A new query would count its batches from 0 again and replace the old ones by other events.
    """
    if job.format not in FILE_FORMATS or _exists(spark, f"{checkpoint}/offsets/*"):
        return
    if _exists(spark, f"{job.output.rstrip('/')}/batch=*"):
        raise ValueError(
            f"{job.output} holds batches, but {checkpoint} is not the checkpoint that they were "
            "written with: give that one, or another output"
        )


def _exists(spark: SparkSession, pattern: str) -> bool:
    """Whether a file or folder of any of Spark's file systems matches the pattern."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    try:
        files.load(pattern)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return False
        raise
    return True


def _as_url(path: str) -> str:
    return path if "://" in path else Path(path.removeprefix("file:")).absolute().as_uri()


# ---------------------------------------------------------------------- command line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="feedapi ingest", description="Ingest a feed into a table with Spark, exactly once."
    )
    arguments.add_argument("url", help="the feed")
    arguments.add_argument("output", help="folder for file formats, else the name of a table")
    arguments.add_argument(
        "--format",
        default="parquet",
        help=f"{', '.join(FILE_FORMATS)}, or any installed table format (default: parquet)",
    )
    arguments.add_argument(
        "--schema",
        help="columns of the payload as DDL, such as 'id STRING, amount DOUBLE' "
        "(default: the payload stays JSON)",
    )
    arguments.add_argument(
        "--partition-by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="folder or partition column; may be repeated",
    )
    arguments.add_argument(
        "--trigger",
        default="available-now",
        help="available-now, or an interval such as 10s (default: available-now)",
    )
    arguments.add_argument(
        "--transform",
        metavar="MODULE:FUNCTION",
        help="function (DataFrame, batch number) -> DataFrame, called with each micro-batch",
    )
    arguments.add_argument(
        "--checkpoint", help="checkpoint location of the query (default: inside a file output)"
    )
    arguments.add_argument(
        "--staging", help="staging location of the source (default: inside a file output)"
    )
    arguments.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the source, such as authEnv=FEED_TOKEN",
    )
    arguments.add_argument(
        "--writer-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the format",
    )
    arguments.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Spark configuration, such as spark.master=local[2]",
    )
    arguments.add_argument("--json", action="store_true", help="print the summary as JSON")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: the pipeline failed. 2: wrong arguments. One line on stderr says why.
    """
    given = parser().parse_args(argv)
    try:
        job = Ingest(
            url=given.url,
            output=given.output,
            format=given.format,
            schema=given.schema,
            partition_by=given.partition_by,
            trigger=given.trigger,
            transform=_function(given.transform) if given.transform else None,
            checkpoint=given.checkpoint,
            staging=given.staging,
            options=_pairs("--option", given.option),
            writer_options=_pairs("--writer-option", given.writer_option),
        )
        conf = _pairs("--conf", given.conf)
    except ValueError as error:
        return _fail(error, 2)
    spark: SparkSession | None = None
    try:
        spark = _session(conf)
        summary = _run_until_signal(spark, job)
    except (ValueError, FeedError, PySparkException) as error:
        return _fail(error, 2 if isinstance(error, ValueError) else 1)
    finally:
        if spark is not None:
            spark.stop()
    sys.stdout.write(f"{json.dumps(asdict(summary)) if given.json else summary}\n")
    return 0


def _session(conf: Mapping[str, str]) -> SparkSession:
    if "SPARK_ENV_LOADED" not in os.environ:  # spark-submit chooses by itself
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.appName("feedapi ingest")
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def _run_until_signal(spark: SparkSession, job: Ingest) -> Summary:
    """As `run`. SIGINT and SIGTERM stop the query; the next run repeats an unfinished batch."""
    began = time.monotonic()
    stopping: list[int] = []
    handlers = {
        number: signal.signal(number, lambda *signalled: stopping.append(signalled[0]))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        query, summary = start(spark, job)
        while not stopping and not query.awaitTermination(1):
            pass
        if query.isActive:
            query.stop()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    summary.seconds = time.monotonic() - began
    return summary


def _pairs(argument: str, given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise ValueError(f"{argument} takes NAME=VALUE, not {pair!r}")
    return dict(pair.split("=", 1) for pair in given)


def _function(path: str) -> Transform:
    module, colon, name = path.partition(":")
    try:
        function: Any = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--transform: {path} can't be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"--transform: {path} is not MODULE:FUNCTION")
    return function  # type: ignore[no-any-return]


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"feedapi ingest: {plain_message(error)}\n")
    return code


def plain_message(error: Exception) -> str:
    """Return the message of an error in one line.

    Spark wraps an error of this library in tracebacks of several languages: return its own text.
    """
    text = str(error)
    ours = re.findall(
        r"^(?:\w+\.)*feedapi_client\.[\w.]+(?:Error|Exception): (.+)$", text, re.MULTILINE
    )
    return ours[-1].strip() if ours else text.strip().split("\n", 1)[0]


if __name__ == "__main__":
    sys.exit(main())
