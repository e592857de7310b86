"""The example project of Spark Declarative Pipelines, run with ``spark-pipelines``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedapi_client.testing import Publisher
from tests.spark import jvm
from tests.spark.conftest import ROOT, needs_jvm
from tests.spark.python_path import python_path
from tests.spark.sessions import configuration
from tests.spark.slow_workers import SLOW_WORKER

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_jvm]


def publish(publisher: Publisher, numbers: range) -> None:
    for n in numbers:
        order = f"o{n % 7}"
        status = "deleted" if n % 20 == 19 else "paid"
        publisher.publish(order, {"entity": order, "status": status, "amount": float(n)})


def run(project: Path, url: str) -> None:
    """Run the project. Run it again when a Python worker was too slow."""
    command = [str(Path(sys.executable).with_name("spark-pipelines")), "run"]
    given = {**configuration(), "spark.sql.catalogImplementation": "hive"}
    for name, value in given.items():
        command += ["--conf", f"{name}={value}"]
    while True:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
            cwd=project,
            env={
                **os.environ,
                **jvm.ANY_PORT,
                "FEED_URL": url,
                "FEED_STAGING": (project / "staging").as_uri(),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": python_path(ROOT / "feedapi_client" / "spark"),  # pyspark_feedapi
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
        )
        if done.returncode == 0:
            return
        assert SLOW_WORKER in done.stdout + done.stderr, done.stderr[-6000:]


def rows(project: Path, table: str) -> list[dict[str, Any]]:
    files = (project / "spark-warehouse" / table).glob("*.parquet")
    return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()


@pytest.mark.timeout(1800)
def test_example_project_keeps_its_tables_up_to_date(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "pipelines", project)
    specification = project / "spark-pipeline.yml"
    text = specification.read_text()
    assert "file:///tmp/feedapi-pipelines/storage" in text
    storage = (tmp_path / "storage").as_uri()
    specification.write_text(text.replace("file:///tmp/feedapi-pipelines/storage", storage))
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
    with publisher.serve() as url:
        for numbers in (range(60), range(60, 100)):
            publish(publisher, numbers)
            publisher.append(0, {"n": 1})
            run(project, str(url))
    assert len(rows(project, "orders_bronze")) == 102
    assert len(rows(project, "orders_rejected")) == 2
    assert {row["amount"] for row in rows(project, "orders_silver")} == set(map(float, range(100)))
    state: dict[str, float] = {}
    for event in publisher.payloads():
        if event.get("status") == "deleted":
            state.pop(event["entity"], None)
        elif "entity" in event:
            state[event["entity"]] = event["amount"]
    assert {row["entity"]: row["amount"] for row in rows(project, "orders")} == state
