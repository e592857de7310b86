"""What is checked before the first micro-batch, and Spark would not say, or too late.

All else Spark says in its own words, where no row is written to each table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import note, read_checkpoint
from feedapi_client.spark.ingest.columns import Rows
from feedapi_client.spark.ingest.delta_table import DeltaTable, GoldTable
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import Ingest, IngestError, as_url, plain_message
from feedapi_client.spark.ingest.parquet_table import Decisions, ParquetTable
from feedapi_client.spark.schema import spark_schema

_TIMES = "spark.sql.legacy.timeParserPolicy"
_DELTA_JAR = re.compile(r"delta-spark_(\d+\.\d+)_2\.13")


AnyTable = ParquetTable | DeltaTable


class Tables(dict[str, AnyTable]):
    """In the order in which they are written. Bronze is last: no other table lacks what it has."""

    def __init__(self, job: Ingest, who: Identity) -> None:
        self._who, self._typed = who, replace(who, prefix=job.prefix if job.schema else "")
        for role in ("rejected", "output", "gold", "bronze"):
            if getattr(job, role):
                kind = GoldTable if role == "gold" else ParquetTable if job.is_files else DeltaTable
                self[role] = kind(job, role)

    def identity(self, role: str) -> Identity:
        """Return who writes to one of them: in two of them our columns have the prefix."""
        return self._typed if role in ("output", "gold") else self._who

    def places(self, spark: SparkSession) -> dict[str, str]:
        return {role: table.place(spark) for role, table in self.items()}

    def decisions(self, query: str | None = None) -> Decisions:
        folders = {role: one for role, one in self.items() if isinstance(one, ParquetTable)}
        return Decisions(folders, replace(self._typed, query=query or self._typed.query))


def check_session(spark: SparkSession, job: Ingest) -> None:
    if job.schema and str(spark.conf.get(_TIMES)).upper() == "LEGACY":
        raise IngestError(f"{_TIMES} is LEGACY, which changes times as it reads them: CORRECTED")
    if job.is_files:
        return
    # A jar for another release of Spark fails in the first micro-batch only, in Java's words.
    jars = [spark.conf.get(name, "") or "" for name in ("spark.jars", "spark.jars.packages")]
    built_for = set(_DELTA_JAR.findall(" ".join(jars)))
    here = ".".join(spark.version.split(".")[:2])
    if built_for and here not in built_for:
        raise IngestError(
            f"Delta's jar is built for Spark {', '.join(sorted(built_for))}, and this is Spark "
            f"{spark.version}: take delta-spark_{here}_2.13, or where there is none, the PySpark "
            "that the jar is built for"
        )


def columns_of(spark: SparkSession, job: Ingest, rows: Rows) -> dict[str, StructType]:
    try:
        made = rows.tables(rows.parse(spark.createDataFrame([], spark_schema())))
        columns = {role: table.schema for role, table in made.items()}
    except PySparkException as error:
        what = f"schema {job.schema!r} can't be read from JSON: {plain_message(error)}"
        raise IngestError(what) from error
    if job.transform is not None:
        del columns["output"]
    return columns | ({"gold": columns["output"]} if "output" in columns else {})


def check_tables(
    spark: SparkSession,
    job: Ingest,
    columns: Mapping[str, StructType],
    who: Identity,
    noted: Mapping[str, Any],
) -> None:
    """`noted`: which tables earlier runs wrote, as is noted beside the checkpoint."""
    known, place = noted.get("tables", {}), job.checkpoint_url
    staging = as_url(job.staging_location)
    tables = Tables(job, who)
    places = tables.places(spark)
    moved = noted.get("location") != place  # and folders may have moved with it
    changed = places.keys() ^ known.keys() if moved else dict(places.items() ^ known.items())
    if known and who.last_offset >= 0 and noted["feed"] != job.feed_name:
        raise IngestError(
            f"the checkpoint's query {who.query} wrote another feed than {job.feed_name}: give the "
            "feed's own checkpoint. If the feed moved to another URL, keep its name with --feed"
        )
    if known and who.last_offset >= 0 and changed:
        raise IngestError(
            f"earlier runs wrote {', '.join(known.values())}: with another "
            f"{', '.join(sorted(changed))} events would be missing. Give the same tables, or a "
            "new checkpoint and staging"
        )
    elsewhere = moved and known == places and noted.get("staging", staging) != staging
    if elsewhere and who.query and read_checkpoint(spark, noted["location"]).query == who.query:
        raise IngestError(
            f"query {who.query} is at {noted['location']}, too, with a staging location of its "
            "own: one is a copy, and both would write the same micro-batches of the same tables. "
            "Where the query has moved, delete that checkpoint; a copy needs tables of its own"
        )
    fits, rejected = [job.schema, *job.key], tables.get("rejected")
    if isinstance(rejected, DeltaTable) and noted.get("fits", fits) != fits:
        rejected.check_half_written(spark, who, noted["fits"])
    for role, table in tables.items():
        table.noted = bool(known)
        table.check(spark, tables.identity(role), columns.get(role))
    places = tables.places(spark)  # of those that were made just now, too
    if len(set(places.values())) < len(places):
        raise IngestError(
            f"tables must be different: two are the same of {', '.join(places.values())}"
        )
    content: dict[str, Any] = {"tables": places, "location": place, "staging": staging}
    content |= {"feed": job.feed_name, "fits": fits}
    if any(noted.get(name) != value for name, value in content.items()):
        note(spark, job.checkpoint_location, "outputs", **content)
