"""Tables of ``feedapi ingest`` in folders of files: whose rows they hold, and what can't change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from feedapi_client.spark.ingest import (
    Ingest,
    IngestError,
    MicroBatchError,
    Summary,
    latest,
    read_table,
)
from feedapi_client.spark.ingest.parquet_table import Decisions
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Rewrite
from tests.spark import transforms
from tests.spark.slow_workers import run
from tests.spark.test_ingest import job, publish
from tests.spark.unpleasant_names import UNPLEASANT, unpleasant_event, unpleasant_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TYPED = "entity STRING NOT NULL, n INT"


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
    publish(publisher, 60)
    with publisher.serve():
        yield publisher


def numbers(spark: SparkSession, folder: Path) -> list[int]:
    table = spark.read.option("mergeSchema", "true").parquet(str(folder))
    return sorted(row[0] for row in table.selectExpr("int(get_json_object(data, '$.n'))").collect())


# ---------------------------------------------------------------------- whose rows


def test_two_feeds_in_one_table_keep_their_rows(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    other = Publisher(partitions=1, seed=5)
    publish(other, 40, first=1000)
    with other.serve():
        for one, name in ((publisher, "a"), (other, "b"), (publisher, "a")):
            own = {"checkpoint": str(tmp_path / name), "staging": str(tmp_path / f"{name}.staging")}
            run(spark, job(one, tmp_path, **own))
            publish(one, 1, first=5000)
    feeds = spark.read.parquet(str(tmp_path / "table")).groupBy("feed").count().collect()
    assert sorted(row["count"] for row in feeds) == [40, 61]


def test_lost_checkpoint_is_refused_and_may_be_appended(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(spark, job(publisher, tmp_path))
    shutil.rmtree(tmp_path / "table" / "_feedapi")
    with pytest.raises(IngestError, match="all events would be written again"):
        run(spark, job(publisher, tmp_path))
    run(spark, job(publisher, tmp_path, append=True))
    assert numbers(spark, tmp_path / "table") == sorted([*range(60)] * 2)


def test_moved_staging_is_an_error(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(spark, job(publisher, tmp_path))
    publish(publisher, 10, first=60)
    with pytest.raises(MicroBatchError, match="stagingLocation"):
        run(spark, job(publisher, tmp_path, staging=(tmp_path / "moved").as_uri()))
    assert numbers(spark, tmp_path / "table") == [*range(60)]


def test_checkpoint_of_a_transform_that_writes_by_itself_keeps_its_output(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"checkpoint": str(tmp_path / "c"), "staging": str(tmp_path / "s")}
    own["transform"] = transforms.writes_by_itself
    run(spark, job(publisher, tmp_path, **own))
    assert run(spark, job(publisher, tmp_path, **own)).rows == 0
    with pytest.raises(IngestError, match="with another output events would be missing"):
        run(spark, job(publisher, tmp_path, output=str(tmp_path / "other"), **own))


def test_r04_checkpoint_that_lost_its_notes_begins_no_other_table(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"checkpoint": str(tmp_path / "c"), "staging": str(tmp_path / "s")}
    own |= {"schema": "n INT", "transform": transforms.only_odd}
    run(spark, job(publisher, tmp_path, **own))
    shutil.rmtree(tmp_path / "c" / "feedapi")
    with pytest.raises(IngestError, match=r"other was never written by the checkpoint's query"):
        run(spark, job(publisher, tmp_path, output=str(tmp_path / "other"), **own))
    assert run(spark, job(publisher, tmp_path, **own)).rows == 0


def test_feed_of_any_name_is_read_as_it_is_called(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    for number in range(2):
        publisher.append(0, {"n": 100 + number})
        run(spark, job(publisher, tmp_path, feed="Ärger %C3 名前"))
    (found,) = read_table(spark, str(tmp_path / "table")).select("feed").distinct().collect()
    assert found.feed == "Ärger %C3 名前"
    own = {"checkpoint": str(tmp_path / "c"), "staging": str(tmp_path / "s")}
    publisher.append(0, {"n": 102})
    again = {"feed": "Ärger %C3 名前", "resume_from_table": True, **own}
    assert run(spark, job(publisher, tmp_path, **again)).rows == 1


@pytest.mark.parametrize("content", ["[]", "{}", '{"id":"ab', ""])
def test_damaged_metadata_of_a_checkpoint_is_named(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, content: str
) -> None:
    (tmp_path / "c" / "offsets").mkdir(parents=True)
    (tmp_path / "c" / "offsets" / "0").write_text("v1")
    (tmp_path / "c" / "metadata").write_text(content)
    with pytest.raises(IngestError, match=r"c/metadata, which has the id .* missing or damaged"):
        run(spark, job(publisher, tmp_path, checkpoint=str(tmp_path / "c")))


def test_r09_second_new_query_of_a_feed_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    """Both were started when neither had written anything."""
    other = {"checkpoint": str(tmp_path / "c"), "staging": str(tmp_path / "s")}

    def meanwhile(rows: DataFrame, number: int) -> DataFrame:
        run(spark, job(publisher, tmp_path))
        return rows

    refused = r"table is written by query [\w-]+ of feed "
    with pytest.raises(MicroBatchError, match=refused):
        run(spark, job(publisher, tmp_path, transform=meanwhile, **other))
    with pytest.raises(IngestError, match="all events would be written again"):
        run(spark, job(publisher, tmp_path, **other))
    assert numbers(spark, tmp_path / "table") == [*range(60)]
    run(spark, job(publisher, tmp_path, append=True, **other))
    publish(publisher, 1, first=60)
    run(spark, job(publisher, tmp_path, **other))  # it is known now
    assert numbers(spark, tmp_path / "table") == sorted([*range(60)] * 2 + [60])


def test_r09_folder_that_was_copied_after_a_kill_is_whole(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its checkpoint inside, and a micro-batch that was decided, and not yet published."""

    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as dying:
        dying.setattr(Decisions, "publish", killed)
        with pytest.raises(MicroBatchError, match="killed"):
            run(spark, job(publisher, tmp_path))
    shutil.copytree(tmp_path / "table", tmp_path / "copy")
    for folder in ("copy", "table"):
        run(spark, job(publisher, tmp_path, output=str(tmp_path / folder)))
        assert numbers(spark, tmp_path / folder) == [*range(60)]


