"""``feedapi ingest`` over Spark Connect, where the server writes the micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.spark import jvm
from tests.spark.conftest import ROOT, needs_jvm
from tests.spark.python_path import python_path
from tests.spark.test_ingest import publish

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_jvm]


@pytest.mark.timeout(900)
def test_ingest_over_spark_connect(tmp_path: Path) -> None:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
    publish(publisher, 60)
    publisher.append(0, {"n": 1})
    with publisher.serve() as url:
        given = {
            "url": str(url),
            "output": str(tmp_path / "typed"),
            "rejected": str(tmp_path / "rejected"),
            "schema": "entity STRING NOT NULL, n INT",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.connect_ingest", json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
            cwd=ROOT,
            env={
                **os.environ,
                **jvm.ANY_PORT,
                "PYTHONPATH": python_path(),
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
        )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["session"] == "pyspark.sql.connect.session"
    assert (results["first"]["rows"], results["first"]["unparsed"]) == (60, 1)
    assert (results["second"]["rows"], results["second"]["batches"]) == (0, 0)
    assert "keep its name with --feed" in results["error"]
