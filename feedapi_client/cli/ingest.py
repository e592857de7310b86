"""``feedapi ingest``: a feed into tables, with Spark."""

from __future__ import annotations

import json
import logging
import os
import signal
import socketserver
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedapi_client.arguments import import_function
from feedapi_client.cli.command import (
    FAILURE,
    SIGNALLED,
    USAGE,
    CommandError,
    Pairs,
    argument,
    command,
    flag,
    option,
    refused,
)
from feedapi_client.cli.options import feed_url
from feedapi_client.cli.terminal import report, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from feedapi_client.spark.ingest import Ingest, Summary

_INSTALL = "pip install 'feedapi-client[spark]'"


def _pair(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"takes NAME=VALUE, not {text!r}")
    return {name: value}


def _settings(help: str, flags: str = "") -> Any:
    return option("NAME=VALUE", help, flags=flags, parse=_pair)


def _trusted(file: str) -> str:
    from feedapi_client.http.auth import trusted

    trusted(file)
    return str(Path(file).absolute())  # executors need it, too


@dataclass(frozen=True, kw_only=True)
class _Ingest:
    url: str = argument("URL", "The feed.", parse=feed_url, envvar="FEEDAPI_URL")
    output: str = argument("OUTPUT", "A folder of Parquet files, or the name of a Delta table.")
    format: str = option("FORMAT", "parquet, or delta: tables of a catalog.", default="parquet")
    schema: str | None = option("DDL", "Columns of the payload: 'id STRING NOT NULL, n DOUBLE'.")
    bronze: str | None = option("TABLE", "Table of every event as sent, beside a typed output.")
    rejected: str | None = option("TABLE", "Table of what does not fit the schema, and why.")
    gold: str | None = option("TABLE", "Table of the latest state of each entity (delta).")
    key: list[str] | None = option("COLUMN", "It identifies an entity of gold. Repeatable.")
    delete_when: str | None = option("SQL", "When an event deletes its entity from gold.")
    feed: str | None = option("NAME", "The feed's name in the tables, by default host and path.")
    prefix: str = option("TEXT", "Before names of added columns that the payload has.", default="")
    no_data: bool = flag("Don't keep the payload as sent beside its columns.")
    partition_by: list[str] | None = option("COLUMN", "Partition of the output. Repeatable.")
    trigger: str = option("WHEN", "available-now, or an interval: 10s.", default="available-now")
    transform: str | None = option("MODULE:FUNCTION", "Function (DataFrame, number) -> DataFrame.")
    checkpoint: str | None = option("LOCATION", "The checkpoint, by default inside a folder.")
    staging: str | None = option("LOCATION", "The staging location, by default inside a folder.")
    append: bool = flag("Add to tables that hold rows of this feed already.")
    resume_from_table: bool = flag("With a new checkpoint: go on where the tables end, by bronze.")
    options: Pairs = _settings("Option of the source. Repeatable.", "--option")
    writer_options: Pairs = _settings("Option of the format. Repeatable.", "--writer-option")
    ca_file: str | None = option(
        "FILE",
        "Trust this PEM file, in place of the public ones.",
        parse=_trusted,
        envvar="FEEDAPI_CA_FILE",
    )
    conf: Pairs = _settings("Spark configuration: spark.master=local[2]. Repeatable.")
    json: bool = flag("Print the summary as JSON.")

    def job(self) -> Ingest:
        from feedapi_client.spark.ingest import Ingest

        names = {each.name for each in fields(Ingest)}
        given = {name: vars(self)[name] for name in names & vars(self).keys()}
        given["options"] = dict(self.options or {})
        if self.ca_file is not None:
            given["options"]["caFile"] = self.ca_file
        given["keep_data"] = not self.no_data
        if self.transform is not None:
            given["transform"] = import_function(self.transform, "--transform")
        return Ingest(**{name: value for name, value in given.items() if value is not None})


@command(
    "ingest https://service/myfeed /data/myfeed --option authEnv=FEED_TOKEN",
    "ingest https://service/myfeed lake.orders --format delta --schema 'id STRING, paid BOOLEAN'",
    "ingest https://service/myfeed /data/myfeed --trigger 10s --conf spark.master=local[2]",
)
def ingest(o: _Ingest) -> int:
    """Ingest a feed exactly once into Spark tables: Parquet or Delta (extra spark)."""
    try:
        with refused():
            job = o.job()
    except ImportError as missing:
        # Without a name a module is there that can't be loaded, and no extra would help.
        if _INSTALL in str(missing) or missing.name is None:
            raise CommandError(str(missing)) from None
        raise CommandError(f"{missing.name} is not installed: {_INSTALL}") from None
    with _errors_in_one_line():
        spark = _session(o.conf or {})
        try:
            summary, stopped = _run_until_signal(spark, job)
        finally:
            with suppress(Exception):  # Java may be gone
                spark.stop()
    if summary is not None:
        report(json.dumps(asdict(summary)) if o.json else summary, escaped=True)
    if stopped is None:
        return 0
    say(f"{stopped.name} stopped the query, and the next run goes on")
    return SIGNALLED + stopped


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    from pyspark.errors import PySparkException

    from feedapi_client.errors import FeedError
    from feedapi_client.spark import JavaError
    from feedapi_client.spark.ingest import plain_message

    try:
        yield
    except (ValueError, FeedError, JavaError, PySparkException) as error:
        code = USAGE if isinstance(error, ValueError) else FAILURE
        raise CommandError(plain_message(error), code) from None
    except Exception as error:
        # PySpark passes some of py4j's on, which a client of Spark Connect does not have.
        kind = type(error).__name__
        unanswered = kind == "Py4JError" and "Trace:" not in str(error)  # nor Java's own error
        if isinstance(error, ConnectionError) or kind == "Py4JNetworkError" or unanswered:
            what = "Java has ended, and the query with it: the next run goes on"
            raise CommandError(what) from None
        if not kind.startswith("Py4J"):
            raise
        raise CommandError(plain_message(error)) from None


def _session(conf: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    from feedapi_client.spark import ensure_java

    # What these print is raised, too, or says with a traceback that Java is gone.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Some of it py4j logs as the root, by `logging.exception`.
    logging.getLogger().addFilter(lambda record: record.module != "java_gateway")
    socketserver.BaseServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", module="pyspark")
    builder: Any = SparkSession.builder.appName("feedapi ingest")
    if "SPARK_ENV_LOADED" not in os.environ:  # spark-submit chooses by itself
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if not (conf.get("spark.remote") or os.environ.get("SPARK_REMOTE")):
            ensure_java()
            # What Spark logs with a stack trace is our one line, or no error at all.
            builder = builder.config("spark.log.level", "OFF")
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def _run_until_signal(
    spark: SparkSession, job: Ingest
) -> tuple[Summary | None, signal.Signals | None]:
    """Run until the trigger is done, or SIGINT or SIGTERM stop the query.

    Returns what was written, if the query was started, and the signal that stopped it.
    """
    from feedapi_client.spark.ingest import MicroBatchError, Run

    came: list[int] = []
    stopped: signal.Signals | None = None
    running: Run | None = None
    handlers = {
        number: signal.signal(number, lambda *signalled: came.append(signalled[0]))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        running = Run(spark, job)
        while not stopped and not running.wait(1):
            if came:
                stopped = signal.Signals(came[0])
                running.query.stop()
                with suppress(MicroBatchError):  # a micro-batch in flight fails
                    running.wait(1)
    except Exception:
        if not came:
            raise
        stopped = signal.Signals(came[0])  # of all processes, as systemd's: it ended Java, too
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return running.summary() if running else None, stopped