def test_r04_copy_of_a_query_is_refused_and_one_that_moved_goes_on(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    """Of checkpoint and staging location: it would write other events into the same batches."""

    def ingest(place: Path) -> Summary:
        own = {"checkpoint": str(place / "checkpoint"), "staging": str(place / "staging")}
        return run(spark, job(publisher, tmp_path, **own))

    before, now = tmp_path / "before", tmp_path / "now"
    ingest(before)
    shutil.copytree(before, now)
    publish(publisher, 10, first=60)
    with pytest.raises(IngestError, match=r"is at file:\S+before/checkpoint, too, .* is a copy"):
        ingest(now)
    publish(publisher, 10, first=70)
    ingest(before)
    assert numbers(spark, tmp_path / "table") == [*range(80)]
    shutil.rmtree(now)
    before.rename(now)
    publish(publisher, 10, first=80)
    ingest(now)
    assert numbers(spark, tmp_path / "table") == [*range(90)]


# ---------------------------------------------------------------------- what can't change


@pytest.fixture(scope="module")
def ingest(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Summary]]:
    """Ingests a feed into tables that hold its events, with changes of the job."""
    folder = tmp_path_factory.mktemp("tables")
    publisher = Publisher(partitions=1, seed=2)
    publish(publisher, 10)
    places = {name: f"{folder}/{name}" for name in ("checkpoint", "staging", "bronze")}

    def ingest(**change: Any) -> Summary:
        there = {n: v.format(folder) if isinstance(v, str) else v for n, v in change.items()}
        return run(spark, job(publisher, folder, **{"schema": TYPED, **places, **there}))

    with publisher.serve():
        assert ingest().rows == 10
        yield ingest


