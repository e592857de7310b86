"""Single writes to Delta tables: of an attempt that is repeated, of a late run, of two at once."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.functions import udf

from feedapi_client.spark.ingest import IngestError, tables
from feedapi_client.spark.ingest.gold import GoldTable
from feedapi_client.spark.ingest.identity import Identity
from feedapi_client.spark.ingest.tables import CatalogTable
from tests.spark.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

WHO = Identity("feed", "query", epoch=1)


def test_key_that_a_transform_makes_null_is_one_entity(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(gold="lake.no_key", key=["entity", "partition"], delete_when="n >= 20")
    gold, who = GoldTable(job, "gold"), Identity("feed", "query", epoch=1)
    for number in range(3):
        rows = events(spark, number * 10, 10).withColumn("entity", F.lit(None).cast("string"))
        gold.merge(rows, who, number)
        found = [row.n for row in spark.table("lake.no_key").collect()]
        assert found == ([number * 10 + 9] if number < 2 else [])


def test_table_compacts_itself_where_its_property_says_so(spark: SparkSession, lake: Lake) -> None:
    job, who = lake.job(output="lake.compacted"), Identity("feed", "query", epoch=1)
    table = CatalogTable(job)
    table.write(events(spark, 0, 10), who, 0)
    (property,) = re.findall(
        r"SET\s+TBLPROPERTIES\s*(\(.*?\))",
        Path("docs/pages/lakehouse.md").read_text(encoding="utf-8"),
    )
    spark.sql(f"ALTER TABLE {job.output} SET TBLPROPERTIES {property}")
    spark.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
    try:
        for number in range(1, 4):
            table.write(events(spark, number * 10, 10), who, number)
        again = replace(who, epoch=2)
        table.write(events(spark, 30, 10), again, 3)  # a replay, whose rows lie in a joined file
    finally:
        spark.conf.unset("spark.databricks.delta.autoCompact.minNumFiles")
    assert len(spark.table(job.output).inputFiles()) <= 2
    assert sorted(row.n for row in spark.table(job.output).collect()) == list(range(40))


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


def test_r09_table_older_than_its_checkpoint_is_refused(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(output="lake.old", gold="lake.old_gold", delete_when=None)
    silver, gold = CatalogTable(job), GoldTable(job, "gold")
    first: dict[str, int] = {}
    for number, count in ((0, 10), (1, 10), (2, 0)):  # the last one has rows for none of both
        silver.write(events(spark, number * 10, count), WHO, number)
        gold.merge(events(spark, number * 10, count), WHO, number)
        for table in (silver, gold):
            first.setdefault(table.name, lake.newest(table.name).version)
    spark.sql("DELETE FROM lake.old WHERE batch = 0")
    spark.sql("OPTIMIZE lake.old")
    spark.sql("VACUUM lake.old")
    spark.sql("ALTER TABLE lake.old ADD COLUMNS (of_mine INT)")
    for table in (silver, gold):
        check_committed(spark, table, 2)
        last = lake.newest(table.name)
        spark.sql(f"RESTORE TABLE {table.name} TO VERSION AS OF {first[table.name]}")
        with pytest.raises(
            IngestError,
            match=f"{table.name} is older than the checkpoint: it ends with micro-batch 0, and "
            "query query committed micro-batch 2",
        ):
            check_committed(spark, table, 2)
        spark.sql(f"RESTORE TABLE {table.name} TO VERSION AS OF {last.version}")
    last = lake.newest("lake.old")
    silver.write(events(spark, 30, 10).selectExpr("*", "int(7) AS of_mine"), WHO, 3)
    held = lake.newest("lake.old")
    for then, rows in ((last, 10), (held, 20)):
        spark.sql(f"RESTORE TABLE lake.old TO TIMESTAMP AS OF '{then.timestamp}'")
        assert spark.table("lake.old").count() == rows
        if then is last:
            with pytest.raises(IngestError, match="is older than the checkpoint: it ends with"):
                check_committed(spark, silver, 3)
    check_committed(spark, silver, 3)


def test_r09_table_put_back_from_its_clone_is_refused_where_it_is_older(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    job = lake.job(output="lake.cloned")
    table = CatalogTable(job)
    for number, place in ((0, "lake.backup"), (2, f"delta.`{tmp_path}/backup`")):
        table.write(events(spark, 0, 10), WHO, number)
        spark.sql(f"CREATE TABLE {place} SHALLOW CLONE lake.cloned")
        spark.sql("DELETE FROM lake.cloned")
        spark.sql(f"CREATE OR REPLACE TABLE lake.cloned SHALLOW CLONE {place}")
        check_committed(spark, table, number)  # the clone lacks nothing
        table.write(events(spark, 10, 10), WHO, number + 1)
        last = lake.newest("lake.cloned")
        spark.sql("DELETE FROM lake.cloned")
        spark.sql(f"CREATE OR REPLACE TABLE lake.cloned SHALLOW CLONE {place}")
        with pytest.raises(IngestError, match="cloned is older than the checkpoint: it ends with"):
            check_committed(spark, table, number + 1)
        spark.sql(f"RESTORE TABLE lake.cloned TO VERSION AS OF {last.version}")
        check_committed(spark, table, number + 1)


def check_committed(spark: SparkSession, table: CatalogTable, batch: int) -> None:
    """Check the table as the next run does, whose checkpoint ends with that micro-batch."""
    type(table)(table.job, table.role).check(
        spark, replace(WHO, last_batch=batch, last_offset=batch), None
    )


def test_two_feeds_in_one_table_at_once(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(output="lake.two_feeds")

    def write(feed: str) -> None:
        table = CatalogTable(job)
        for epoch in (1, 2):  # a replay, too
            table.write(events(spark, 0, 10), Identity(feed, str(len(feed)), epoch=epoch), 0)

    feeds = ["host:80/a", "it's \\b", "https://auth.example/tokens?url=password"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, feeds))
    rows = spark.table(job.output).groupBy("feed", "query").count().collect()
    assert sorted(tuple(row) for row in rows) == sorted((f, str(len(f)), 10) for f in feeds)
    for feed in feeds:  # each query is known there
        CatalogTable(job).check(spark, Identity(feed, str(len(feed)), 0, 0), None)


def test_r09_second_new_query_of_a_feed_is_refused(spark: SparkSession, lake: Lake) -> None:
    """Both were started when neither had written anything."""
    job = lake.job(output="lake.two_queries", gold="lake.two_queries_gold", delete_when=None)
    silver, gold = CatalogTable(job), GoldTable(job, "gold")
    rows, who = events(spark, 0, 10), Identity("feed", "query", epoch=1)
    silver.write(rows, who, 0)
    gold.merge(rows, who, 0)
    other = Identity("feed", "other", epoch=1)
    refused = r"is written by query query of feed feed, and.*UNSET"
    with pytest.raises(IngestError, match=refused):
        CatalogTable(job).write(rows, other, 0)
    with pytest.raises(IngestError, match=refused):
        CatalogTable(job).check(spark, other, None)
    with pytest.raises(IngestError, match="holds the latest state from another query"):
        GoldTable(job, "gold").merge(rows, replace(other, feed="another"), 0)
    assert spark.table(job.output).count() == 10
    CatalogTable(job).take_over(spark, Identity("feed", None, run="run"))
    for old in (CatalogTable(job), silver):  # also one that was writing all the time
        with pytest.raises(IngestError, match=r"run run goes on in .* UNSET"):
            old.write(rows, who, 1)
    CatalogTable(job).write(rows, replace(other, run="run"), 0)
    CatalogTable(job).write(rows, other, 0)  # known by now
    CatalogTable(job).take_over(spark, Identity("feed", None, run="second"))
    with pytest.raises(IngestError, match=r"run second goes on in .* where query other ended"):
        CatalogTable(job).write(rows, replace(other, run="run"), 1)
    assert spark.table(job.output).count() == 20


def test_r09_of_two_resumptions_at_once_one_goes_on(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rows = lake.job(output="lake.taken_over"), events(spark, 0, 10)
    CatalogTable(job).write(rows, WHO, 0)
    note = CatalogTable._set_properties

    def meanwhile(table: CatalogTable, spark: SparkSession, properties: Mapping[str, str]) -> None:
        monkeypatch.undo()
        CatalogTable(job).take_over(spark, Identity("feed", None, run="other"))
        note(table, spark, properties)

    monkeypatch.setattr(CatalogTable, "_set_properties", meanwhile)
    with pytest.raises(IngestError, match="run other goes on"):
        CatalogTable(job).take_over(spark, Identity("feed", None, run="run"))
    CatalogTable(job).write(rows, Identity("feed", "next", epoch=1, run="other"), 0)
    assert spark.table(job.output).count() == 20


def test_r09_of_two_new_queries_that_look_at_once_one_is_refused(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rows = lake.job(output="lake.looked"), events(spark, 0, 10)
    CatalogTable(job).write(rows, Identity("another", "its", epoch=1), 0)
    note = CatalogTable._set_properties

    def meanwhile(table: CatalogTable, spark: SparkSession, properties: Mapping[str, str]) -> None:
        monkeypatch.undo()
        CatalogTable(job).write(rows, Identity("feed", "other", epoch=1), 0)
        note(table, spark, properties)

    monkeypatch.setattr(CatalogTable, "_set_properties", meanwhile)
    who = Identity("feed", "query", epoch=1)
    for _ in range(2):
        with pytest.raises(IngestError, match="is written by query other of feed feed, and"):
            CatalogTable(job).write(rows, who, 0)
    assert spark.table(job.output).count() == 20
    assert CatalogTable(job).order(spark).keys() == {"its", "other"}


@pytest.mark.parametrize("other", ["commits", "is no table"])
def test_folder_of_the_table_is_there_and_no_commit_yet(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """As while another query creates the table, or where other files are."""
    job = lake.job(output=f"lake.other_{other.replace(' ', '_')}")
    seen: list[bool] = []
    is_being_created = tables._is_being_created
    file = lake.folder / "lake" / job.output.removeprefix("lake.") / "file"
    file.parent.mkdir(parents=True)
    file.touch()

    def looked(error: Exception) -> bool:
        seen.append(is_being_created(error))
        if other == "commits":
            file.unlink(missing_ok=True)
        return seen[-1]

    monkeypatch.setattr(tables, "_is_being_created", looked)
    monkeypatch.setattr(tables, "_ATTEMPTS_TO_CREATE", 2)
    table = CatalogTable(job)
    if other == "commits":
        table.write(events(spark, 0, 10), Identity("feed", "query"), 0)
        assert spark.table(job.output).count() == 10
        assert seen == [True]
    else:
        with pytest.raises(Exception, match="is not empty"):
            table.write(events(spark, 0, 10), Identity("feed", "query"), 0)
        assert file.exists()
        assert seen == [True] * len(seen)


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
    spark: SparkSession, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = GoldTable(lake.job(gold="lake.merged", delete_when=None), "gold")
    who = Identity("feed", "query")
    gold.merge(events(spark, 0, 10), who, 0)
    conflicts: list[bool] = []
    is_conflict = tables._is_conflict

    def recorded(error: Exception) -> bool:
        conflicts.append(is_conflict(error))
        return conflicts[-1]

    monkeypatch.setattr(tables, "_is_conflict", recorded)

    def other() -> None:  # in a session of its own, as the micro-batches of a query
        spark.newSession().sql("UPDATE lake.merged SET headers = map('from', 'correction')")

    write_while(tmp_path, events(spark, 10, 10), lambda rows: gold.merge(rows, who, 1), other)
    assert conflicts == [True]
    gold.merge(events(spark, 10, 10), who, 1)  # a replay, too
    assert {row.entity: row.n for row in spark.table("lake.merged").collect()} == {
        f"e{n % 7}": n for n in range(20)
    }


@pytest.mark.parametrize("kind", [CatalogTable, GoldTable])
def test_r09_write_that_began_before_another_query_went_on_is_refused(
    spark: SparkSession, lake: Lake, tmp_path: Path, kind: type[CatalogTable]
) -> None:
    name = f"lake.went_on_{kind.__name__}".lower()
    role = "gold" if kind is GoldTable else "output"
    job = lake.job(**{role: name, "delete_when": None})

    def write(rows: DataFrame, who: Identity, number: int) -> None:
        table = kind(job, role)
        if isinstance(table, GoldTable):
            table.merge(rows, who, number)
        else:
            table.write(rows, who, number)

    write(events(spark, 0, 7), WHO, 0)
    newer = Identity("feed", None, run="newer")
    with pytest.raises(IngestError, match=f"run newer goes on in {name} where query query ended"):
        write_while(
            tmp_path,
            events(spark, 7, 7),
            lambda rows: write(rows, WHO, 1),
            lambda: kind(job, role).take_over(spark.newSession(), newer),
        )
    write(events(spark, 14, 7), replace(newer, query="its", epoch=1), 0)
    written = {"gold": [*range(14, 21)], "output": [*range(7), *range(14, 21)]}
    assert sorted(row.n for row in spark.table(name).collect()) == written[role]


def test_r08_late_run_changes_nothing(spark: SparkSession, lake: Lake) -> None:
    """Its merge would bring back an entity that a later micro-batch deleted."""
    job = lake.job(output="lake.late_silver", gold="lake.late_gold", delete_when="n >= 10")
    late, now = Identity("feed", "query", epoch=7), Identity("feed", "query", epoch=8)
    silver, gold = CatalogTable(job), GoldTable(job, "gold")
    for who, number in ((late, 0), (now, 1)):
        silver.write(events(spark, number * 10, 10), who, number)
        gold.merge(events(spark, number * 10, 10), who, number)
    assert spark.table("lake.late_gold").isEmpty()
    slow = CatalogTable(job), GoldTable(job, "gold")
    slow[0].write(events(spark, 0, 0), late, 0)
    slow[1].merge(events(spark, 0, 10), late, 0)
    assert spark.table("lake.late_gold").isEmpty()
    assert spark.table(job.output).count() == 20
    silver.write(events(spark, 10, 3), now, 1)  # a replay of the run that may write
    assert spark.table(job.output).count() == 20
    later = Identity("feed", "query", epoch=9)
    silver.write(events(spark, 10, 3), later, 1)  # as is that of the next run
    assert spark.table(job.output).count() == 13


def test_r10_one_odd_name_in_each_place_is_written(spark: SparkSession, lake: Lake) -> None:
    sent = spark.createDataFrame(
        [(json.dumps({"id": "a", "geo.lat": 59.9, "s": {"a.b": 1}, "a": [{"x y": 1}]}),)],
        "data STRING",
    )
    for number, schema in enumerate(
        ("id STRING, `geo.lat` DOUBLE", "s STRUCT<`a.b`: INT>", "a ARRAY<STRUCT<`x y`: INT>>")
    ):
        job = lake.job(output=f"lake.odd{number}")
        rows = sent.select(F.from_json("data", schema).alias("event")).select("event.*")
        CatalogTable(job).write(rows, Identity("feed", "query", epoch=1), 0)
        [[*_, written]] = spark.table(job.output).collect()
        assert written is not None


def test_r10_columns_of_a_transform_that_come_from_another_table_and_later(
    spark: SparkSession, lake: Lake
) -> None:
    metadata = {"CURRENT_DEFAULT": "7", "EXISTS_DEFAULT": "7", "comment": "of an 'order'\\"}
    job, who = lake.job(output="lake.grown"), Identity("feed", "query", epoch=1)
    table = CatalogTable(job)
    rows = spark.range(3).select(F.col("id").alias("n", metadata=metadata))
    table.write(rows, who, 0)
    table.write(rows.select("*", F.lit("x").alias("select", metadata=metadata)), who, 1)
    table.write(rows, who, 2)
    found = [(row["batch"], row["select"]) for row in spark.table(job.output).collect()]
    assert Counter(found) == {(0, None): 3, (1, "x"): 3, (2, None): 3}


def test_repeated_batch_is_exact_where_the_session_overwrites_partitions(
    spark: SparkSession, lake: Lake
) -> None:
    job = lake.job(output="lake.dynamic", partition_by=["day"])
    table, who = CatalogTable(job), Identity("feed", "query", epoch=3)
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    spark.conf.set("spark.databricks.delta.write.txnAppId", "of the application")
    spark.conf.set("spark.databricks.delta.write.txnVersion", "7")
    try:
        for epoch, day in ((3, "2026-11-24"), (4, "2026-11-25")):
            rows = events(spark, 0, 10).selectExpr("*", f"'{day}' AS day")
            table.write(rows, replace(who, epoch=epoch), 0)
        GoldTable(lake.job(gold="lake.dynamic_gold", delete_when=None), "gold").merge(
            events(spark, 0, 10), who, 0
        )
        assert spark.conf.get("spark.databricks.delta.write.txnAppId") == "of the application"
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
        spark.conf.unset("spark.databricks.delta.write.txnAppId")
        spark.conf.unset("spark.databricks.delta.write.txnVersion")
    found = spark.table(job.output).groupBy("day").count().collect()
    assert [tuple(row) for row in found] == [("2026-11-25", 10)]


def test_r11_columns_that_a_replay_is_found_by_have_statistics(
    spark: SparkSession, lake: Lake
) -> None:
    wide = [f"int(id) AS c{n}" for n in range(34)]
    job = lake.job(output="lake.wide")
    table, who = CatalogTable(job), Identity("feed", "query", epoch=1)
    table.write(spark.range(0).selectExpr(*wide), who, 0)
    assert spark.table(job.output).columns[:3] == ["feed", "query", "batch"]
    # 20 micro-batches, a file each, in one commit.
    batches = spark.range(20).repartitionByRange(20, "id")
    batches = batches.selectExpr("'feed' AS feed", "'query' AS query", "id AS batch", *wide)
    batches.writeTo(job.output).append()
    assert len(spark.table(job.output).inputFiles()) == 20
    found = spark.table(job.output).where("query = 'query' AND batch = 15")
    assert len(found.inputFiles()) == 1
    table.write(spark.range(7).selectExpr(*wide), who, 20)
    table.write(spark.range(7).selectExpr(*wide), replace(who, epoch=2), 20)  # a replay
    assert spark.table(job.output).count() == 27
    last = spark.sql("DESCRIBE HISTORY lake.wide LIMIT 1").first()
    assert last is not None
    assert int(last.operationMetrics["numRemovedFiles"]) <= 2
