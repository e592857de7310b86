"""Real Spark and SIGKILL, of executors in JVMs of their own and of drivers.

Every event is in the sink exactly once, in order within its entity.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow.parquet as pq
import pytest

from feedapi_client.spark.ingest import latest
from feedapi_client.testing import Publisher, Quirks, faults
from tests.spark import driver
from tests.spark.conftest import needs_jvm
from tests.spark.micro_batches import Row, problems
from tests.spark.processes import ClusterDriver, DriverProcess
from tests.spark.refetching import RefetchingSource
from tests.spark.sessions import CLUSTER, LOCAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = int(os.environ.get("FEEDAPI_SPARK_KILLS", "2"))
"""How often the driver is killed, in each test that does so.

The long run is `FEEDAPI_SPARK_KILLS=50 FEEDAPI_SPARK_EXECUTOR_KILLS=100 pytest -n 0
-o faulthandler_timeout=0` of this file.
"""
EXECUTOR_KILLS = int(os.environ.get("FEEDAPI_SPARK_EXECUTOR_KILLS", "1"))
"""How often an executor is killed, and as often all Python workers of the executors."""
MASTERS = (LOCAL, CLUSTER)
"""The drivers take turns: executors in JVMs of their own cost several seconds a start."""
TIMEOUT = 600.0
"""Seconds for one step: a safety net, not an expectation."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT * (2 + KILLS + EXECUTOR_KILLS)),
    needs_jvm,
]


@dataclass
class KilledQuery:
    """One query over several drivers."""

    publisher: Publisher
    folder: Path
    sink: str
    format: str = "feedapi"
    master: str = LOCAL
    options: dict[str, str] = field(default_factory=dict)
    driver: DriverProcess | None = None
    published: int = 0

    def publish(self, count: int, *, mixed: bool = False) -> None:
        """Publish events, of which some delete their entity and some do not fit, if `mixed`."""
        for n in range(self.published, self.published + count):
            entity = f"e{n % 20}"
            gone = {37: True, 41: "text"}.get(n % 50) if mixed else None
            more = {} if gone is None else {"gone": gone}
            self.publisher.publish(entity, {"entity": entity, "n": n, **more})
        self.published += count

    def given(self, **more: Any) -> dict[str, Any]:
        return {
            "master": self.master,
            "format": self.format,
            "sink": self.sink,
            "options": {
                "url": self.publisher.url,
                "stagingLocation": (self.folder / "staging").as_uri(),
                "maxEventsPerPartition": "400",
                "maxPollInterval": "0.5",
                **self.options,
            },
            "checkpoint": str(self.folder / "checkpoint"),
            "output": str(self.folder / "output"),
            **more,
        }

    def start(self, **more: Any) -> None:
        """Start a driver of its own."""
        self.driver = DriverProcess([json.dumps(self.given(**more))], self.folder / "log")

    def start_in(self, cluster: ClusterDriver) -> None:
        """Start it in a driver that is there already."""
        self.driver = cluster
        cluster.start(self.given())

    def files(self, pattern: str) -> set[Path]:
        return set(self.folder.glob(pattern))

    def wait_for_file(self, pattern: str, known: set[Path]) -> None:
        """Wait for a file that is not among the known ones."""
        self.wait(lambda: self.files(pattern) - known)

    def wait(self, reached: Callable[[], object], *, pause: float = 0.002) -> None:
        assert self.driver is not None
        end = time.monotonic() + TIMEOUT
        while not reached():
            assert time.monotonic() < end, self.driver.log()
            assert self.driver.running, f"the driver ended by itself: {self.driver.log()}"
            time.sleep(pause)

    def wait_for_death(self) -> None:
        """Wait until the driver has killed itself, and kill what it left."""
        assert self.driver is not None
        code = self.driver.wait(TIMEOUT)
        assert code == -signal.SIGKILL, self.driver.log()
        self.kill()

    def kill(self) -> None:
        if self.driver is not None:
            self.driver.kill()

    def finish(self, spark: SparkSession) -> None:
        """Read everything in the session of the tests, which takes the last driver's place.

        Nothing is disturbed any more: a run that ends reads what a replica that lags knows of.
        """
        self.publisher.heal()
        driver.run(spark, self.given(finish=True))

    def rows(self, table: str = "") -> Iterator[Row]:
        """What a reader of the sink sees."""
        output = self.folder / "output" / table
        if self.sink == "parquet":
            files = committed_files(output)
        else:
            files = sorted(output.glob("**/batch=*/*.parquet")) or sorted(output.glob("*.parquet"))
        for file in files:
            yield from pq.ParquetFile(file).read().to_pylist()

    def problems(self) -> list[str]:
        return problems(self.rows(), self.publisher.payloads())


