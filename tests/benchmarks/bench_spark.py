"""The Spark source beside the plain consume loop, in one run.

::

    python -m tests.benchmarks.bench_spark

One task slot (``local[1]``), a sink that drops the rows (noop), pages from a static server. "Per
core" is events for each second of processor time of all processes that take part: JVM, Python
workers, the driver's planner. "Net" leaves out what Spark takes for as many micro-batches of its
own rate source, measured in the same run. The plain loops are one process on one core.

`tests.benchmarks.bench_spark_idle` has what an idle feed and small epochs cost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.consume_loops import batches_json, batches_untouched, events_json
from tests.benchmarks.spark_processes import (
    PeakMemory,
    committed_epochs,
    processor_seconds,
    session,
    watched,
)
from tests.benchmarks.static_feed import static_feed

EPOCH = 100_000
LOOPS = {
    "async for, each .json()": events_json,
    "batches(), each .json()": batches_json,
    "batches(), untouched": batches_untouched,
}


@dataclass
class Measured:
    """What one query did, without its first batches, in which the JVM compiles."""

    events: int
    wall: float
    processor: float
    batch_seconds: list[float]

    @property
    def per_core(self) -> float:
        """Events per second of processor time."""
        return self.events / self.processor

    def net_of(self, own: Measured) -> float:
        """Return the same without what Spark takes for as many micro-batches of its own."""
        return self.events / (self.processor - len(self.batch_seconds) * own.processor)


def stream(
    spark: Any, url: str, limit: int, skip: int = 0, look: Callable[[], object] = int
) -> Measured:
    """Run one query to the end of the feed, without counting the first `skip` batches.

    `look` is called every 0.1 s.
    """
    began, used = time.perf_counter(), processor_seconds()
    marks = [(began, used)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint")

        def mark() -> None:
            new = committed_epochs(checkpoint) + 1 - len(marks)
            if new > 0:
                marks.extend([(time.perf_counter(), processor_seconds())] * new)

        source = (
            spark.readStream.format("feedapi")
            .options(url=url, stagingLocation=f"{folder}/staging", maxEventsPerPartition=limit)
            .load()
        )
        query = (
            source.writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        with watched(mark, seconds=0.01), watched(look, seconds=0.1):
            query.awaitTermination()
        progress = [entry for entry in query.recentProgress if entry["numInputRows"]]
    first, last = marks[skip], marks[-1]
    counted = progress[skip:]
    return Measured(
        sum(entry["numInputRows"] for entry in counted),
        last[0] - first[0],
        last[1] - first[1],
        [entry["durationMs"]["triggerExecution"] / 1000 for entry in counted],
    )


def own_micro_batch(spark: Any, batches: int = 60, skip: int = 20) -> Measured:
    """Measure what Spark alone takes for a micro-batch: time, and processor time."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
    with tempfile.TemporaryDirectory() as folder:
        query = (
            source.writeStream.format("noop")
            .option("checkpointLocation", folder)
            .trigger(processingTime="0 seconds")
            .start()
        )
        marks = []
        for count in (skip, skip + batches):
            while query.lastProgress is None or query.lastProgress["batchId"] < count:
                time.sleep(0.005)
            marks.append((time.perf_counter(), processor_seconds(), query.lastProgress["batchId"]))
        query.stop()
    (began, used, first), (ended, used_then, last) = marks
    return Measured(100, (ended - began) / (last - first), (used_then - used) / (last - first), [])


def plain(loop: Any, url: str) -> float:
    """Run a plain loop in this process: events per second of processor time."""
    began = time.process_time()
    count: int = asyncio.run(loop(url))
    return count / (time.process_time() - began)


def beside_plain_loops(spark: Any, epoch: int, skip: int, epochs: int) -> Table:
    """Measure epochs of that many events, and the plain loops over the same feed.

    Spark's own micro-batches come right after: the JVM is as warm then.
    """
    with static_feed(events=epoch * (epochs + skip), page_size=10_000) as url:
        plains = {
            name: statistics.median(plain(loop, url) for _ in range(3))
            for name, loop in LOOPS.items()
        }
        run = stream(spark, url, epoch, skip)
    own = own_micro_batch(spark)
    table = Table(title=f"{len(run.batch_seconds)} epochs of {epoch:,} events of 150 bytes")
    for column in ("", "events/s of a core", "Spark / this", "net / this"):
        table.add_column(column, justify="right" if column else "left")
    net = run.net_of(own)
    table.add_row("Spark", f"{run.per_core:,.0f}", "", "")
    table.add_row("Spark, net", f"{net:,.0f}", "", "")
    for name, rate in plains.items():
        ratios = f"{run.per_core / rate:.2f}", f"{net / rate:.2f}"
        table.add_row(name, f"{rate:,.0f}", *ratios)
    table.caption = (
        f"{run.events / run.wall:,.0f} events/s of wall time, {run.processor / run.wall:.2f} cores "
        f"busy; Spark's own micro-batch: {own.wall:.3f} s, {own.processor:.3f} s of processor time"
    )
    return table


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--epochs", type=int, default=20, help=f"measured epochs of {EPOCH} events (default 20)"
    )
    given = arguments.parse_args()
    console = Console()
    spark = session()
    console.print(beside_plain_loops(spark, EPOCH, 20, given.epochs))
    console.print(beside_plain_loops(spark, 10 * EPOCH, 4, 8))
    with static_feed(events=100 * 60, page_size=100) as url:
        small = stream(spark, url, 100, skip=20)
    console.print(
        f"a micro-batch of 100 events: {statistics.median(small.batch_seconds):.3f} s, "
        f"{small.processor / len(small.batch_seconds):.3f} s of processor time"
    )
    for size in (100_000, 1_000_000, 3_000_000):
        memory = PeakMemory()
        with static_feed(events=size, page_size=10_000) as url:
            stream(spark, url, size, look=memory.look)
        console.print(
            f"an epoch of {size:,} events ({size * 150 / 1e6:,.0f} MB): at its peak "
            f"{memory.worker:,.0f} MiB in the Python worker, {memory.jvm:,.0f} MiB in the JVM so "
            "far, whose heap may have 1 GiB"
        )
    spark.stop()


if __name__ == "__main__":
    main()
