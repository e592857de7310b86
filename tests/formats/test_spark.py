"""What every version stored of a Spark query is read, and a newer format is refused with advice."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from feedapi_client.spark.epoch import decode, encode
from feedapi_client.spark.ingest.checkpoint import checked_note, read_checkpoint
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import Ingest, IngestError
from feedapi_client.spark.ingest.parquet_table import Decision, Decisions, ParquetTable
from feedapi_client.spark.schema import staged_rows
from feedapi_client.spark.staging import Objects, StagingError, inflate
from feedapi_client.spark.stream import Epoch
from tests.formats import made, spark
from tests.formats.stores import GOLDEN
from tests.formats.test_stores import REWRITE, VERSIONS

OBJECTS = ["plan", *spark.STAGED]
NOT_WRITTEN = (
    *("ended", "asked_closed", "unproven", "silent", "refusal", "conflict", "unknown_commands"),
    *("failed", "requests", "retries", "refused"),
)
"""What 1.0.0 wrote of the read of a partition beside what a driver uses, and does without."""


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    return GOLDEN.parent / str(request.param)


def content(folder: Path, name: str) -> Any:
    return json.loads((folder / f"spark-{name}.json").read_text())


def staged(folder: Path, name: str) -> bytes:
    return base64.b64decode(content(folder, name)["object"])


class Checkpoint:
    """Takes the place of a Spark session that finds these notes."""

    def __init__(self, **notes: Any) -> None:
        self._files = [
            {"path": f"file:/c/feedapi/{name}/part-0.txt", "content": json.dumps(note).encode()}
            for name, note in notes.items()
        ]

    def collect(self) -> list[dict[str, Any]]:
        return self._files

    def __getattr__(self, name: str) -> Any:
        return self if name == "read" else lambda *_, **__: self


def decisions(folder: Path) -> Decisions:
    table = ParquetTable(Ingest(url="http://x/feed", output=str(folder)))
    return Decisions({"output": table}, Identity("feed", "query"))


# Every version is read


def test_a_plan_is_read() -> None:
    assert decode(staged(GOLDEN, "plan"), "plan") == spark.PLAN


@pytest.mark.parametrize("name", spark.STAGED)
def test_staged_events_are_read(name: str, tmp_path: Path) -> None:
    stored, objects = staged(GOLDEN, name), Objects(tmp_path.as_uri(), "run")
    objects.create("data", stored)
    (result,) = objects.head("data")
    assert (result.partition, result.start, result.events) == (0, "_first", 3)
    rows = [row for batch in staged_rows(stored, "data") for row in batch.to_pylist()]
    assert [json.loads(row["data"]) for row in rows] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [row["headers"] and dict(row["headers"]) for row in rows] == spark.STAGED[name]
    first = content(GOLDEN, name)["content"]["results"][0]["sequence"]
    assert [row["sequence"] for row in rows] == [first + n for n in range(len(rows))]
    assert {row["cursor"] for row in rows} == {result.cursor}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_was_staged_before_1_0_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    stored, objects = staged(GOLDEN.parent / "0", name), Objects(tmp_path.as_uri(), "run")
    objects.create("key", stored)
    for read in (
        lambda: decode(stored, "key"),
        lambda: list(staged_rows(stored, "key")),
        lambda: objects.head("key"),
    ):
        with pytest.raises(StagingError, match=r"key was written before .* new checkpoint") as told:
            read()
        assert "\n" not in str(told.value)


def test_a_decision_of_every_version_is_read(golden: Path, tmp_path: Path) -> None:
    decision = orjson.dumps(content(golden, "small")["decision"])
    Objects(tmp_path.as_uri(), "_feedapi").create(f"_feedapi/commits/query/{7:012d}", decision)
    assert decisions(tmp_path).find(7) == spark.DECISION


def test_an_offset_of_every_version_is_read(golden: Path) -> None:
    assert Epoch.of(content(golden, "small")["offset"]) == spark.OFFSET


def test_notes_beside_a_checkpoint_of_every_version_are_read(golden: Path) -> None:
    small = content(golden, "small")
    stored: Any = Checkpoint(outputs=small["outputs"], resumed=small["resumed"])
    found = read_checkpoint(stored, "c")
    if small["outputs"]["version"] == 1:  # it does not tell the roles of the tables
        assert found.outputs == {}
    else:
        assert found.outputs["tables"] == spark.OUTPUTS
    assert found.resumed["run"] == spark.RUN


# The newest golden files are what is written


def test_the_golden_objects_are_what_is_staged() -> None:
    written = {name: each["content"] for name, each in spark.staged_objects().items()}
    golden = {name: content(GOLDEN, name)["content"] for name in OBJECTS}
    for result in (golden[name]["results"][0] for name in spark.STAGED):
        for key in NOT_WRITTEN:
            del result[key]
    assert written == golden, REWRITE


def test_a_plan_without_a_limit_of_bytes_is_one_that_1_0_takes() -> None:
    plan = encode(msgspec.structs.replace(spark.PLAN, max_bytes=None))
    assert "max_bytes" not in json.loads(inflate(plan, "plan"))
    assert decode(plan, "plan").max_bytes is None


def test_the_small_golden_objects_are_what_is_stored() -> None:
    assert spark.small_objects() == content(GOLDEN, "small"), REWRITE


def test_the_names_of_the_files_are_those_that_are_written() -> None:
    assert {f"spark-{name}.json" for name in (*OBJECTS, "small")} == set(made.spark_files())


# A newer format is refused


def test_a_newer_staged_object_is_refused_with_advice() -> None:
    newer = b"FAS3" + staged(GOLDEN, "data")[4:]
    with pytest.raises(StagingError, match=r"newer version .*\(format 3, this one reads up to 2\)"):
        list(staged_rows(newer, "data"))


def test_a_newer_plan_is_refused_with_advice() -> None:
    newer = encode(msgspec.structs.replace(spark.PLAN, version=5))
    with pytest.raises(StagingError, match=r"newer version .*\(format 5, this one reads up to 4\)"):
        decode(newer, "plan")


def test_a_newer_decision_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match=r"newer version .*run the query with that version"):
        decisions(tmp_path).decide(7, Decision([], version=2))


def test_a_newer_note_is_refused_with_advice() -> None:
    with pytest.raises(IngestError, match=r"the note c/n .* newer version .*\(format 3, this one"):
        checked_note('{"version": 3, "run": "r"}', "c/n")