def committed_files(output: Path) -> list[Path]:
    """The files that Spark's file sink committed."""
    paths = set()
    for log in (output / "_spark_metadata").iterdir():
        if log.name.split(".")[0].isdigit():
            paths |= {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
    return [Path(path.removeprefix("file://")) for path in sorted(paths)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    # Without the last cursor of closed partitions nobody can tell that a replica lags.
    quirks = Quirks(last_cursor="closed")
    publisher = Publisher(partitions=2, page_size=150, checkpoint_every=25, seed=11, quirks=quirks)
    with publisher.serve():
        yield publisher


@pytest.fixture
def query(publisher: Publisher, tmp_path: Path) -> Iterator[Callable[..., KilledQuery]]:
    made: list[KilledQuery] = []

    def make(sink: str, **more: Any) -> KilledQuery:
        made.append(KilledQuery(publisher, tmp_path, sink, **more))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def change_topology(publisher: Publisher, step: int) -> None:
    """Do something new each time: both split methods, then new tokens, and from the start again."""
    if step % 10 == 0:
        publisher.split(publisher.open_partitions()[0], into=2, method="starts-after")
    elif step % 10 == 1:
        publisher.split(publisher.open_partitions()[0], into=2, method="cursor-from")
    else:
        publisher.rotate_token()


def disturb(publisher: Publisher, step: int) -> None:
    """Change the topology. The next requests fail, or come to a replica that does not know yet."""
    assert publisher.url is not None
    publisher.heal()
    before = httpx.get(publisher.url).json()
    change_topology(publisher, step)
    publisher.fail(faults.Replace(before), on="discovery", after=1)
    publisher.fail(503, on="discovery", times=2)
    publisher.fail(faults.EmptyPage(moving=False), times=3, after=2)
    publisher.fail(503, times=4)


@pytest.fixture(scope="module")
def cluster(_jvm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterDriver]:
    """A driver process whose executors are JVMs of their own."""
    driver = ClusterDriver(tmp_path_factory.mktemp("cluster") / "log")
    yield driver
    driver.kill()


def test_default_staging_location_is_shared_on_one_machine(
    cluster: ClusterDriver, publisher: Publisher, tmp_path: Path
) -> None:
    query = KilledQuery(publisher, tmp_path, "foreach")
    query.publish(100)
    given = query.given(finish=True)
    del given["options"]["stagingLocation"]
    query.driver = cluster
    cluster.start(given)
    query.wait(lambda: query.files("checkpoint/commits/0"))
    cluster.stop()
    assert query.problems() == []


def kill(*processes: int) -> None:
    """Send SIGKILL to what still runs of these."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_executor_and_workers_are_killed_while_the_query_runs_and_the_feed_is_disturbed(
    cluster: ClusterDriver, publisher: Publisher, tmp_path: Path
) -> None:
    query = KilledQuery(publisher, tmp_path, "parquet")
    query.publish(2000)
    query.start_in(cluster)
    query.wait_for_file("checkpoint/commits/*", known=set())
    disturb(publisher, 0)
    for number in range(EXECUTOR_KILLS):
        staged = query.files("staging/*/data/*/*")
        query.publish(1500)
        query.wait_for_file("staging/*/data/*/*", known=staged)
        query.wait(cluster.executors)  # after a kill the next one takes a moment
        kill(*cluster.executors()[:1])
        disturb(publisher, 1 + number)
        committed = query.files("checkpoint/commits/*")
        query.publish(1500)
        query.wait_for_file("checkpoint/commits/*", known=committed)
        query.publish(1500)
        query.wait(cluster.workers)
        kill(*cluster.workers())
    disturb(publisher, 2)
    query.wait(lambda: query.problems() == [], pause=0.2)
    cluster.stop()
    assert query.problems() == []


def test_start_at_a_time_is_kept_when_an_executor_is_killed_during_the_search(
    cluster: ClusterDriver, tmp_path: Path
) -> None:
    start = 1500
    seek = {"startingTimestamp": str(start), "eventTime": "$.n"}
    publisher = Publisher(partitions=2, page_size=150, checkpoint_every=25)  # in order of time
    query = KilledQuery(publisher, tmp_path, "parquet", options=seek)

    def wrong() -> list[str]:
        published = [event for event in publisher.payloads() if event["n"] >= start]
        return problems(query.rows(), published)

    query.publish(2000)
    with publisher.serve():
        query.start_in(cluster)
        query.wait_for_file("checkpoint/commits/*", known=set())
        assert list(query.rows()) == []  # the first epoch does not come to the time
        kill(*cluster.executors()[:1])
        query.wait(lambda: wrong() == [], pause=0.2)
        change_topology(publisher, 0)
        query.publish(1000)
        query.wait(lambda: wrong() == [], pause=0.2)
        cluster.stop()
        assert wrong() == []


POINTS = {
    "staged": "staging/*/data/*/*",
    "sunk": "output/_spark_metadata/*",
    "committed": "checkpoint/commits/*",
    "random": "checkpoint/offsets/*",
}


INGEST_POINTS = {
    "bronze": "output/bronze/feed=*/query=*/batch=*/_SUCCESS",
    "silver": "output/silver/feed=*/query=*/batch=*/_SUCCESS",
    "rejected": "output/rejected/feed=*/query=*/batch=*/_SUCCESS",
    "committed": "checkpoint/commits/*",
    "staged": "staging/*/data/*/*",
    "random": "checkpoint/offsets/*",
}


def test_driver_is_killed_with_a_parquet_sink(
    spark: SparkSession, query: Callable[..., KilledQuery]
) -> None:
    killed = query("parquet")
    chance = random.Random(5)
    for number in range(KILLS):
        point = list(POINTS)[number % len(POINTS)]
        killed.publish(800)
        known = killed.files(POINTS[point])
        killed.start(master=MASTERS[number % 2])
        killed.wait_for_file(POINTS[point], known)
        if point == "random":
            time.sleep(chance.uniform(0, 2))
        killed.kill()
        disturb(killed.publisher, number)
    killed.publish(500)
    killed.finish(spark)
    assert killed.problems() == []


def test_driver_is_killed_with_an_idempotent_foreach_batch_sink(
    spark: SparkSession, query: Callable[..., KilledQuery]
) -> None:
    killed = query("foreach")
    for number, die in enumerate(["read", "written", "next"]):
        killed.publish(800)
        killed.start(die=die, at=number)
        killed.wait_for_death()
        disturb(killed.publisher, number)
    killed.publish(500)
    killed.finish(spark)
    assert killed.problems() == []


def test_driver_is_killed_while_it_ingests_into_tables(
    spark: SparkSession, query: Callable[..., KilledQuery]
) -> None:
    killed = query("ingest")
    chance = random.Random(7)
    for number in range(KILLS):
        point = list(INGEST_POINTS)[number % len(INGEST_POINTS)]
        killed.publish(800, mixed=True)
        known = killed.files(INGEST_POINTS[point])
        killed.start()
        killed.wait_for_file(INGEST_POINTS[point], known)
        if point == "random":
            time.sleep(chance.uniform(0, 2))
        killed.kill()
        disturb(killed.publisher, number)
    killed.publish(500, mixed=True)
    killed.finish(spark)
    events = killed.publisher.payloads()
    fitting = [event for event in events if event.get("gone") != "text"]
    rejected = [event for event in events if event.get("gone") == "text"]
    assert problems(killed.rows("bronze"), events) == []
    assert problems(killed.rows("silver"), fitting) == []
    assert problems(killed.rows("rejected"), rejected) == []
    state = {event["entity"]: event["n"] for event in fitting}
    gone = {event["n"] for event in fitting if event.get("gone")}
    expected = {entity: n for entity, n in state.items() if n not in gone}
    gold = latest(spark.read.parquet(str(killed.folder / "output" / "silver")), ["entity"], "gone")
    assert {row["entity"]: row["n"] for row in gold.collect()} == expected


def test_control_refetching_reader_loses_or_doubles_events(
    spark: SparkSession, query: Callable[..., KilledQuery]
) -> None:
    spark.dataSource.register(RefetchingSource)
    killed = query("foreach", format="refetching")
    killed.publish(800)
    killed.start(die="written", at=0)
    killed.wait_for_death()
    killed.publish(500)
    killed.finish(spark)
    found = killed.problems()
    assert any(problem.startswith("lost") or " times " in problem for problem in found)