MISSING = r"earlier runs wrote .*/table.*: with another {} events would be missing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition_by": ["entity"]}, r"with partition_by \[\], not \['entity'\]"),
        ({"schema": "entity STRING, n STRING"}, "column n was int and would become string"),
        ({"prefix": "x_"}, "with prefix '', not 'x_'"),
        ({"feed": "orders"}, r"wrote another feed than .* keep its name with --feed"),
        ({"checkpoint": "{}/lost"}, "all events would be written again"),
        ({"output": "{}/other"}, MISSING.format("output")),
        (
            {"output": "{}/other", "transform": transforms.writes_by_itself},
            MISSING.format("output"),
        ),
        ({"bronze": None}, MISSING.format("bronze")),
        ({"bronze": "{}/x"}, MISSING.format("bronze")),
        ({"rejected": "{}/y"}, MISSING.format("rejected")),
    ],
)
def test_r09_r10_change_that_would_make_tables_wrong_is_refused(
    ingest: Callable[..., Summary], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(IngestError, match=message):
        ingest(**change)
    assert ingest(bronze="{}/./bronze/").rows == 0  # the same place


def test_new_column_is_added(spark: SparkSession, publisher: Publisher, tmp_path: Path) -> None:
    run(spark, job(publisher, tmp_path, schema="entity STRING"))
    publish(publisher, 5, first=60)
    run(spark, job(publisher, tmp_path, schema="entity STRING, n INT"))
    table = spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "table"))
    assert table.where("n is not null").count() == 5
    assert numbers(spark, tmp_path / "table") == [*range(65)]  # from the payload as sent


# ---------------------------------------------------------------------- columns


def test_names_of_added_columns_need_a_prefix(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"entity": "e", "partition": "north", "Sequence": 7, "batch": "x"})
    schema = "entity STRING, partition STRING, Sequence INT, batch STRING"
    run(spark, job(publisher, tmp_path, schema=schema, prefix="feed_"))
    row = spark.read.parquet(str(tmp_path / "table")).where("entity = 'e'").first()
    assert row is not None
    assert (row.partition, row.Sequence, row.batch, row.feed_partition) == ("north", 7, "x", 0)


def test_r10_columns_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    publisher = Publisher(partitions=1)
    publisher.append(0, unpleasant_event(1, "1"))
    publisher.append(0, unpleasant_event(1, "2"))
    publisher.append(0, "text")
    tables = {name: str(tmp_path / name) for name in ("bronze", "rejected")}
    prefix = "feed's `"
    with publisher.serve():
        named = job(
            publisher,
            tmp_path,
            schema=unpleasant_schema(),
            partition_by=["a b", "order.id"],
            prefix=prefix,
            **tables,
        )
        summary = run(spark, named)
        assert (summary.rows, summary.unparsed) == (2, 1)
        assert run(spark, named).rows == 0
    table = spark.read.parquet(str(tmp_path / "table"))
    assert set(UNPLEASANT) < set(table.columns)
    (row,) = latest(table, ["order.id", "a b"], "`Ärger` is null", prefix=prefix).collect()
    assert (row["Ärger"], row["order.id"], row["a b"]) == ("2", "order.id 1", "a b 1")
    assert (row["geo.lat"], row["nested"][0]["a.b c"]) == (1.5, {"x y": 1})


BAD = [b"[1,2]", b"17", b"false", b"null", b'[{"entity":"e","n":1}]', b'"text"']
"""The protocol forbids these payloads."""


