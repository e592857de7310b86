"""Executors in JVMs of their own, on the machine of the driver."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from feedapi_client.testing import Publisher
from tests.spark.micro_batches import Row, problems
from tests.spark.processes import ClusterDriver

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def rows(output: Path) -> list[Row]:
    files = sorted(output.glob("batch=*/*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def test_default_staging_location_is_shared_on_one_machine(
    cluster: ClusterDriver, tmp_path: Path
) -> None:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=1)
    for n in range(100):
        publisher.publish(f"e{n % 7}", {"entity": f"e{n % 7}", "n": n})
    with publisher.serve() as url:
        cluster.start(
            {
                "format": "feedapi",
                "sink": "foreach",
                "options": {"url": url},
                "checkpoint": str(tmp_path / "checkpoint"),
                "output": str(tmp_path / "output"),
                "finish": True,
            }
        )
        while not (tmp_path / "checkpoint" / "commits" / "0").exists():
            assert cluster.running, cluster.log()
            time.sleep(0.05)
        cluster.stop()
    assert problems(rows(tmp_path / "output"), publisher.payloads()) == []
