"""A query dies at each of its writes to Delta tables, and goes on: all tables meet an oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.merge import MergeIntoWriter
from pyspark.sql.readwriter import DataFrameWriterV2

from feedapi_client.spark.ingest import IngestError, MicroBatchError, delta_table
from feedapi_client.spark.ingest.pipeline import BatchWriter
from tests.spark.lake import SCHEMA, Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

POINTS = [(at, when) for at in range(4) for when in ("before", "after")]
"""Before and behind the write to rejected events, silver, gold and bronze."""


class Writes:
    """Lets a run die at one of the writes of a micro-batch, or at the first one before its start.

    That writes no row: it tries a table's columns.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._point: tuple[bool, int, str] | None = None
        self._begun, self._count = False, 0
        patch.setattr(DataFrameWriterV2, "append", self._hooked(DataFrameWriterV2.append))
        patch.setattr(MergeIntoWriter, "merge", self._hooked(MergeIntoWriter.merge))
        write = BatchWriter.__call__

        def begin(writer: BatchWriter, batch: DataFrame, number: int) -> None:
            self._begun, self._count = True, 0
            write(writer, batch, number)

        patch.setattr(BatchWriter, "__call__", begin)

    def die(self, lake: Lake, at: int, when: str, *, starting: bool = False, **given: Any) -> None:
        self._point, self._begun, self._count = (not starting, at, when), False, 0
        with pytest.raises(IngestError if starting else MicroBatchError, match="it died"):
            lake.ingest(**given)
        self._point = None

    def _hooked(self, write: Callable[..., None]) -> Callable[..., None]:
        def hooked(*given: Any) -> None:
            number, self._count = self._count, self._count + 1
            if (self._begun, number, "before") == self._point:
                raise RuntimeError("it died")
            write(*given)
            if (self._begun, number, "after") == self._point:
                raise RuntimeError("it died")

        return hooked


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def test_r08_run_that_dies_at_any_write_is_repeated_exactly(lake: Lake, writes: Writes) -> None:
    lake.publish()
    lake.publish("e1", n="many")
    for when in ("before", "after"):
        writes.die(lake, 0, when, starting=True)
    for at, when in POINTS:
        writes.die(lake, at, when)
    lake.spark.sql("OPTIMIZE lake.silver")
    lake.ingest()
    lake.check()
    commits = lake.folder / "checkpoint" / "commits"
    for log in commits.glob("*0*"):  # it died before Spark noted the micro-batch
        log.unlink()
    lake.publish("e1", "e2", gone=True)
    lake.ingest()
    lake.check()


def test_r09_run_that_dies_at_any_write_is_gone_on_from(lake: Lake, writes: Writes) -> None:
    """With another checkpoint, from bronze, which is written last."""
    given: dict[str, Any] = {}
    for number, (at, when) in enumerate(POINTS):
        lake.publish("e1", "e2", "e3", gone=number % 2 == 1)
        writes.die(lake, at, when, **given)
        given = {"checkpoint": str(lake.folder / f"c{number}"), "resume_from_table": True}
    lake.ingest(**given)
    lake.check()
    # What is read again may get lower numbers than it had, and gold takes the highest.
    known = {(row.query, row.batch) for row in lake.rows("SELECT query, batch FROM lake.bronze")}
    for table in ("silver", "gold"):
        rows = lake.rows(f"SELECT query, batch FROM lake.{table}")
        assert {(row.query, row.batch) for row in rows} <= known


def test_control_writes_without_a_transaction_are_found(
    lake: Lake, writes: Writes, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_table, "_transaction", lambda who, number: {})
    lake.publish("e4")
    last = {"checkpoint": str(lake.folder / f"c{len(POINTS) - 1}")}
    writes.die(lake, 1, "after", **last)
    lake.ingest(**last)
    with pytest.raises(AssertionError):
        lake.check()


def test_r05_schema_that_changes_while_a_micro_batch_is_half_written_is_refused(
    lake: Lake, writes: Writes
) -> None:
    """What fits then and not now would be in neither table."""
    given: dict[str, Any] = {"checkpoint": str(lake.folder / "half")}
    given |= {role: f"lake.half_{role}" for role in ("output", "bronze", "rejected", "gold")}
    longer = f"{SCHEMA}, price DOUBLE"

    def counts() -> list[int]:
        tables = [given[role] for role in ("output", "rejected", "bronze")]
        return [len(lake.rows(f"SELECT 1 FROM {table}")) for table in tables]

    known = len(lake.publisher.payloads())
    lake.publish("e1", price=1)
    writes.die(lake, 0, "before", **given)
    lake.ingest(**given, schema=longer)  # nothing was written
    lake.publish("e1", price="dear")
    writes.die(lake, 0, "after", **given)
    with pytest.raises(IngestError, match=r"has micro-batch 1, .* with schema 'entity STRING, n I"):
        lake.ingest(**given, schema=longer)
    lake.ingest(**given)
    lake.publish("e1", price="dear")
    lake.ingest(**given, schema=longer)
    output, rejected, bronze = counts()
    assert output + rejected == bronze == known + 3
