"""Single writes to Delta tables: of an attempt that is repeated, of a late run, of two at once."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.functions import udf

from feedapi_client.spark.ingest import IngestError
from feedapi_client.spark.ingest.delta_table import DeltaTable, GoldTable, column
from feedapi_client.spark.ingest.ingest_table import Identity
from tests.spark.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

WHO = Identity("feed", "query")


def events(spark: SparkSession, first: int, count: int) -> DataFrame:
    """Typed events, as `output` gets them."""
    return spark.range(first, first + count).selectExpr(
        "'e' || id % 7 AS entity",
        "int(id) AS n",
        "0 AS partition",
        "id AS sequence",
        "0 AS depth",
        "map('from', 'feed') AS headers",
    )


def write(table: DeltaTable, rows: DataFrame, who: Identity, number: int) -> None:
    table.prepare(rows, who, number)
    table.write(rows, who, number)


def test_key_that_a_transform_makes_null_is_one_entity(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(gold="lake.no_key", key=["entity", "partition"], delete_when="n >= 20")
    for number in range(3):
        rows = events(spark, number * 10, 10).withColumn("entity", F.lit(None).cast("string"))
        write(GoldTable(job, "gold"), rows, WHO, number)
        found = [row.n for row in spark.table("lake.no_key").collect()]
        assert found == ([number * 10 + 9] if number < 2 else [])


def test_table_compacts_itself_where_its_property_says_so(spark: SparkSession, lake: Lake) -> None:
    table = DeltaTable(lake.job(output="lake.compacted"))
    write(table, events(spark, 0, 10), WHO, 0)
    (property,) = re.findall(
        r"SET\s+TBLPROPERTIES\s*(\(.*?\))",
        Path("docs/pages/lakehouse.md").read_text(encoding="utf-8"),
    )
    spark.sql(f"ALTER TABLE {table.name} SET TBLPROPERTIES {property}")
    spark.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
    try:
        for number in (1, 2, 3, 3):  # the last one is a replay, whose rows lie in a joined file
            write(table, events(spark, number * 10, 10), WHO, number)
    finally:
        spark.conf.unset("spark.databricks.delta.autoCompact.minNumFiles")
    assert len(spark.table(table.name).inputFiles()) <= 2
    assert sorted(row.n for row in spark.table(table.name).collect()) == list(range(40))


def test_two_feeds_in_one_table_at_once(spark: SparkSession, lake: Lake) -> None:
    """They make it, add the same column, and repeat micro-batches."""
    job, meeting = lake.job(output="lake.two_feeds"), threading.Barrier(3, timeout=600)

    def ingest(feed: str) -> None:
        who = Identity(feed, str(len(feed)))
        for number in range(2):
            rows = events(spark, 0, 10)
            rows = rows.withColumn("price", F.lit(1.5)) if number else rows
            before = Identity(feed, who.query if number else None, number - 1, number - 1)
            meeting.wait()
            DeltaTable(job).check(spark, before, rows.schema)  # as before a start
            for _ in range(2):
                write(DeltaTable(job), rows, who, number)

    feeds = ["host:80/a", "it's \\b", "https://auth.example/tokens?url=password"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(ingest, feeds))
    rows = spark.table(job.output).groupBy("feed", "query").agg(F.count("*"), F.sum("price"))
    assert sorted(tuple(row) for row in rows.collect()) == sorted(
        (feed, str(len(feed)), 20, 15.0) for feed in feeds
    )
    for feed in feeds:  # each query is known there
        DeltaTable(job).check(spark, Identity(feed, str(len(feed)), 1, 1), None)


def test_r09_second_new_query_of_a_feed_is_refused(spark: SparkSession, lake: Lake) -> None:
    """Both were started when neither had written anything."""
    job = lake.job(output="lake.two_queries", gold="lake.two_queries_gold", delete_when=None)
    silver, gold = DeltaTable(job), GoldTable(job, "gold")
    rows, other = events(spark, 0, 10), replace(WHO, query="other")
    write(silver, rows, WHO, 0)
    write(gold, rows, WHO, 0)
    refused = r"is written by query query of feed feed, and"
    with pytest.raises(IngestError, match=refused):
        write(DeltaTable(job), rows, other, 0)
    with pytest.raises(IngestError, match=refused):
        DeltaTable(job).check(spark, replace(other, query=None), None)
    with pytest.raises(IngestError, match="holds the latest state from another query"):
        write(GoldTable(job, "gold"), rows, replace(other, feed="another"), 0)
    added = DeltaTable(replace(job, append=True))
    write(added, rows, replace(other, query="added"), 0)
    DeltaTable(job).take_over(spark, Identity("feed", None, run="run"))
    for old in (DeltaTable(job), silver, added):  # also one that was writing all the time
        who = replace(WHO, query="added") if old is added else WHO
        with pytest.raises(IngestError, match=r"run run goes on in "):
            write(old, rows, who, 1)
    write(DeltaTable(job), rows, replace(other, run="run"), 0)
    write(DeltaTable(job), rows, other, 0)  # known by now
    DeltaTable(job).take_over(spark, Identity("feed", None, run="second"))
    with pytest.raises(IngestError, match=r"run second goes on in .* where query other ended"):
        write(DeltaTable(job), rows, replace(other, run="run"), 1)
    assert spark.table(job.output).count() == 30


@pytest.mark.parametrize("kind", ["new", "resumed"])
def test_r09_of_two_queries_that_look_at_once_one_goes_on(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    job, rows = lake.job(output=f"lake.looked_{kind}"), events(spark, 0, 10)
    write(DeltaTable(job), rows, Identity("another", "its"), 0)
    note = DeltaTable._alter
    first = Identity("feed", "first", run="first" if kind == "resumed" else None)
    second = Identity("feed", "second", run="a second" if kind == "resumed" else None)

    def begin(who: Identity) -> None:
        if who.run:
            DeltaTable(job).take_over(spark, replace(who, query=None))
        else:
            write(DeltaTable(job), rows, who, 0)

    def meanwhile(table: DeltaTable, spark: SparkSession, change: str) -> None:
        monkeypatch.undo()
        begin(second)
        note(table, spark, change)

    monkeypatch.setattr(DeltaTable, "_alter", meanwhile)
    refused = "is written by query second|run first goes on"

    def goes_on(who: Identity) -> bool:
        try:
            if who is first:  # the second one begins meanwhile
                begin(who)
            write(DeltaTable(job), rows, who, 0)
        except IngestError as error:
            return not re.search(refused, str(error))
        return True

    assert [goes_on(who) for who in (first, second)].count(True) == 1
    assert spark.table(job.output).count() == 20


def write_while(
    folder: Path, rows: DataFrame, write: Callable[[DataFrame], object], other: Callable[[], object]
) -> None:
    """Write, and do something else while the rows are read. Raises what the write raises."""
    reading, done = folder / "reading", folder / "done"

    @udf("int", useArrow=False)
    def wait(n: int) -> int:
        reading.touch()
        while not done.exists():
            time.sleep(0.01)
        return n

    slow = rows.coalesce(1).withColumn("n", wait("n"))
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write, slow)
        while not (reading.exists() or writing.done()):
            time.sleep(0.01)
        try:
            other()
        finally:
            done.touch()
        writing.result()


def test_another_writer_changes_rows_during_a_merge(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    gold = GoldTable(lake.job(gold="lake.merged", delete_when=None), "gold")
    write(gold, events(spark, 0, 10), WHO, 0)

    def other() -> None:  # in a session of its own, as the micro-batches of a query
        spark.newSession().sql("UPDATE lake.merged SET headers = map('from', 'correction')")

    gold.prepare(events(spark, 10, 10), WHO, 1)
    write_while(tmp_path, events(spark, 10, 10), lambda rows: gold.write(rows, WHO, 1), other)
    write(gold, events(spark, 10, 10), WHO, 1)  # a replay, too
    assert {row.entity: row.n for row in spark.table("lake.merged").collect()} == {
        f"e{n % 7}": n for n in range(20)
    }


@pytest.mark.parametrize("kind", [DeltaTable, GoldTable])
def test_r09_write_that_began_before_another_query_went_on_is_refused(
    spark: SparkSession, lake: Lake, tmp_path: Path, kind: type[DeltaTable]
) -> None:
    name = f"lake.went_on_{kind.__name__}".lower()
    role = "gold" if kind is GoldTable else "output"
    table = kind(lake.job(**{role: name, "delete_when": None, "bronze": None}), role)
    write(table, events(spark, 0, 7), WHO, 0)
    newer = Identity("feed", None, run="newer")
    with pytest.raises(IngestError, match=f"run newer goes on in {name} where query query ended"):
        write_while(
            tmp_path,
            events(spark, 7, 7),
            lambda rows: table.write(rows, WHO, 1),
            lambda: table.take_over(spark.newSession(), newer),
        )
    write(table, events(spark, 14, 7), replace(newer, query="its"), 0)
    written = {"gold": [*range(14, 21)], "output": [*range(7), *range(14, 21)]}
    assert sorted(row.n for row in spark.table(name).collect()) == written[role]


def test_r08_late_run_changes_nothing_and_is_told(spark: SparkSession, lake: Lake) -> None:
    """Its merge would bring back an entity that a later micro-batch deleted."""
    job = lake.job(output="lake.late", gold="lake.late_gold", delete_when="n >= 10", bronze=None)
    silver, gold = DeltaTable(job), GoldTable(job, "gold")
    for number in (0, 1, 1, 0):
        for table in (silver, gold):
            if number or table.owners(spark, WHO) == {}:
                table.prepare(events(spark, number * 10, 10), WHO, number)
            table.write(events(spark, number * 10, 10), WHO, number)
    assert spark.table("lake.late_gold").isEmpty()
    assert spark.table(job.output).count() == 20
    with pytest.raises(IngestError, match=r"holds micro-batch 1 of query query, and this run is a"):
        DeltaTable(job).prepare(events(spark, 0, 10), WHO, 0)


def test_r10_one_odd_name_in_each_place_is_written(spark: SparkSession, lake: Lake) -> None:
    sent = spark.createDataFrame(
        [(json.dumps({"id": "a", "geo.lat": 59.9, "s": {"a.b": 1}, "a": [{"x y": 1}]}),)],
        "data STRING",
    )
    for number, schema in enumerate(
        ("id STRING, `geo.lat` DOUBLE", "s STRUCT<`a.b`: INT>", "a ARRAY<STRUCT<`x y`: INT>>")
    ):
        table = DeltaTable(lake.job(output=f"lake.odd{number}"))
        if number:  # the columns come later
            write(table, spark.range(1), WHO, 0)
        rows = sent.select(F.from_json("data", schema).alias("event")).select("event.*")
        write(table, rows, WHO, 1)
        found = (
            spark.table(table.name).where("batch = 1").select(column(rows.columns[-1])).collect()
        )
        assert found[0][0] is not None


def test_r10_columns_of_a_transform_that_come_from_another_table_and_later(
    spark: SparkSession, lake: Lake
) -> None:
    metadata = {"CURRENT_DEFAULT": "7", "EXISTS_DEFAULT": "7", "comment": "of an 'order'\\"}
    table = DeltaTable(lake.job(output="lake.grown"))
    rows = spark.range(3).select(F.col("id").alias("n", metadata=metadata))
    write(table, rows, WHO, 0)
    write(table, rows.select("*", F.lit("x").alias("select", metadata=metadata)), WHO, 1)
    write(table, rows, WHO, 2)
    found = [(row["batch"], row["select"]) for row in spark.table(table.name).collect()]
    assert Counter(found) == {(0, None): 3, (1, "x"): 3, (2, None): 3}


def test_transactions_of_the_session_are_its_own(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(output="lake.own", gold="lake.own_gold", delete_when=None)
    gold, name = GoldTable(job, "gold"), "spark.databricks.delta.write.txnAppId"
    write(gold, events(spark, 0, 10), WHO, 0)
    with pytest.raises(Exception, match="here"):
        gold.write(events(spark, 10, 10).withColumn("n", F.raise_error(F.lit("here"))), WHO, 1)
    assert spark.conf.get(name, None) is None
    events(spark, 0, 5).select("entity").writeTo("lake.own_gold").append()  # what a user writes
    assert spark.table("lake.own_gold").count() == 12
    spark.sql("DELETE FROM lake.own_gold WHERE query IS NULL")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    spark.conf.set(name, "of the application")
    try:
        for _ in range(2):
            write(gold, events(spark, 10, 10), WHO, 1)
        assert spark.conf.get(name) == "of the application"
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
        spark.conf.unset(name)
    assert spark.table("lake.own_gold").where("batch = 1").count() == 7


def test_r11_columns_that_a_replay_is_found_by_have_statistics(
    spark: SparkSession, lake: Lake
) -> None:
    wide = [f"int(id) AS c{n}" for n in range(34)]
    table = DeltaTable(lake.job(output="lake.wide"))
    write(table, spark.range(0).selectExpr(*wide), WHO, 0)
    assert spark.table(table.name).columns[:3] == ["feed", "query", "batch"]
    # 20 micro-batches, a file each, in one commit.
    batches = spark.range(20).repartitionByRange(20, "id")
    batches = batches.selectExpr("'feed' AS feed", "'query' AS query", "id AS batch", *wide)
    batches.writeTo(table.name).append()
    assert len(spark.table(table.name).inputFiles()) == 20
    found = spark.table(table.name).where("query = 'query' AND batch = 15")
    assert len(found.inputFiles()) == 1
