"""``feedapi ingest`` into real Delta tables: exact or refused, whatever happens to them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.functions import udf

from feedapi_client.spark.ingest import (
    Ingest,
    IngestError,
    MicroBatchError,
    Summary,
    requirements,
    tables,
)
from feedapi_client.spark.ingest.gold import GoldTable
from feedapi_client.spark.ingest.identity import Identity
from feedapi_client.spark.ingest.tables import CatalogTable
from feedapi_client.testing import Publisher
from tests.docs.snippets import python_blocks
from tests.spark.slow_workers import run
from tests.spark.unpleasant_names import UNPLEASANT, unpleasant_event, unpleasant_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SCHEMA = "entity STRING, n INT, gone BOOLEAN"


class Lake:
    """A feed and the tables of one query, which all tests use. They hold what was published."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
        self._numbers = itertools.count()
        spark.sql(f"CREATE DATABASE lake LOCATION '{folder / 'lake'}'")

    def job(self, **more: Any) -> Ingest:
        return Ingest(
            **{
                "url": str(self.publisher.url),
                "output": "lake.silver",
                "format": "delta",
                "schema": SCHEMA,
                "bronze": "lake.bronze",
                "rejected": "lake.rejected",
                "gold": "lake.gold",
                "key": ["entity"],
                "delete_when": "gone",
                "checkpoint": str(self.folder / "checkpoint"),
                "staging": (self.folder / "staging").as_uri(),
                **more,
            }
        )

    def publish(self, *entities: str, **more: Any) -> None:
        for entity in entities or [f"e{n % 7}" for n in range(30)]:
            event = {"entity": entity, "n": next(self._numbers), **more}
            self.publisher.publish(entity, event)

    def ingest(self, **more: Any) -> Summary:
        return run(self.spark, self.job(**more))

    def check(self) -> None:
        """Compare all tables with what was published."""
        events = self.publisher.payloads()
        bronze = Counter(row[0] for row in self.rows("SELECT data FROM lake.bronze"))
        assert sum(bronze.values()) == len(events)
        assert set(bronze.values()) <= {1}
        fitting = [event for event in events if isinstance(event["n"], int)]
        silver = [row.n for row in self.rows("SELECT n FROM lake.silver")]
        assert sorted(silver) == sorted(event["n"] for event in fitting)
        assert len(self.rows("SELECT 1 FROM lake.rejected")) == len(events) - len(fitting)
        state: dict[str, int] = {}
        for event in fitting:
            state.pop(event["entity"], None)
            if not event.get("gone"):
                state[event["entity"]] = event["n"]
        assert {row.entity: row.n for row in self.rows("SELECT * FROM lake.gold")} == state

    def rows(self, query: str) -> list[Any]:
        return self.spark.sql(query).collect()


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    lake = Lake(spark, tmp_path_factory.mktemp("lake"))
    with lake.publisher.serve():
        yield lake


@pytest.fixture(scope="module")
def filled(lake: Lake) -> Lake:
    """The lake after the first micro-batch."""
    lake.publish()
    lake.publish("e1", n="many")
    summary = lake.ingest()
    assert (summary.rows, summary.unparsed, summary.batches) == (30, 1, 1)
    return lake


# ---------------------------------------------------------------------- exact


def test_first_batch_into_new_tables(filled: Lake) -> None:
    filled.check()


def test_gold_follows_changes_deletions_and_new_columns(filled: Lake) -> None:
    filled.publish("e1", "e2", "e3", gone=True)
    filled.publish("e2")
    filled.publisher.split(0, into=2)
    filled.publish("e4", "e5")
    filled.publish("e6", price=1.5)
    filled.ingest(schema=f"{SCHEMA}, price DOUBLE")
    filled.check()
    assert filled.rows("SELECT entity FROM lake.gold WHERE price = 1.5")[0].entity == "e6"
    filled.publish("e1", "e6")
    filled.ingest()  # the old schema goes on writing
    filled.check()


def test_replay_after_a_failure_and_optimize(filled: Lake) -> None:
    failed: list[int] = []

    def fails_once(rows: DataFrame, number: int) -> DataFrame:
        if not failed:
            failed.append(number)
            fails = F.raise_error(F.lit("here"))
            return rows.withColumn("n", fails.cast(rows.schema["n"].dataType))
        return rows

    filled.publish()
    before = filled.rows("SELECT count(*) FROM lake.bronze")[0][0]
    with pytest.raises(MicroBatchError, match="here"):
        filled.ingest(transform=fails_once)
    assert filled.rows("SELECT count(*) FROM lake.bronze")[0][0] == before + 30  # half written
    filled.spark.sql("OPTIMIZE lake.bronze")
    filled.ingest(transform=fails_once)
    filled.check()


