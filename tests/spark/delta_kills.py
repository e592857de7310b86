"""Drivers that write Delta tables and are killed, while others overlap: every event once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.killed_query import KILLS, TIMEOUT, kill_drivers, killed_queries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POINTS = {
    "gold": "output/gold/_delta_log/*.json",
    "written": "output/silver/part-*.parquet",
    "bronze": "output/bronze/_delta_log/*.json",
    "silver": "output/silver/_delta_log/*.json",
    "committed": "checkpoint/commits/*",
    "staged": "staging/*/data/*/*",
    "random": "checkpoint/offsets/*",
}


@pytest.mark.timeout(TIMEOUT * (2 + KILLS))
def test_driver_is_killed_while_it_writes_delta_tables(spark: SparkSession, tmp_path: Path) -> None:
    with killed_queries(tmp_path) as killed:
        query = killed("delta")
        kill_drivers(query, POINTS, KILLS, mixed=True)
        query.finish(spark)
        query.check_tables(
            lambda table: (row.asDict() for row in spark.table(f"killed.{table}").collect())
        )
        gold = spark.table("killed.gold").collect()
        assert {row["entity"]: row["n"] for row in gold} == query.state()
