"""Goes on where the tables end, without the checkpoint that they were written with.

Every row of a table of all events says which partition it is from, its number within it, and the
cursor behind its batch: the last row of each partition is the place to go on from.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.checkpoint import note
from feedapi_client.spark.ingest.delta_table import DeltaTable, column
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import Ingest, IngestError
from feedapi_client.spark.ingest.parquet_table import read_table
from feedapi_client.spark.ingest.preflight import Tables
from feedapi_client.spark.source import is_connect
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.stream import ReadSoFar, seed


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
