"""A query over several drivers that are killed, of which some overlap."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow.parquet as pq

from feedapi_client.testing import Publisher, Quirks, faults
from tests.spark import driver
from tests.spark.micro_batches import Row, problems
from tests.spark.processes import DriverProcess
from tests.spark.sessions import LOCAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = int(os.environ.get("FEEDAPI_SPARK_KILLS", "1"))
"""How often the driver is killed, in each test that does so.

The long run is `FEEDAPI_SPARK_KILLS=25 FEEDAPI_SPARK_EXECUTOR_KILLS=100 pytest -n 0
-o faulthandler_timeout=0` of `test_process_kills.py` and `test_delta_writes.py`: a hundred drivers.
"""
TIMEOUT = 600.0
"""Seconds for one step: a safety net, not an expectation."""


@dataclass
class KilledQuery:
    """One query over several drivers."""

    publisher: Publisher
    folder: Path
    sink: str
    master: str = LOCAL
    options: dict[str, str] = field(default_factory=dict)
    driver: DriverProcess | None = None
    rival: DriverProcess | None = None
    """Another driver of the same query, that was started while the first one runs."""
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

    def start(self, **more: Any) -> DriverProcess:
        """Start a driver of its own."""
        self.driver = DriverProcess(self.given(**more), self.folder / "log")
        return self.driver

    def start_rival(self) -> None:
        """Start the query a second time, as a scheduler does whose last run is not over."""
        self.rival = DriverProcess(self.given(), self.folder / "rival.log")

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
            rival = self.rival is not None and self.rival.running
            assert self.driver.running or rival, f"the driver ended by itself: {self.driver.log()}"
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

    def kill_rival(self, after: float = 0.0) -> None:
        """Let the other driver go on for some seconds, if it does, and kill it."""
        if self.rival is not None:
            with suppress(subprocess.TimeoutExpired):
                self.rival.wait(after)
            self.rival.kill()
            self.rival = None

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

    def check_tables(self, read: Callable[[str], Iterable[Row]]) -> None:
        """Compare bronze, silver and rejected events with what was published `mixed`."""
        events = self.publisher.payloads()
        rejected = [event for event in events if event.get("gone") == "text"]
        assert problems(read("bronze"), events) == []
        assert problems(read("silver"), self.fitting()) == []
        assert problems(read("rejected"), rejected) == []

    def fitting(self) -> list[Row]:
        """The published events that fit the schema."""
        return [event for event in self.publisher.payloads() if event.get("gone") != "text"]

    def state(self) -> dict[str, int]:
        """The number in the last event of each entity that is not deleted."""
        state: dict[str, int] = {}
        for event in self.fitting():
            state.pop(event["entity"], None)
            if not event.get("gone"):
                state[event["entity"]] = event["n"]
        return state

    def problems(self) -> list[str]:
        return problems(self.rows(), self.publisher.payloads())


def committed_files(output: Path) -> list[Path]:
    """The files that Spark's file sink committed."""
    paths = set()
    for log in (output / "_spark_metadata").iterdir():
        if log.name.split(".")[0].isdigit():
            paths |= {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
    return [Path(path.removeprefix("file://")) for path in sorted(paths)]


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


def kill_drivers(
    killed: KilledQuery,
    points: Mapping[str, str],
    kills: int,
    *,
    mixed: bool = False,
    masters: Sequence[str] = (LOCAL,),
    overlaps: int = 0,
) -> None:
    """Kill drivers when a file appears, each of the points in turn, while the feed is disturbed.

    Every third time, first at number `overlaps`, another driver starts meanwhile, and takes over.
    """
    chance = random.Random(5)
    for number in range(kills):
        point = list(points)[number % len(points)]
        killed.publish(800, mixed=mixed)
        known = killed.files(points[point])
        killed.start(master=masters[number % len(masters)])
        if number % 3 == overlaps:
            killed.start_rival()
        killed.wait_for_file(points[point], known)
        if point == "random":
            time.sleep(chance.uniform(0, 2))
        killed.kill()
        killed.kill_rival(chance.uniform(0, 8))
        disturb(killed.publisher, number)
    killed.publish(500, mixed=mixed)


@contextmanager
def killed_queries(folder: Path) -> Iterator[Callable[..., KilledQuery]]:
    """Yield what makes queries of one feed. What still runs of them is killed."""
    # Without the last cursor of closed partitions nobody can tell that a replica lags.
    quirks = Quirks(last_cursor="closed")
    publisher = Publisher(partitions=2, page_size=150, checkpoint_every=25, seed=11, quirks=quirks)
    made: list[KilledQuery] = []

    def make(sink: str, **more: Any) -> KilledQuery:
        made.append(KilledQuery(publisher, folder, sink, **more))
        return made[-1]

    with publisher.serve():
        yield make
        for one in made:
            one.kill_rival()
            one.kill()
