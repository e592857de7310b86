"""Real Spark and SIGKILL, of executors in JVMs of their own and of drivers.

Every event is in the sink exactly once, in order within its entity.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from feedapi_client.spark.ingest import latest
from tests.spark.conftest import needs_jvm
from tests.spark.killed_query import (
    KILLS,
    TIMEOUT,
    KilledQuery,
    disturb,
    kill_drivers,
    killed_queries,
)
from tests.spark.micro_batches import problems
from tests.spark.sessions import CLUSTER, LOCAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTOR_KILLS = int(os.environ.get("FEEDAPI_SPARK_EXECUTOR_KILLS", "1"))
"""How often an executor is killed, and as often all Python workers of the executors."""
MASTERS = (LOCAL, CLUSTER)
"""The drivers take turns: executors in JVMs of their own cost several seconds a start."""
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT * (2 + KILLS + EXECUTOR_KILLS)),
    needs_jvm,
]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Callable[..., KilledQuery]]:
    with killed_queries(tmp_path) as make:
        yield make


def kill(*processes: int) -> None:
    """Send SIGKILL to what still runs of these."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_executor_and_workers_are_killed_while_the_query_runs_and_the_feed_is_disturbed(
    killed: Callable[..., KilledQuery],
) -> None:
    """Its staging location is the default one, which is shared on one machine."""
    query = killed("parquet", master=CLUSTER)
    publisher, options = query.publisher, query.given()["options"]
    del options["stagingLocation"]
    query.publish(2000)
    driver = query.start(options=options)
    staging, committed = "feedapi-staging-*/*/data/*/*", "checkpoint/commits/*"
    query.wait_for_file(committed, known=set())
    disturb(publisher, 0)
    for number in range(EXECUTOR_KILLS):
        staged = query.files(staging)
        query.publish(1500)
        query.wait_for_file(staging, known=staged)
        query.wait(driver.executors)  # after a kill the next one takes a moment
        kill(*driver.executors()[:1])
        disturb(publisher, 1 + number)
        known = query.files(committed)
        query.publish(1500)
        query.wait_for_file(committed, known=known)
        query.publish(1500)
        query.wait(driver.workers)
        kill(*driver.workers())
    disturb(publisher, 2)
    query.wait(lambda: query.problems() == [], pause=0.2)


ENDED_BY_ANOTHER = ("a later run took the place of this one", "CONCURRENT_STREAM_LOG_UPDATE")
"""How a late driver ends: before its next plan, or within a micro-batch that another one has
committed, by Spark."""
POINTS = {
    "staged": "staging/*/data/*/*",
    "sunk": "output/_spark_metadata/*",
    "committed": "checkpoint/commits/*",
    "random": "checkpoint/offsets/*",
}


INGEST_POINTS = {
    "bronze": "output/bronze/_feedapi/attempts/*/*/*/_SUCCESS",
    "silver": "output/silver/feed=*/query=*/batch=*/_SUCCESS",
    "rejected": "output/rejected/feed=*/query=*/batch=*/_SUCCESS",
    "committed": "checkpoint/commits/*",
    "staged": "staging/*/data/*/*",
    "random": "checkpoint/offsets/*",
}


def test_driver_is_killed_with_a_parquet_sink(
    spark: SparkSession, killed: Callable[..., KilledQuery]
) -> None:
    query = killed("parquet")
    kill_drivers(query, POINTS, KILLS, masters=MASTERS, overlaps=1)
    query.finish(spark)
    assert query.problems() == []


def test_driver_is_killed_with_an_idempotent_foreach_batch_sink(
    spark: SparkSession, killed: Callable[..., KilledQuery]
) -> None:
    query = killed("foreach")
    chance = random.Random(9)
    points = ["written", "read", "next"]
    for number in range(KILLS):
        die = points[number % len(points)]
        query.publish(800)
        committed = {int(path.name) for path in query.files("checkpoint/commits/[0-9]*")}
        query.start(die=die, at=max(committed, default=-1) + 1)
        query.wait_for_death()
        if number % 3 == 1:  # of two that start at once, one goes on
            query.start()
            query.start_rival()
            query.publish(200)
            query.wait_for_file("checkpoint/commits/*", query.files("checkpoint/commits/*"))
            query.kill()
            query.kill_rival(chance.uniform(0, 20))
        disturb(query.publisher, number)
    query.publish(500)
    query.finish(spark)
    assert query.problems() == []


def test_driver_is_killed_while_it_ingests_into_tables(
    spark: SparkSession, killed: Callable[..., KilledQuery]
) -> None:
    query = killed("ingest")
    kill_drivers(query, INGEST_POINTS, KILLS, mixed=True)
    query.finish(spark)
    query.check_tables(query.rows)
    silver = spark.read.parquet(str(query.folder / "output" / "silver"))
    gold = latest(silver, ["entity"], "gone").collect()
    assert {row["entity"]: row["n"] for row in gold} == query.state()


def test_r08_driver_that_wakes_up_late_writes_nothing(
    spark: SparkSession, killed: Callable[..., KilledQuery]
) -> None:
    late = killed("ingest")
    late.publish(800, mixed=True)
    driver = late.start()
    late.wait_for_file("staging/*/data/*/*", known=set())
    driver.signal(signal.SIGSTOP)
    late.publish(500, mixed=True)
    late.finish(spark)
    driver.signal(signal.SIGCONT)
    assert driver.wait(TIMEOUT) != 0
    assert any(text in driver.log() for text in ENDED_BY_ANOTHER), driver.log()
    assert problems(late.rows("bronze"), late.publisher.payloads()) == []
    assert len(list(late.rows("silver"))) + len(list(late.rows("rejected"))) == 1300