def test_batch_that_was_written_and_not_committed_is_replaced(filled: Lake) -> None:
    filled.publish(*["e1"] * 60)  # of one partition: more than a page, whatever its checkpoints
    small = filled.ingest(options={"maxEventsPerPartition": "50"})
    assert small.batches >= 2
    commits = filled.folder / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for log in commits.glob(f"*{last}*"):
        log.unlink()
    filled.ingest()
    filled.check()


def test_table_compacts_itself_where_its_property_says_so(spark: SparkSession, lake: Lake) -> None:
    job, who = lake.job(output="lake.compacted"), Identity("feed", "query", epoch=1)
    table = CatalogTable(job, job.output)
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


def test_two_feeds_in_one_table_at_once(spark: SparkSession, lake: Lake) -> None:
    job = lake.job(output="lake.two_feeds")

    def write(feed: str) -> None:
        table = CatalogTable(job, job.output)
        for number in (0, 1, 1):  # a replay, too
            table.write(events(spark, number * 10, 10), Identity(feed, str(len(feed))), number)

    feeds = ["host:80/a", "it's \\b"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, feeds))
    rows = spark.table(job.output).groupBy("feed", "query").count().collect()
    assert sorted(tuple(row) for row in rows) == [(feed, str(len(feed)), 20) for feed in feeds]
    for feed in feeds:  # each query is known there
        CatalogTable(job, job.output).check(spark, Identity(feed, str(len(feed)), 1, 1), None)


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
    table = CatalogTable(job, job.output)
    if other == "commits":
        table.write(events(spark, 0, 10), Identity("feed", "query"), 0)
        assert spark.table(job.output).count() == 10
        assert seen == [True]
    else:
        with pytest.raises(Exception, match="is not empty"):
            table.write(events(spark, 0, 10), Identity("feed", "query"), 0)
        assert file.exists()
        assert seen == [True] * len(seen)


