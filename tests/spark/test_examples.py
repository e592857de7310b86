"""Runs the example and the snippets of the documentation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.docs.snippets import python_blocks
from tests.spark.conftest import ROOT
from tests.spark.slow_workers import despite_slow_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location(
        "spark_pipeline", ROOT / "examples" / "spark_pipeline.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    # The end of a closed partition is certain at once.
    publisher = Publisher(partitions=2, seed=3, quirks=Quirks(last_cursor="closed"))
    with publisher.serve():
        yield publisher


@pytest.mark.slow
def test_pipeline_keeps_its_tables_through_a_split(
    spark: SparkSession, example: Any, publisher: Publisher, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    example.publish(publisher, orders=40)
    despite_slow_workers(lambda: example.pipeline(spark, publisher.url, folder))
    publisher.split(0, into=2)
    example.publish(publisher, orders=60, first=40)
    despite_slow_workers(lambda: example.pipeline(spark, publisher.url, folder))
    latest = {event["entity"]: event["status"] for event in publisher.payloads()}
    assert {
        row.entity: row.status for row in example.state_table(spark, folder).collect()
    } == latest
    paid = [event for event in publisher.payloads() if event["status"] == "paid"]
    minutes = spark.read.parquet(f"{folder}/revenue").collect()
    assert 0 < sum(row.payments for row in minutes) <= len(paid)
    assert len({row.minute for row in minutes}) == len(minutes)


def test_snippets_of_the_documentation_run(
    spark: SparkSession, example: Any, publisher: Publisher, tmp_path: Path
) -> None:
    example.publish(publisher, orders=30)
    payments = Publisher(partitions=1)
    payments.extend(0, [{"payment": n} for n in range(5)])
    snippets = python_blocks("docs/pages/spark.md")
    assert len(snippets) >= 3
    names: dict[str, Any] = {"spark": spark}
    with payments.serve():
        places = {
            "https://service/orders": str(publisher.url),
            "https://payments/payments": str(payments.url),
            "s3://lake": tmp_path.as_uri(),
        }
        for snippet in snippets:
            code = snippet
            for place, here in places.items():
                code = code.replace(place, here)
            program = compile(code, "docs/pages/spark.md", "exec")
            despite_slow_workers(partial(exec, program, names))
        assert names["history"].count() == len(publisher.payloads()) + 5
    spark.streams.removeListener(names["listener"])
    assert names["table"].count() == len(publisher.payloads())
    assert spark.read.parquet(f"{tmp_path}/orders").count() == len(publisher.payloads())
    assert names["summary"].rows == len(publisher.payloads())
