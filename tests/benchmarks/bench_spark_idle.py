"""What a Spark query costs whose feed has no news, and one of small epochs.

::

    python -m tests.benchmarks.bench_spark_idle

At 1 to 10,000 partitions: requests and processor time (JVM, Python workers, the driver's planner)
while nothing is published; then the first epoch of ten events, and further ones in the same
partition. As a table, and drawn in ``build/benchmarks/spark-idle.svg``. It takes some eight
minutes: idle partitions are asked 50 times a second together, so that the first event in one of
10,000 is found after up to 200 s.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from feedapi_client.testing import Publisher
from tests.benchmarks.spark_processes import committed_epochs, processor_seconds, session

EVENTS = 10
"""Events of a small epoch."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of `EVENTS` events: until it was committed."""

    seconds: float
    requests: int
    processor: float


@dataclass(frozen=True)
class Idle:
    """What a query cost: each second while nothing was published, and then for small epochs."""

    partitions: int
    requests: float
    processor: float
    first: Epoch
    further: list[Epoch]

    @property
    def epoch(self) -> Epoch:
        """The median of the further epochs, each figure on its own."""
        return Epoch(
            statistics.median(epoch.seconds for epoch in self.further),
            round(statistics.median(epoch.requests for epoch in self.further)),
            statistics.median(epoch.processor for epoch in self.further),
        )


def idle(spark: Any, partitions: int, seconds: float, epochs: int) -> Idle:
    """Run a query to the end of a feed, and watch it there."""
    publisher = Publisher(partitions=partitions)
    for partition in range(partitions):
        publisher.append(partition, {"n": 0})
    with publisher.serve() as url, tempfile.TemporaryDirectory() as folder:
        query = (
            spark.readStream.format("feedapi")
            .options(url=url, stagingLocation=f"{folder}/staging")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(processingTime="0 seconds")
            .start()
        )
        while sum(entry["numInputRows"] for entry in query.recentProgress) < partitions:
            time.sleep(0.1)
        while publisher.counters["fetch"] < 3 * partitions:  # each one was asked at its end
            time.sleep(0.1)
        time.sleep(1.0)
        publisher.clear_requests()
        began, used = time.perf_counter(), processor_seconds()
        time.sleep(seconds)
        watched = time.perf_counter() - began
        found = (publisher.counters["fetch"] / watched, (processor_seconds() - used) / watched)
        checkpoint = Path(folder, "checkpoint")
        first, *further = [_epoch(publisher, checkpoint) for _ in range(1 + epochs)]
        query.stop()
    return Idle(partitions, *found, first, further)


def _epoch(publisher: Publisher, checkpoint: Path) -> Epoch:
    """Publish to one partition, and wait until the query has committed that."""
    before = committed_epochs(checkpoint)
    publisher.clear_requests()
    began, used = time.perf_counter(), processor_seconds()
    publisher.extend(0, [{"n": n} for n in range(EVENTS)])
    while committed_epochs(checkpoint) == before:
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    return Epoch(seconds, publisher.counters["fetch"], processor_seconds() - used)


def table(results: Sequence[Idle]) -> Table:
    """Return what was found, a line for each number of partitions."""
    found = Table(box=box.SIMPLE, title=f"An idle feed, and epochs of {EVENTS} events")
    idling = ("partitions", "requests/s", "cores")
    for column in (*idling, "first, s", "requests", "further, s", "requests", "CPU s"):
        found.add_column(column, justify="right", no_wrap=True)
    for one in results:
        found.add_row(
            f"{one.partitions:,}",
            f"{one.requests:,.1f}",
            f"{one.processor:.3f}",
            f"{one.first.seconds:.2f}",
            f"{one.first.requests:,}",
            f"{one.epoch.seconds:.2f}",
            f"{one.epoch.requests:,}",
            f"{one.epoch.processor:.2f}",
        )
    return found


def draw(results: Sequence[Idle], path: Path) -> None:
    """Draw the processor time of idling, and of a small epoch, over the number of partitions."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    sizes = [one.partitions for one in results]
    curves = {
        "idle: cores busy": [one.processor for one in results],
        f"an epoch of {EVENTS} events: seconds of processor time": [
            one.epoch.processor for one in results
        ],
    }
    for place, (name, values) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, 2, place)
        axes.plot(sizes, values, marker="o")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("partitions")
        axes.set_title(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--seconds", type=float, default=60.0, help="how long to watch each (default 60)"
    )
    arguments.add_argument("--epochs", type=int, default=9, help="further epochs (default 9)")
    arguments.add_argument(
        "--partitions",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1, 100, 1000, 10_000],
        help="numbers of partitions (default 1,100,1000,10000)",
    )
    arguments.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    given = arguments.parse_args()
    console = Console()
    spark = session()
    results = []
    for size in track(given.partitions, "numbers of partitions", console=console):
        results.append(idle(spark, size, given.seconds, given.epochs))
        draw(results, given.output / "spark-idle.svg")  # the next size takes longer
    spark.stop()
    console.print(table(results))
    console.print(f"{given.output / 'spark-idle.svg'}")


if __name__ == "__main__":
    main()