def test_another_writer_changes_rows_during_a_merge(
    spark: SparkSession, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = GoldTable(lake.job(gold="lake.merged", delete_when=None), "lake.merged")
    who = Identity("feed", "query")
    gold.merge(events(spark, 0, 10), who, 0)
    reading, changed = tmp_path / "reading", tmp_path / "changed"
    conflicts: list[bool] = []
    is_conflict = tables._is_conflict

    def recorded(error: Exception) -> bool:
        conflicts.append(is_conflict(error))
        return conflicts[-1]

    monkeypatch.setattr(tables, "_is_conflict", recorded)

    @udf("int", useArrow=False)
    def wait(n: int) -> int:
        """Read the events of the merge only when the other writer has committed."""
        reading.touch()
        while not changed.exists():
            time.sleep(0.01)
        return n

    slow = events(spark, 10, 10).coalesce(1).withColumn("n", wait("n"))
    with ThreadPoolExecutor() as pool:
        merging = pool.submit(gold.merge, slow, who, 1)
        while not (reading.exists() or merging.done()):
            time.sleep(0.01)
        other = spark.newSession()  # as the micro-batches of a query have one of their own
        other.sql("UPDATE lake.merged SET headers = map('from', 'correction')")
        changed.touch()
        merging.result()
    assert conflicts == [True]
    gold.merge(events(spark, 10, 10), who, 1)  # a replay, too
    assert {row.entity: row.n for row in spark.table("lake.merged").collect()} == {
        f"e{n % 7}": n for n in range(20)
    }


def test_r08_late_run_changes_nothing(spark: SparkSession, lake: Lake) -> None:
    """Its merge would bring back an entity that a later micro-batch deleted."""
    job = lake.job(output="lake.late_silver", gold="lake.late_gold", delete_when="n >= 10")
    late, now = Identity("feed", "query", epoch=7), Identity("feed", "query", epoch=8)
    silver, gold = CatalogTable(job, job.output), GoldTable(job, "lake.late_gold")
    for who, number in ((late, 0), (now, 1)):
        silver.write(events(spark, number * 10, 10), who, number)
        gold.merge(events(spark, number * 10, 10), who, number)
    assert spark.table("lake.late_gold").isEmpty()
    slow = CatalogTable(job, job.output), GoldTable(job, "lake.late_gold")
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
        for batch in range(2):
            CatalogTable(job, job.output).write(rows, Identity("feed", "query", epoch=1), batch)
        *_, written = spark.table(job.output).collect()[1]
        assert written is not None


def test_r10_columns_of_a_transform_that_come_from_another_table_and_later(
    spark: SparkSession, lake: Lake
) -> None:
    metadata = {"CURRENT_DEFAULT": "7", "EXISTS_DEFAULT": "7", "comment": "of an 'order'\\"}
    job, who = lake.job(output="lake.grown"), Identity("feed", "query", epoch=1)
    table = CatalogTable(job, job.output)
    rows = spark.range(3).select(F.col("id").alias("n", metadata=metadata))
    table.write(rows, who, 0)
    table.write(rows.select("*", F.lit("x").alias("select", metadata=metadata)), who, 1)
    table.write(rows, who, 2)
    found = [(row["batch"], row["select"]) for row in spark.table(job.output).collect()]
    assert Counter(found) == {(0, None): 3, (1, "x"): 3, (2, None): 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schema": "id STRING, ID INT"}, "columns id, ID have the same name"),
        ({"output": "a-b"}, "'a-b' can't be the name of a table"),
        ({"output": "a..b"}, "'a..b' can't be the name of a table"),
        (
            {"bronze": "Default.`T`", "schema": "id INT"},
            "two are the same in spark_catalog.default",
        ),
    ],
)
def test_r10_names_that_delta_can_not_hold_are_refused(
    spark: SparkSession, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    places = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    spark.conf.set("spark.sql.caseSensitive", "true")  # Delta takes no notice of it
    try:
        with pytest.raises(IngestError, match=message):
            run(
                spark,
                Ingest(
                    **{"url": "http://x/feed", "output": "t", "format": "delta", **places, **given}
                ),
            )
    finally:
        spark.conf.set("spark.sql.caseSensitive", "false")
    assert not (tmp_path / "c").exists()


def test_r10_table_and_session_that_would_refuse_a_repeated_batch(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    own |= {"bronze": None, "rejected": None, "gold": None, "key": (), "delete_when": None}
    job = lake.job(output="lake.append_only", **own)
    appending = "spark.databricks.delta.properties.defaults.appendOnly"
    spark.conf.set(appending, "true")
    try:
        assert run(spark, job).batches == 1  # the table says what it needs
    finally:
        spark.conf.unset(appending)
    replacing = "spark.databricks.delta.replaceWhere.dataColumns.enabled"
    spark.conf.set(replacing, "false")
    try:
        with pytest.raises(IngestError, match=f"--conf {replacing}=true"):
            run(spark, job)
    finally:
        spark.conf.unset(replacing)
    spark.sql(f"ALTER TABLE {job.output} SET TBLPROPERTIES (delta.appendOnly = true)")
    with pytest.raises(IngestError, match=r"append_only has the property delta\.appendOnly"):
        run(spark, job)


def test_repeated_batch_is_exact_where_the_session_overwrites_partitions(
    spark: SparkSession, lake: Lake
) -> None:
    job = lake.job(output="lake.dynamic", partition_by=["day"])
    table, who = CatalogTable(job, job.output, ["day"]), Identity("feed", "query", epoch=3)
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    spark.conf.set("spark.databricks.delta.write.txnAppId", "of the application")
    spark.conf.set("spark.databricks.delta.write.txnVersion", "7")
    try:
        for epoch, day in ((3, "2026-11-24"), (4, "2026-11-25")):
            rows = events(spark, 0, 10).selectExpr("*", f"'{day}' AS day")
            table.write(rows, replace(who, epoch=epoch), 0)
        GoldTable(lake.job(delete_when=None), "lake.dynamic_gold").merge(
            events(spark, 0, 10), who, 0
        )
        assert spark.conf.get("spark.databricks.delta.write.txnAppId") == "of the application"
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
        spark.conf.unset("spark.databricks.delta.write.txnAppId")
        spark.conf.unset("spark.databricks.delta.write.txnVersion")
    found = spark.table(job.output).groupBy("day").count().collect()
    assert [tuple(row) for row in found] == [("2026-11-25", 10)]


def test_r10_columns_of_any_name_in_all_tables(spark: SparkSession, tmp_path: Path) -> None:
    publisher = Publisher(partitions=1, page_size=50)
    for n in range(6):
        publisher.append(0, unpleasant_event(n % 3, str(n)))
    spark.sql(f"CREATE DATABASE names LOCATION '{tmp_path / 'names'}'")
    with publisher.serve() as url:
        job = Ingest(
            url=str(url),
            output="names.silver",
            bronze="names.bronze",
            rejected="names.rejected",
            gold="names.gold",
            format="delta",
            schema=unpleasant_schema(),
            key=["order.id", "my-field"],
            delete_when="`Ärger` = '5'",
            partition_by=["a b"],
            prefix="my feed.",
            checkpoint=str(tmp_path / "checkpoint"),
            staging=(tmp_path / "staging").as_uri(),
        )
        for _ in range(2):  # the second run aligns with tables that are there
            assert run(spark, job).unparsed == 0
            publisher.append(0, unpleasant_event(9, "9"))
    silver = spark.table("names.silver")
    assert set(UNPLEASANT) < set(silver.columns)
    assert silver.select("`my feed.sequence`").count() == 7
    gold = {
        row["order.id"]: (row["Ärger"], row["geo.lat"])
        for row in spark.table("names.gold").collect()
    }
    assert gold == {"order.id 0": ("3", 0.5), "order.id 1": ("4", 1.5), "order.id 9": ("9", 9.5)}


def test_r11_columns_that_a_replay_is_found_by_have_statistics(
    spark: SparkSession, lake: Lake
) -> None:
    wide = [f"int(id) AS c{n}" for n in range(34)]
    job = lake.job(output="lake.wide")
    table, who = CatalogTable(job, job.output), Identity("feed", "query", epoch=1)
    table.write(spark.range(0).selectExpr(*wide), who, 0)
    assert spark.table(job.output).columns[:3] == ["feed", "query", "batch"]
    # 200 micro-batches, a file each, in one commit.
    batches = spark.range(200).repartitionByRange(200, "id")
    batches = batches.selectExpr("'feed' AS feed", "'query' AS query", "id AS batch", *wide)
    batches.writeTo(job.output).append()
    assert len(spark.table(job.output).inputFiles()) == 200
    found = spark.table(job.output).where("query = 'query' AND batch = 150")
    assert len(found.inputFiles()) == 1
    table.write(spark.range(7).selectExpr(*wide), who, 200)
    table.write(spark.range(7).selectExpr(*wide), replace(who, epoch=2), 200)  # a replay
    assert spark.table(job.output).count() == 207
    last = spark.sql("DESCRIBE HISTORY lake.wide LIMIT 1").first()
    assert last is not None
    assert int(last.operationMetrics["numRemovedFiles"]) <= 2


# ---------------------------------------------------------------------- refused


def test_r09_checkpoint_older_than_its_table_is_refused(filled: Lake) -> None:
    backup = filled.folder / "backup"
    shutil.copytree(filled.folder / "checkpoint", backup)
    for _ in range(2):
        filled.publish()
        filled.ingest()
    with pytest.raises(IngestError, match=r"the checkpoint is older than lake\.\w+: it ends with"):
        filled.ingest(checkpoint=str(backup))
    filled.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "lost"}, "all events would be written again"),
        ({"checkpoint": "lost", "append": True}, "holds the latest state from another query"),
        ({"schema": SCHEMA.replace("n INT", "n STRING")}, "column n is int and would become"),
        ({"partition_by": ["entity"]}, r"is partitioned by \[\], not by \['entity'\]"),
        ({"feed": "another"}, "keep its name with --feed"),
        ({"delete_when": "gonne"}, r"delete_when 'gonne' is no condition: .*gonne"),
        ({"gold": "nowhere.gold"}, r"no schema nowhere for table nowhere.gold: .*CREATE SCHEMA"),
    ],
)
def test_change_that_would_make_tables_wrong_is_refused(
    filled: Lake, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(IngestError, match=message):
        filled.ingest(**change)


def test_r10_delta_for_another_spark_is_refused(
    filled: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "_DELTA_JAR", re.compile(r"delta-spark_4(\.2)_2"))
    with pytest.raises(IngestError, match=r"is built for Spark .2, and this is Spark 4\.2\.0"):
        filled.ingest()


def test_r09_table_older_than_its_checkpoint_is_refused(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    names = ["lake.old", "lake.old_gold"]
    own = {"output": names[0], "gold": names[1], "bronze": None, "rejected": "lake.old_rejected"}
    own |= {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    first: dict[str, int] = {}
    for n in (0, 1, "many"):  # the last is one that none of both gets rows of
        lake.publish("e1", n=n)
        lake.ingest(**own)
        for name in names:
            first.setdefault(name, lake.rows(f"DESCRIBE HISTORY {name} LIMIT 1")[0].version)
    spark.sql("DELETE FROM lake.old WHERE batch = 0")
    spark.sql("OPTIMIZE lake.old")
    spark.sql("VACUUM lake.old")
    spark.sql("ALTER TABLE lake.old ADD COLUMNS (of_mine INT)")
    lake.ingest(**own)
    for name in names:
        last = lake.rows(f"DESCRIBE HISTORY {name} LIMIT 1")[0].timestamp
        for version, ends in ((first[name], "ends with micro-batch 0"), (0, "holds none")):
            spark.sql(f"RESTORE TABLE {name} TO VERSION AS OF {version}")
            message = f"{name} is older than the checkpoint: it {ends}, .* micro-batch 2. Was it"
            with pytest.raises(IngestError, match=message):
                lake.ingest(**own)
        spark.sql(f"RESTORE TABLE {name} TO TIMESTAMP AS OF '{last}'")
    lake.ingest(**own)


def test_r10_what_delta_says_in_a_write_only_is_refused_before(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    own |= {"bronze": None, "rejected": None, "gold": None, "key": (), "delete_when": None}
    own |= {"output": "lake.changes", "schema": "entity STRING, _change_type STRING"}
    changes = "spark.databricks.delta.properties.defaults.enableChangeDataFeed"
    spark.conf.set(changes, "true")
    try:
        with pytest.raises(IngestError, match=r"lake\.changes can't be written .*_change_type"):
            lake.ingest(**own)
        lake.ingest(**own | {"schema": "entity STRING"})
    finally:
        spark.conf.unset(changes)
    with pytest.raises(IngestError, match=r"lake\.changes can't be written .*_change_type"):
        lake.ingest(**own)
    with pytest.raises(IngestError, match=r"with these columns, compression: .*none at all"):
        lake.ingest(**own | {"writer_options": {"compression": "none at all"}, "schema": None})


def test_table_of_another_program_is_refused(filled: Lake) -> None:
    filled.spark.sql("CREATE TABLE lake.theirs (entity STRING) USING delta")
    with pytest.raises(IngestError, match="has no column feed string"):
        filled.ingest(output="lake.theirs")


def test_old_checkpoint_with_another_table_of_ours_is_refused(filled: Lake) -> None:
    own = {"checkpoint": str(filled.folder / "other"), "staging": str(filled.folder / "staging2")}
    plain: dict[str, Any] = {
        "schema": None,
        "bronze": None,
        "rejected": None,
        "gold": None,
        "key": (),
    }
    plain["delete_when"] = None
    filled.ingest(output="lake.other", **plain, **own)
    with pytest.raises(IngestError, match=r"lake\.other was never written by the checkpoint's"):
        filled.ingest(bronze="lake.other")
    for transform in (None, lambda rows, number: None):
        with pytest.raises(IngestError, match=r"lake\.bronze was never written by"):
            filled.ingest(output="lake.bronze", transform=transform, **plain, **own)


# ---------------------------------------------------------------------- guide


def test_guide(lake: Lake, tmp_path: Path) -> None:
    publisher = Publisher(partitions=2)
    for number, status in enumerate(["created", "paid", "deleted", "paid"]):
        event = {"entity": f"o{number % 3}", "status": status, "amount": 2.5}
        publisher.publish(event["entity"], event)
    names: dict[str, Any] = {"spark": lake.spark}
    with publisher.serve() as url:
        for snippet in python_blocks("docs/pages/lakehouse.md") * 2:
            code = snippet.replace("https://service/orders", str(url))
            code = code.replace("s3://lake", tmp_path.as_uri())
            exec(compile(code, "docs/pages/lakehouse.md", "exec"), names)
    gold = lake.spark.table("lake.orders").where("status is not null")
    assert {row.entity: row.status for row in gold.collect()} == {"o0": "paid", "o1": "paid"}
    assert lake.spark.table("orders").where("status is not null").count() == 2
