"""Real Spark, executors in JVMs of their own, and SIGKILL: every event is in the sink exactly once, in order within its entity."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from feedapi_client.testing import Publisher
from tests.spark.conftest import needs_jvm
from tests.spark.micro_batches import Row, problems

ROOT = Path(__file__).parents[2]
MASTER = "local-cluster[2,1,1024]"
LIVES = int(os.environ.get("FEEDAPI_SPARK_KILLS", "4"))
"""How often the driver is killed: ``FEEDAPI_SPARK_KILLS=50 pytest tests/spark/test_killed.py`` is the long run."""


pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300 + 60 * LIVES), needs_jvm]


@dataclass
class Torture:
    """One query over several lives of its driver."""

    publisher: Publisher
    folder: Path
    sink: str
    format: str = "feedapi"
    master: str = MASTER
    process: subprocess.Popen[bytes] | None = None
    published: int = 0
    given: dict[str, str] = field(default_factory=dict)

    def publish(self, count: int) -> None:
        for n in range(self.published, self.published + count):
            entity = f"e{n % 20}"
            self.publisher.publish(entity, {"entity": entity, "n": n})
        self.published += count

    def start(self, **more: Any) -> None:
        """Start a driver."""
        options = {
            "url": self.publisher.url,
            "stagingLocation": (self.folder / "staging").as_uri(),
            "maxEventsPerPartition": "400",
            "maxPollInterval": "0.5",
        }
        given = {
            "master": self.master,
            "format": self.format,
            "sink": self.sink,
            "options": {**options, **self.given},
            "checkpoint": str(self.folder / "checkpoint"),
            "output": str(self.folder / "output"),
            **more,
        }
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", json.dumps(given)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_point(self, pattern: str, timeout: float = 90) -> None:
        """Wait for a file that is not there yet."""
        known = set(self.folder.glob(pattern))
        self.wait(lambda: set(self.folder.glob(pattern)) - known, timeout)

    def wait(self, reached: Callable[[], object], timeout: float = 90) -> None:
        assert self.process is not None
        end = time.monotonic() + timeout
        while not reached():
            assert time.monotonic() < end, self.log()
            assert self.process.poll() is None, f"the driver ended by itself: {self.log()}"
            time.sleep(0.002)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """SIGKILL to the driver, its JVM and the executors."""
        if self.process is not None:
            for pid in session_of(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def finish(self) -> None:
        """A last life, which reads everything and ends."""
        self.start(finish=True)
        assert self.process is not None
        try:
            assert self.process.wait(timeout=150) == 0, self.log()
        finally:
            self.kill()

    def rows(self) -> Iterator[Row]:
        """What a reader of the sink sees."""
        output = self.folder / "output"
        files = (
            spark_metadata(output)
            if self.sink == "parquet"
            else sorted(output.glob("batch=*/*.parquet"))
        )
        for file in files:
            yield from pq.ParquetFile(file).read().to_pylist()

    def problems(self) -> list[str]:
        return problems(self.rows(), self.publisher.payloads())


def session_of(leader: int) -> list[int]:
    """The processes of a session: Python workers put themselves into a process group of their own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[3]) == leader:
                found.append(int(stat.parent.name))
    return found


def executors_of(leader: int) -> list[int]:
    found = []
    for pid in session_of(leader):
        with suppress(OSError):
            if "CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_text(
                errors="replace"
            ):
                found.append(pid)
    return found


def spark_metadata(output: Path) -> list[Path]:
    """The files that Spark's file sink committed."""
    paths = set()
    for log in (output / "_spark_metadata").iterdir():
        if log.name.split(".")[0].isdigit():
            paths |= {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
    return [Path(path.removeprefix("file://")) for path in sorted(paths)]


@pytest.fixture
def torture(tmp_path: Path) -> Iterator[Callable[..., Torture]]:
    made: list[Torture] = []
    publisher = Publisher(partitions=2, page_size=150, checkpoint_every=25, seed=11)

    def make(sink: str, **more: Any) -> Torture:
        made.append(Torture(publisher, tmp_path, sink, **more))
        return made[-1]

    with publisher.serve():
        yield make
        for one in made:
            one.kill()


def change_topology(publisher: Publisher, step: int) -> None:
    """Something new each time: both split methods, a new token."""
    if step == 0:
        publisher.split(0, into=2, method="starts-after")
    elif step == 1:
        publisher.split(1, into=2, method="cursor-from")
    else:
        publisher.rotate_token()


def test_an_executor_is_killed_and_partitions_split_while_the_query_runs(
    torture: Callable[..., Torture],
) -> None:
    query = torture("parquet")
    query.publish(2000)
    query.start()
    query.await_point("checkpoint/commits/*")
    change_topology(query.publisher, 0)
    query.publish(1500)
    query.await_point("staging/*/data/*/*")
    assert query.process is not None
    os.kill(executors_of(query.process.pid)[0], signal.SIGKILL)
    change_topology(query.publisher, 1)
    query.publish(1500)
    query.await_point("checkpoint/commits/*")
    change_topology(query.publisher, 2)
    query.wait(lambda: query.problems() == [], timeout=120)
    query.kill()
    assert query.problems() == []


POINTS = {
    "staged": "staging/*/data/*/*",
    "sunk": "output/_spark_metadata/*",
    "committed": "checkpoint/commits/*",
}


def kill_again_and_again(query: Torture, points: dict[str, str]) -> None:
    chance = random.Random(5)
    names = [*points, "random"]
    for life in range(LIVES):
        query.publish(800)
        query.start()
        point = names[life % len(names)]
        if point == "random":
            query.await_point("checkpoint/offsets/*")
            time.sleep(chance.uniform(0, 2))
        else:
            query.await_point(points[point])
        query.kill()
        change_topology(query.publisher, life)
    query.publish(500)
    query.finish()


def test_the_driver_is_killed_with_a_parquet_sink(torture: Callable[..., Torture]) -> None:
    query = torture("parquet")
    kill_again_and_again(query, POINTS)
    assert query.problems() == []


def test_the_driver_is_killed_with_an_idempotent_foreach_batch_sink(
    torture: Callable[..., Torture],
) -> None:
    query = torture("foreach")
    for life, die in enumerate(["read", "written", "next"]):
        query.publish(800)
        query.start(die=die, at=life)
        assert query.process is not None
        query.process.wait(timeout=120)
        query.kill()
        change_topology(query.publisher, life)
    query.publish(500)
    query.finish()
    assert query.problems() == []


def test_the_check_can_fail_a_refetching_reader_loses_or_doubles_events(
    torture: Callable[..., Torture],
) -> None:
    query = torture("foreach", format="refetching", master="local[2]")
    query.publish(800)
    query.start(die="written", at=0)
    assert query.process is not None
    query.process.wait(timeout=120)
    query.kill()
    query.publish(500)
    query.finish()
    assert any(problem.startswith("lost") or " times " in problem for problem in query.problems())
