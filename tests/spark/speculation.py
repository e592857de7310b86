"""Speculative tasks on a real Spark cluster: every event once, whichever attempt wins.

::

    python -m tests.spark.speculation --stalls 20

Spark runs no second attempt of a task on the host of the first one, and so none on `local-cluster`.
Here are a master and two workers of its standalone cluster, with an address of their own each. The
publisher holds some fetches of the tasks for minutes; only a second attempt commits the epoch
before that. The program ends with 1 where one was not overtaken, or an event is missing, there
twice or out of order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import track

from feedapi_client.testing import Publisher, Request, Response, faults
from feedapi_client.testing.liftbridge import free_port
from tests.spark import jvm
from tests.spark.micro_batches import problems
from tests.spark.python_path import ROOT, python_path

_EVENT = b'"entity"'
HOLD = 300.0
"""Seconds for which a fetch is held, far longer than an epoch takes."""
STEP = 600
"""Events that are published before each stall."""
_CONFIGURATION = {
    "spark.executor.cores": "1",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.task.duration.threshold": "3s",  # also the only task of an epoch
}


class Straggler:
    """Holds a task's fetch, once it is told to; a later fetch of the same place is answered.

    The driver looks for events first, where it does not expect them: the second fetch that finds
    some at a place is a task's.

    Attributes:
        waiting: how many of the next such fetches are held.
        stalls: how many were.
        overtaken: of those, how many were made again while they were held.
    """

    def __init__(self) -> None:
        self.waiting = self.stalls = self.overtaken = 0
        self._asked: Counter[tuple[int | None, str | None]] = Counter()
        self._held: dict[tuple[int | None, str | None], float] = {}

    def __call__(self, response: Response, request: Request, publisher: Any, /) -> Response:
        if _EVENT not in response.body:
            return response
        place = (request.partition, request.cursor)
        self._asked[place] += 1
        if place in self._held:
            self.overtaken += time.monotonic() < self._held.pop(place)
        elif self.waiting and self._asked[place] == 2:
            self.waiting -= 1
            self.stalls += 1
            self._held[place] = time.monotonic() + HOLD
            return faults.Delay(HOLD)(response, request, publisher)
        return response


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Run a master and two workers, and give the master's URL."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "SPARK_HOME": str(program.parents[1]),
        "SPARK_DAEMON_JAVA_OPTS": jvm.options(),
    }
    url = f"spark://127.0.0.1:{(port := free_port())}"
    deploy = "org.apache.spark.deploy"
    size = ["-c", "1", "-m", "1g", "-d", str(folder)]
    commands = [
        [f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port)],
        [f"{deploy}.worker.Worker", "--host", "127.0.0.1", *size, url],
        [f"{deploy}.worker.Worker", "--host", "127.0.0.2", *size, url],
    ]
    processes = []
    try:
        for number, (name, *arguments) in enumerate(commands):
            with (folder / f"log-{number}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [program, name, "--webui-port", "0", *arguments],
                        env=environment,
                        cwd=folder,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()


def start_session(master: str) -> SparkSession:
    """Start a session on the cluster, one core in each of two executors."""
    from tests.spark.sessions import session

    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": python_path(),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return session(master, _CONFIGURATION)


def run(stalls: int, console: Console) -> list[str]:
    """Hold that many fetches, one after the other. Return what is wrong."""
    publisher = Publisher(partitions=4, page_size=150, checkpoint_every=25, seed=3)
    straggler = Straggler()
    published = 0
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as master:
        folder = Path(name)
        spark = start_session(master)
        with publisher.serve() as url:
            publisher.fail(straggler, times=None)
            query = (
                spark.readStream.format("feedapi")
                .options(
                    url=url,
                    stagingLocation=(folder / "staging").as_uri(),
                    maxPartitionsPerTask=1,
                    maxPollInterval=0.5,
                    requestTimeout=2 * HOLD,
                )
                .load()
                .writeStream.format("parquet")
                .option("path", str(folder / "output"))
                .option("checkpointLocation", str(folder / "checkpoint"))
                .trigger(processingTime="0 seconds")
                .start()
            )
            for stall in track(range(stalls), "stalls", console=console):
                straggler.waiting = stall + 1 - straggler.stalls
                for n in range(published, published + STEP):
                    publisher.publish(f"e{n % 40}", {"entity": f"e{n % 40}", "n": n})
                published += STEP
                while rows_written(query) < published:
                    if not query.isActive:
                        return [f"the query has ended: {query.exception()}"]
                    time.sleep(0.05)
            query.stop()
        files = spark.read.parquet(str(folder / "output")).inputFiles()
        rows = [
            row
            for file in sorted(files)
            for row in pq.ParquetFile(file.removeprefix("file://")).read().to_pylist()
        ]
        spark.stop()
    console.print(
        f"{published:,} events, {straggler.stalls} fetches held, {straggler.overtaken} of them "
        "overtaken by a second attempt"
    )
    wrong = problems(rows, publisher.payloads())
    if not 0 < straggler.overtaken == straggler.stalls:
        wrong.append("a fetch was not overtaken, or none was held: no second attempt was made")
    return wrong


def rows_written(query: Any) -> int:
    """What the query has read in all epochs that are committed."""
    return sum(entry["numInputRows"] for entry in query.recentProgress)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Speculative tasks of a real Spark cluster.")
    arguments.add_argument("--stalls", type=int, default=20, help="fetches that are held")
    console = Console()
    found = run(arguments.parse_args().stalls, console)
    for problem in found[:20]:
        console.print(problem, style="red")
    console.print("every event once, in order" if not found else f"{len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
