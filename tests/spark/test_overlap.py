"""Two runs of one query at once, and a run that wakes up late (rule 8), in a real session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from feedapi_client.spark import ingest
from feedapi_client.spark.ingest import Ingest, IngestError, MicroBatchError, pipeline, read_table
from feedapi_client.spark.ingest.columns import Rows, payload_schema
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.parquet_table import (
    Decision,
    Decisions,
    ParquetTable,
    _LocalFolder,
)
from feedapi_client.spark.ingest.pipeline import BatchWriter
from feedapi_client.spark.stream import ReadSoFar
from feedapi_client.testing import Publisher
from tests.spark.micro_batches import problems
from tests.spark.slow_workers import run
from tests.spark.test_ingest import job, publish

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
    publish(publisher, 60)
    with publisher.serve():
        yield publisher


def typed(publisher: Publisher, tmp_path: Path, **more: Any) -> Ingest:
    tables = {name: str(tmp_path / name) for name in ("bronze", "rejected")}
    return job(publisher, tmp_path, schema="entity STRING, n INT", **tables, **more)


def counts(spark: SparkSession, tmp_path: Path) -> dict[str, int]:
    return {
        name: spark.read.parquet(str(tmp_path / name)).count()
        for name in ("bronze", "rejected", "table")
    }


def source_rows(spark: SparkSession, publisher: Publisher) -> DataFrame:
    return spark.read.format("feedapi").load(str(publisher.url))


def test_r08_late_run_changes_nothing_in_folders(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"entity": "x", "n": "many"})
    run(spark, given := typed(publisher, tmp_path))
    expected = {"bronze": 61, "rejected": 1, "table": 60}
    files = set(tmp_path.rglob("*.parquet"))
    assert counts(spark, tmp_path) == expected
    schema = payload_schema(given)
    rows, late = Rows(given, schema), BatchWriter(given, schema)
    gone = source_rows(spark, publisher).selectExpr(
        "partition", "cursor", "sequence", "raise_error('staged object is gone') AS data",
        "headers", "depth",
    )  # fmt: skip
    late(rows.parse(gone), 0)  # not even read
    late(rows.parse(source_rows(spark, publisher)), 0)
    assert counts(spark, tmp_path) == expected
    assert set(tmp_path.rglob("*.parquet")) == files


def test_r08_failed_attempt_is_deleted_once_its_batch_is_there(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    def fails(batch: DataFrame, number: int) -> DataFrame:
        return batch.selectExpr("*", "CAST(raise_error('here') AS STRING) AS fails")

    with pytest.raises(MicroBatchError, match="here"):
        run(spark, typed(publisher, tmp_path, transform=fails))
    assert not list(tmp_path.rglob("batch=*"))
    left = tmp_path / "rejected/_feedapi/attempts"
    (next(left.iterdir()) / "0" / "killed").mkdir()
    run(spark, typed(publisher, tmp_path))
    assert not list(tmp_path.glob("*/_feedapi/attempts/*/*"))
    assert counts(spark, tmp_path)["bronze"] == 60
    publish(publisher, 5, first=60)
    run(spark, typed(publisher, tmp_path))
    assert not list(tmp_path.glob("*/_feedapi/attempts/*/*"))


def test_r08_decisions_are_kept_for_runs_that_wake_up_late(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    tables = {"output": ParquetTable(typed(publisher, tmp_path))}
    decisions = Decisions(tables, Identity("feed", "query"))
    for number in range(102):
        decisions.publish(number, decisions.decide(number, Decision([])))
    assert [decisions.find(number) for number in (0, 1)] == [None, None]
    assert decisions.find(2) == Decision([])
    assert len(list(tmp_path.glob("table/_feedapi/commits/query/*"))) == 200


def run_that_is_killed(spark: SparkSession, given: Ingest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until one of the tables shows a micro-batch."""
    calls: list[str] = []
    publish = _LocalFolder.publish

    def dies_at_the_second(folder: _LocalFolder, attempt: str, final: str) -> bool:
        calls.append(final)
        if len(calls) == 2:
            raise RuntimeError("killed")
        return publish(folder, attempt, final)

    with monkeypatch.context() as dying:
        dying.setattr(_LocalFolder, "publish", dies_at_the_second)
        with pytest.raises(MicroBatchError, match="killed"):
            run(spark, given)


def test_r09_checkpoint_older_than_its_table_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "table" / "_feedapi" / "checkpoint"
    run(spark, job(publisher, tmp_path))
    shutil.copytree(checkpoint, tmp_path / "backup")
    publish(publisher, 10, first=60)
    run(spark, job(publisher, tmp_path))
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "backup", checkpoint)
    with pytest.raises(ingest.IngestError, match=r"ends with micro-batch 0, .* micro-batch 1 of"):
        run(spark, job(publisher, tmp_path))
    shutil.rmtree(checkpoint / "offsets")
    shutil.rmtree(checkpoint / "commits")
    with pytest.raises(ingest.IngestError, match=r"holds none, .* micro-batch 1 of"):
        run(spark, job(publisher, tmp_path))
    assert spark.read.parquet(str(tmp_path / "table")).count() == 70


