"""``feedapi ingest`` into real Delta tables: exact or refused, whatever happens to them."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from feedapi_client.spark.ingest import Ingest, IngestError, MicroBatchError, preflight
from feedapi_client.testing import Publisher
from tests.docs.snippets import python_blocks
from tests.spark.lake import SCHEMA, Lake
from tests.spark.slow_workers import run
from tests.spark.unpleasant_names import UNPLEASANT, unpleasant_event, unpleasant_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


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


def test_streams_read_what_a_failed_and_repeated_batch_wrote(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    """A commit that they have read is never replaced. So a table may refuse that, too."""
    publisher, places = Publisher(partitions=1), {"checkpoint": str(tmp_path / "c")}
    names = {"output": "lake.sound", "bronze": "lake.sound_bronze", "gold": None, "key": ()}
    own = {**places, **names, "delete_when": None, "rejected": None}

    def downstream() -> int:
        reader = spark.readStream.table("lake.sound").writeStream.trigger(availableNow=True)
        reader.option("checkpointLocation", f"{tmp_path}/d").toTable(
            "lake.sound_copy"
        ).awaitTermination()
        return spark.table("lake.sound_copy").count()

    with publisher.serve() as url:
        job = lake.job(url=str(url), staging=(tmp_path / "s").as_uri(), **own)
        publisher.append(0, {"entity": "a", "n": 1})
        run(spark, job)
        assert downstream() == 1
        spark.sql("ALTER TABLE lake.sound SET TBLPROPERTIES (delta.appendOnly = true)")
        spark.sql("ALTER TABLE lake.sound_bronze ADD CONSTRAINT sound CHECK (data NOT LIKE '%-1%')")
        publisher.append(0, {"entity": "b", "n": -1})
        with pytest.raises(MicroBatchError, match="sound"):
            run(spark, job)
        assert downstream() == 2
        spark.sql("ALTER TABLE lake.sound_bronze DROP CONSTRAINT sound")
        run(spark, job)
    assert downstream() == 2
    assert spark.table("lake.sound_bronze").count() == 2


def test_gold_has_what_a_transform_computed_for_output(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    publisher = Publisher(partitions=1)
    publisher.extend(0, [{"entity": f"e{n}", "n": n} for n in range(4)])
    own_id = F.udf(lambda: str(uuid4()), useArrow=False).asNondeterministic()

    def transform(rows: DataFrame, number: int) -> DataFrame:
        return rows.withColumns({"row_id": own_id(), "loaded": F.current_timestamp()})

    names = {role: f"lake.computed_{role}" for role in ("output", "bronze", "rejected", "gold")}
    places = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    with publisher.serve() as url:
        run(spark, lake.job(url=str(url), transform=transform, **names, **places))
    output, gold = (
        {row.entity: (row.row_id, row.loaded) for row in spark.table(names[role]).collect()}
        for role in ("output", "gold")
    )
    assert output == gold
    assert len(gold) == 4


def test_r10_names_that_delta_can_not_hold_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    places = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    refused = {
        "INVALID_IDENTIFIER.* a-b": {"output": "a-b"},
        "`a-b` can't be written: .*INVALID_SCHEMA_OR_RELATION_NAME": {"output": "`a-b`"},
        "PARSE_SYNTAX_ERROR": {"output": "a..b"},
        r"nowhere\.t can't be written: .*SCHEMA_NOT_FOUND.*CREATE SCHEMA nowhere": {
            "output": "nowhere.t"
        },
        "t can't be written: .*DUPLICATE_COLUMN": {"schema": "id STRING, ID INT"},
        r"the same of spark_catalog\.odd": {"bronze": "odd.`t`", "schema": "id INT"},
    }
    spark.sql(f"CREATE DATABASE odd LOCATION '{tmp_path / 'odd'}'")
    spark.sql("USE odd")
    spark.conf.set("spark.sql.caseSensitive", "true")  # Delta takes no notice of it
    try:
        for message, given in refused.items():
            job = {"url": "http://x/feed", "output": "t", "format": "delta", **places, **given}
            with pytest.raises((IngestError, PySparkException), match=message):
                run(spark, Ingest(**job))
    finally:
        spark.conf.set("spark.sql.caseSensitive", "false")
        spark.sql("USE default")
    assert not (tmp_path / "c" / "offsets").exists()


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
            key=["Order.ID", "my-field"],
            delete_when="`Ärger` = '5'",
            partition_by=["a b"],
            prefix="my feed.",
            checkpoint=str(tmp_path / "checkpoint"),
            staging=(tmp_path / "staging").as_uri(),
        )
        for exact in ("true", "false"):  # the second run aligns with tables that are there
            spark.conf.set("spark.sql.caseSensitive", exact)
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


def test_r09_gold_after_two_resumptions_lacks_what_was_deleted(
    spark: SparkSession, tmp_path: Path
) -> None:
    publisher = Publisher(partitions=1, page_size=1, checkpoint_every=1)
    publisher.extend(0, [{"entity": "e1"}, {"entity": "e2"}])
    spark.sql(f"CREATE DATABASE resumed LOCATION '{tmp_path / 'resumed'}'")
    with publisher.serve() as url:

        def ingest(checkpoint: str, **more: Any) -> list[str]:
            job = Ingest(
                url=str(url),
                output="resumed.silver",
                bronze="resumed.bronze",
                rejected="resumed.rejected",
                gold="resumed.gold",
                format="delta",
                schema=SCHEMA,
                key=["entity"],
                delete_when="gone",
                checkpoint=str(tmp_path / checkpoint),
                staging=(tmp_path / "staging").as_uri(),
                **more,
            )
            run(spark, job)
            return sorted(row.entity for row in spark.table("resumed.gold").collect())

        assert ingest("first") == ["e1", "e2"]
        publisher.extend(0, [{"entity": "e1", "gone": True}, {"entity": "e3"}])
        one = {"maxEventsPerPartition": "1"}  # the event that deletes is not in the last batch
        assert ingest("second", resume_from_table=True, options=one) == ["e2", "e3"]
        rows = spark.table("resumed.bronze").orderBy("sequence").collect()
        before = len({row.query for row in rows}), rows[-1].batch
        assert before == (2, 1)
        publisher.extend(0, [{"entity": "e4"}, {"entity": "e5"}])

        def fails(last: int, rows: DataFrame, number: int) -> DataFrame:
            if number != last:
                return rows
            return rows.withColumn("n", F.raise_error(F.lit("here")).cast("int"))

        with pytest.raises(MicroBatchError, match="here"):
            ingest("second", transform=partial(fails, 2))  # when bronze has the events
        spark.sql(f"DELETE FROM resumed.silver WHERE query = '{rows[0].query}'")  # has expired
        publisher.append(0, {"entity": "e6"})
        with pytest.raises(MicroBatchError, match="here"):  # which gold has never heard of
            ingest("third", resume_from_table=True, transform=partial(fails, 0))
        assert ingest("fourth", resume_from_table=True) == ["e2", "e3", "e4", "e5", "e6"]
    assert spark.table("resumed.silver").count() == 5


def test_table_has_several_names(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    publisher, kinds = Publisher(partitions=1), ("output", "bronze", "rejected", "gold")
    own = {"checkpoint": str(tmp_path / "checkpoint"), "staging": (tmp_path / "staging").as_uri()}
    spark.sql("USE lake")
    try:
        with publisher.serve() as url:
            for number, before in enumerate(("lake.", "", "spark_catalog.LAKE.")):
                publisher.append(0, {"entity": "e", "n": number})
                names = {kind: f"{before}named_{kind}" for kind in kinds}
                run(spark, lake.job(url=str(url), **names, **own))
    finally:
        spark.sql("USE default")
    for kind, rows in {"output": [0, 1, 2], "gold": [2]}.items():
        assert sorted(row.n for row in spark.table(f"lake.named_{kind}").collect()) == rows
    assert spark.table("lake.named_bronze").count() == 3


# ---------------------------------------------------------------------- refused


def test_r09_checkpoint_older_than_its_table_is_refused(filled: Lake) -> None:
    """It is a backup, or the query itself after a copy of the checkpoint ran once beside it."""
    backup = filled.folder / "backup"
    shutil.copytree(filled.folder / "checkpoint", backup)
    filled.publish()
    filled.ingest(checkpoint=str(backup))
    with pytest.raises(IngestError, match=r"the checkpoint is older than lake\.\w+: it ends with"):
        filled.ingest()
    shutil.rmtree(filled.folder / "checkpoint")
    backup.rename(filled.folder / "checkpoint")
    filled.ingest()
    filled.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "lost"}, "all events would be written again"),
        ({"checkpoint": "lost", "append": True}, "holds the latest state from another query"),
        ({"schema": SCHEMA.replace("n INT", "n STRING")}, "column n is int and would become"),
        ({"partition_by": ["entity"]}, r"lake.silver can't be written: .*[Pp]artition"),
        ({"feed": "another"}, "keep its name with --feed"),
        ({"delete_when": "gonne"}, r"lake.gold can't be written: .*gonne"),
        ({"delete_when": "n +"}, r"lake.gold can't be written: .*PARSE_SYNTAX_ERROR"),
        (
            {"schema": f"{SCHEMA}, m MAP<STRING, INT>", "key": ["m"]},
            r"lake.gold can't be written: .*MAP",
        ),
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
    monkeypatch.setattr(preflight, "_DELTA_JAR", re.compile(r"delta-spark_4(\.2)_2"))
    with pytest.raises(IngestError, match=r"is built for Spark .2, and this is Spark 4\.2\.0"):
        filled.ingest()


def test_r10_what_delta_says_in_a_write_only_is_refused_before(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    own |= {"bronze": None, "rejected": None, "gold": None, "key": (), "delete_when": None}
    own |= {"output": "lake.changes", "schema": "entity STRING, _change_type STRING"}
    changes = "spark.databricks.delta.properties.defaults.enableChangeDataFeed"
    spark.conf.set(changes, "true")
    try:
        with pytest.raises(IngestError, match=r"lake\.changes can't be written: .*_change_type"):
            lake.ingest(**own)
        lake.ingest(**own | {"schema": "entity STRING"})
    finally:
        spark.conf.unset(changes)
    with pytest.raises(IngestError, match=r"lake\.changes can't be written: .*_change_type"):
        lake.ingest(**own)
    with pytest.raises(IngestError, match=r"lake\.changes can't be written: .*none at all"):
        lake.ingest(**own | {"writer_options": {"compression": "none at all"}, "schema": None})


def test_table_of_another_program_is_refused(filled: Lake) -> None:
    filled.spark.sql("CREATE TABLE lake.theirs (entity STRING) USING delta")
    with pytest.raises(IngestError, match="has no column feed, query, batch"):
        filled.ingest(output="lake.theirs", checkpoint=str(filled.folder / "new"), append=True)


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