def test_rejected_events_have_a_table_and_a_reason(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    for payload in ({"entity": "x", "n": "many"}, {"n": 1}, *({"mark": n} for n in range(6))):
        publisher.append(0, payload)

    def rewritten(body: bytes) -> bytes:
        for number, payload in enumerate(BAD):
            body = body.replace(b'{"mark":%d}' % number, payload)
        return body

    publisher.fail(Rewrite(rewritten), times=None)
    tables = {name: str(tmp_path / name) for name in ("bronze", "rejected")}
    summary = run(spark, job(publisher, tmp_path, schema=TYPED, **tables))
    assert (summary.rows, summary.unparsed) == (60, 8)
    rejected = spark.read.parquet(tables["rejected"])
    assert {row.data: row.reason for row in rejected.collect()} == {
        '{"entity":"x","n":"many"}': "n is not int",
        '{"n":1}': "entity is missing",
        **dict.fromkeys([payload.decode() for payload in BAD], "not a JSON object"),
    }
    bronze = spark.read.parquet(tables["bronze"])
    assert bronze.count() == 68
    assert {"feed", "query", "batch", "cursor", "sequence", "depth", "ingested_at"} <= set(
        bronze.columns
    )


def test_latest_state_of_each_entity(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.split(0, into=2)
    publish(publisher, 35, first=60)
    run(spark, job(publisher, tmp_path, schema=TYPED))
    table = spark.read.parquet(str(tmp_path / "table"))
    newest = {row.entity: row.n for row in latest(table, ["entity"], "n = 94").collect()}
    expected = {event["entity"]: event["n"] for event in publisher.payloads()}
    assert newest == {entity: n for entity, n in expected.items() if n != 94}


# ---------------------------------------------------------------------- without a JVM


def test_name_of_the_feed_holds_no_secret() -> None:
    url = "https://me:secret@service:8443/orders/?token=secret"
    assert Ingest(url=url, output="/tmp/x").feed_name == "service:8443/orders"


# ---------------------------------------------------------------------- a folder of earlier


def test_r10_what_others_put_beside_notes_and_batches_tells_nothing(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    ours = job(publisher, tmp_path, checkpoint=str(checkpoint))
    publish(publisher, 10, first=0)
    run(spark, ours)
    (query,) = (tmp_path / "table").glob("feed=*/query=*")
    for name in ("batch=tmp", "batch=0 (1)", "batch=7~"):
        (query / name).mkdir()
    notes = tmp_path / "table" / "_feedapi" / "columns"
    places = [notes, checkpoint, checkpoint / "feedapi" / "outputs"]
    for place in places:
        (place / "notes.txt").write_text("mine")
        (place / "metadata~").write_text("{")
    publish(publisher, 1, first=100)
    assert run(spark, ours).rows == 1
    (notes / "0").write_text("{}")
    with pytest.raises(IngestError, match=r"the note .*columns/0 is damaged .*from a backup"):
        run(spark, ours)


def test_r09_resumption_does_not_begin_a_table_that_lacks_what_bronze_holds(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    def ingest(number: int, **tables: str) -> None:
        own = {"checkpoint": str(tmp_path / f"c{number}"), "staging": str(tmp_path / f"s{number}")}
        given = {"schema": "n INT", "bronze": str(tmp_path / "bronze"), **own, **tables}
        run(spark, job(publisher, tmp_path, resume_from_table=number > 0, **given))

    ingest(0)
    publish(publisher, 1, first=100)
    ingest(0)
    publish(publisher, 1, first=101)
    for other in ({"output": str(tmp_path / "tabel")}, {"rejected": str(tmp_path / "rejected")}):
        with pytest.raises(IngestError, match=r"was never written by query .*bronze: earlier even"):
            ingest(1, **other)
    assert not (tmp_path / "tabel").exists()
    ingest(2)
    assert numbers(spark, tmp_path / "table") == [*range(60), 100, 101]


def test_text_of_a_pipeline_holds_no_secret() -> None:
    options = {"header.Authorization": "secret"}
    url = "https://me:secret@service/orders?token=secret"
    given = Ingest(url=url, output="/tmp/x", options=options, writer_options={"key": "secret"})
    assert "secret" not in repr(given)
