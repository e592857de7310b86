"""The command ``feedapi ingest``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from feedapi_client.arguments import import_function
from feedapi_client.errors import FeedError
from feedapi_client.http.auth import trusted
from feedapi_client.spark.ingest.ingest_errors import MicroBatchError, plain_message
from feedapi_client.spark.ingest.job import Ingest, Summary
from feedapi_client.spark.ingest.pipeline import Run
from feedapi_client.spark.java import JavaError, ensure_java

# Argument, its placeholder, and what it means. Those of the second list may be repeated.
_ONCE = (
    ("--format", "FORMAT", "parquet, folders of files, or delta, tables of a catalog"),
    ("--schema", "DDL", "columns of the payload, such as 'id STRING NOT NULL, amount DOUBLE'"),
    ("--bronze", "TABLE", "table of every event as sent, beside a typed output"),
    ("--rejected", "TABLE", "table of the events that don't fit the schema, with the reason"),
    ("--gold", "TABLE", "table of the latest state of each entity (format delta)"),
    ("--delete-when", "SQL", "condition of an event that deletes its entity from gold"),
    ("--feed", "NAME", "the feed's name in the tables (default: its host and path)"),
    ("--prefix", "TEXT", "before names of added columns, where the payload has the same names"),
    ("--trigger", "WHEN", "available-now, or an interval such as 10s"),
    ("--transform", "MODULE:FUNCTION", "function (DataFrame, batch number) -> DataFrame"),
    ("--checkpoint", "LOCATION", "the query's checkpoint (default: inside a folder of files)"),
    ("--staging", "LOCATION", "the source's staging location (default: inside a folder of files)"),
    ("--ca-file", "FILE", "trust the certificates in this PEM file, in place of the public ones"),
)
_REPEATED = (
    ("--key", "COLUMN", "column that identifies an entity of gold"),
    ("--partition-by", "COLUMN", "folder or partition column of the output"),
    ("--option", "NAME=VALUE", "option of the source, such as authEnv=FEED_TOKEN"),
    ("--writer-option", "NAME=VALUE", "option of the format"),
    ("--conf", "NAME=VALUE", "Spark configuration, such as spark.master=local[2]"),
)
EXAMPLES = (
    "https://service/myfeed /data/myfeed --option authEnv=FEED_TOKEN",
    "https://service/myfeed lake.orders --format delta --schema 'id STRING, paid BOOLEAN'",
    "https://service/myfeed /data/myfeed --trigger 10s --conf spark.master=local[2]",
)
"""Arguments of the command, for its help."""
_DEFAULTS = {"--format": "parquet", "--trigger": "available-now", "--prefix": ""}
_UNTRANSLATED = "Py4JJavaError"
"""An error of Java's that PySpark does not translate. A client of Spark Connect has no py4j."""
_CA_FILE = "FEEDAPI_CA_FILE"
"""The environment variable that other commands take ``--ca-file`` from, too."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="feedapi ingest",
        description="Ingest a feed into tables with Spark, exactly once.",
        epilog="\n".join(["Examples:", *(f"  feedapi ingest {each}" for each in EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("url", help="the feed")
    arguments.add_argument("output", help="folder of Parquet files, or the name of a Delta table")
    for name, placeholder, meaning in _ONCE:
        default = _DEFAULTS.get(name)
        shown = f"{meaning} (default: {default})" if default else meaning
        arguments.add_argument(name, metavar=placeholder, default=default, help=shown)
    for name, placeholder, meaning in _REPEATED:
        arguments.add_argument(
            name, metavar=placeholder, action="append", default=[], help=f"{meaning}; repeatable"
        )
    arguments.add_argument(
        "--append", action="store_true", help="add to tables that hold rows of this feed already"
    )
    arguments.add_argument(
        "--resume-from-table",
        action="store_true",
        help="with a new checkpoint: go on where the tables end, by what bronze holds",
    )
    arguments.add_argument(
        "--no-data",
        dest="keep_data",
        action="store_false",
        help="don't keep the payload as sent beside its columns",
    )
    arguments.add_argument("--json", action="store_true", help="print the summary as JSON")
    return arguments


def main(argv: Sequence[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Run the command and return its exit code.

    0: success. 1: the pipeline failed. 2: wrong arguments. 130 and 143: SIGINT and SIGTERM stopped
    the query. One line on stderr says why.

    Arguments:
        report: called with the summary of what is written.
    """
    given = vars(parser().parse_args(argv))
    as_json = given.pop("json")
    try:
        conf = _pairs("--conf", given.pop("conf"))
        job = _job(given)
    except ValueError as error:
        return _fail(error, 2)
    spark: SparkSession | None = None
    try:
        spark = _session(conf)
        summary, stopped = _run_until_signal(spark, job)
    except Exception as error:
        known = isinstance(error, ValueError | FeedError | JavaError | PySparkException)
        if not known and type(error).__name__ != _UNTRANSLATED:
            raise
        return _fail(error, 2 if isinstance(error, ValueError) else 1)
    finally:
        if spark is not None:
            spark.stop()
    report(json.dumps(asdict(summary)) if as_json else str(summary))
    if stopped is None:
        return 0
    sys.stderr.write(
        f"feedapi ingest: {stopped.name} stopped the query, and the next run goes on\n"
    )
    return 128 + stopped  # as other commands


def _job(given: dict[str, Any]) -> Ingest:
    transform = given.pop("transform")
    options = _pairs("--option", given.pop("option")) | _trusted(given.pop("ca_file"))
    writer_options = _pairs("--writer-option", given.pop("writer_option"))
    return Ingest(
        **given,
        transform=None if transform is None else import_function(transform, "--transform"),
        options=options,
        writer_options=writer_options,
    )


def _trusted(ca_file: str | None) -> dict[str, str]:
    """Return the option that names the file, which executors need, too."""
    if ca_file is None:
        ca_file = os.environ.get(_CA_FILE) or None
    if ca_file is None:
        return {}
    try:
        trusted(ca_file)
    except ValueError as error:
        raise ValueError(f"--ca-file: {error}") from None
    return {"caFile": str(Path(ca_file).absolute())}


def _session(conf: Mapping[str, str]) -> SparkSession:
    if "SPARK_ENV_LOADED" not in os.environ:  # spark-submit chooses by itself
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if not (conf.get("spark.remote") or os.environ.get("SPARK_REMOTE")):
            ensure_java()
    builder: Any = SparkSession.builder.appName("feedapi ingest")
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def _run_until_signal(spark: SparkSession, job: Ingest) -> tuple[Summary, signal.Signals | None]:
    """As `run`. SIGINT and SIGTERM stop the query; the next run repeats an unfinished batch.

    Returns what was written, and the signal that stopped the query before it ended by itself.
    """
    stopping: list[int] = []
    stopped: signal.Signals | None = None
    handlers = {
        number: signal.signal(number, lambda *signalled: stopping.append(signalled[0]))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        running = Run(spark, job)
        while stopped is None and not running.wait(1):
            if stopping:
                stopped = signal.Signals(stopping[0])
                running.query.stop()
                with suppress(MicroBatchError):  # a micro-batch in flight fails
                    running.wait(1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return running.summary(), stopped


def _pairs(argument: str, given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise ValueError(f"{argument} takes NAME=VALUE, not {pair!r}")
    return dict(pair.split("=", 1) for pair in given)


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"feedapi ingest: {plain_message(error)}\n")
    return code