def test_r09_resume_from_table_goes_on_where_the_table_ends(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.append(0, {"entity": "x", "n": "many"})
    first = {"checkpoint": str(tmp_path / "first")}
    run(spark, typed(publisher, tmp_path, **first))
    publisher.split(0, into=2)
    publish(publisher, 40, first=60)
    run_that_is_killed(spark, typed(publisher, tmp_path, **first), monkeypatch)
    (tmp_path / "first").rename(tmp_path / "lost")
    second = {"checkpoint": str(tmp_path / "second")}
    with pytest.raises(ingest.IngestError, match="all events would be written again"):
        run(spark, typed(publisher, tmp_path, **second))
    again: dict[str, Any] = {"resume_from_table": True}
    with pytest.raises(ingest.IngestError, match=r"with partition_by \[\], not \['dey'\]"):
        run(spark, typed(publisher, tmp_path, partition_by=["dey"], **again, **second))
    assert not (tmp_path / "second/feedapi/resumed").exists()
    assert list((tmp_path / "table/_feedapi/owners").glob("*/2")) == []
    assert counts(spark, tmp_path)["table"] < 100
    run(spark, typed(publisher, tmp_path, **again, **second))
    assert counts(spark, tmp_path) == {"bronze": 101, "rejected": 1, "table": 100}
    with monkeypatch.context() as clock:
        clock.setattr(F, "current_timestamp", lambda: F.lit("2020-01-01").cast("timestamp"))
        publish(publisher, 30, first=100)
        publisher.split(1, into=2, method="cursor-from")
        publish(publisher, 10, first=130)
        run_that_is_killed(spark, typed(publisher, tmp_path, **second), monkeypatch)
    third = {"checkpoint": str(tmp_path / "third")}
    run(spark, typed(publisher, tmp_path, **again, **third))
    assert run(spark, typed(publisher, tmp_path, **third)).rows == 0  # also before a batch
    assert counts(spark, tmp_path) == {"bronze": 141, "rejected": 1, "table": 140}
    bronze = spark.read.parquet(str(tmp_path / "bronze")).where("data not like '%many%'")
    assert problems((row.asDict() for row in bronze.collect()), fitting(publisher)) == []
    with pytest.raises(ingest.IngestError, match="begins a new checkpoint"):
        run(spark, typed(publisher, tmp_path, **again, **third))
    (tmp_path / "lost").rename(tmp_path / "first")
    publish(publisher, 1, first=140)
    for old in (first, second):
        with pytest.raises(IngestError, match=r"run .* goes on in .* checkpoint of that run"):
            run(spark, typed(publisher, tmp_path, **old))
    assert run(spark, typed(publisher, tmp_path, **third)).rows == 1
    assert counts(spark, tmp_path) == {"bronze": 142, "rejected": 1, "table": 141}


@pytest.mark.parametrize("bronze", [True, False])
def test_r09_query_that_runs_while_another_goes_on_writes_nothing_more(
    spark: SparkSession,
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bronze: bool,
) -> None:
    first = replace(
        typed(publisher, tmp_path, staging=(tmp_path / "staging").as_uri()),
        bronze=str(tmp_path / "bronze") if bronze else None,
        rejected=None,
        checkpoint=str(tmp_path / "first"),
    )
    run(spark, first)
    publish(publisher, 10, first=60)
    read = pipeline.read_so_far

    def meanwhile(*rows: Any) -> dict[int, ReadSoFar]:
        with pytest.raises(IngestError, match=r"goes on in .* checkpoint of that run"):
            run(spark, first)
        return read(*rows)

    monkeypatch.setattr(pipeline, "read_so_far", meanwhile)
    second = replace(first, checkpoint=str(tmp_path / "second"), resume_from_table=True)
    assert run(spark, second).rows == 10
    assert read_table(spark, first.output).count() == 70


def fitting(publisher: Publisher) -> list[Any]:
    return [event for event in publisher.payloads() if event["n"] != "many"]


def test_r09_resume_goes_on_where_the_last_query_was(spark: SparkSession) -> None:
    """One that was appended may count its events otherwise, as where the feed lost its first."""
    rows = spark.createDataFrame(
        [
            ("old", 0, "c7", 107, 0),
            ("old", 1, "d2", 2, 1),
            ("new", 0, "c8", 8, 0),
            ("new", 0, "c9", 9, 0),
        ],
        "query STRING, partition INT, cursor STRING, sequence BIGINT, depth INT",
    )
    read = pipeline.read_so_far(rows, Identity("feed", None), ["old", "new"])
    assert read == {0: ReadSoFar("c9", 10, 0), 1: ReadSoFar("d2", 3, 1)}
