"""The Spark source beside the plain consume loop, in one run.

::

    python -m tests.benchmarks.bench_spark
    python -m tests.benchmarks.bench_spark --idle

One task slot (``local[1]``), a sink that drops the rows (noop), pages from a static server. "Per
core" is events for each second of processor time of all processes that take part: JVM, Python
workers, the driver's planner. The plain loops are one process on one core.

``--idle`` measures instead what a query costs whose feed has no news, at 1 to 10,000 partitions:
requests, and processor time of the same processes; then those of one epoch of ten events.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from feedapi_client.testing import Publisher
from tests.benchmarks.consume_loops import batches_json, batches_untouched, events_json
from tests.benchmarks.static_feed import static_feed

EPOCH = 100_000


@dataclass
class Measured:
    """What one query did, without its first batches, in which the JVM compiles."""

    events: int
    wall: float
    processor: float
    batch_seconds: list[float]
    worker_mib: float


def descendants(root: int) -> list[int]:
    """The process and all processes below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def jvm() -> int:
    """The JVM that PySpark started."""
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if "org.apache.spark.deploy" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise RuntimeError("no JVM below this process")


def processor_seconds(pids: list[int]) -> float:
    """Processor time of the processes, and of those of their children that have ended."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def worker_mib(pids: list[int]) -> float:
    """Peak memory of the largest Python worker."""
    largest = 0.0
    for pid in pids:
        with suppress(OSError):
            if "pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_text():
                status = Path(f"/proc/{pid}/status").read_text()
                largest = max(largest, int(status.partition("VmHWM:")[2].split()[0]) / 1024)
    return largest


def stream(spark: Any, url: str, limit: int, skip: int) -> Measured:
    """Run one query to the end of the feed, without counting the first `skip` batches."""
    root = jvm()
    marks: list[tuple[float, float]] = []
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        source = (
            spark.readStream.format("feedapi")
            .options(url=url, stagingLocation=f"{folder}/staging", maxEventsPerPartition=limit)
            .load()
        )
        query = (
            source.writeStream.format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        done = threading.Event()

        def watch() -> None:
            nonlocal largest
            commits = Path(folder, "checkpoint", "commits")
            seen = 0
            while not done.is_set():
                now = (
                    len([file for file in commits.glob("*") if file.name.isdigit()])
                    if commits.exists()
                    else 0
                )
                if now != seen:
                    pids = descendants(root)
                    marks.extend([(time.perf_counter(), processor_seconds(pids))] * (now - seen))
                    largest = max(largest, worker_mib(pids))
                    seen = now
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        query.awaitTermination()
        done.set()
        watcher.join()
        progress = [entry for entry in query.recentProgress if entry["numInputRows"]]
    first, last = marks[skip - 1], marks[-1]
    counted = progress[skip:]
    return Measured(
        sum(entry["numInputRows"] for entry in counted),
        last[0] - first[0],
        last[1] - first[1],
        [entry["durationMs"]["triggerExecution"] / 1000 for entry in counted],
        largest,
    )


def own_micro_batch(spark: Any, batches: int = 60, skip: int = 20) -> Measured:
    """Measure what Spark alone takes for a micro-batch: time, and processor time."""
    root = jvm()
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
            marks.append(
                (
                    time.perf_counter(),
                    processor_seconds(descendants(root)),
                    query.lastProgress["batchId"],
                )
            )
        query.stop()
    (began, used, first), (ended, used_then, last) = marks
    return Measured(
        100, (ended - began) / (last - first), (used_then - used) / (last - first), [], 0
    )


@dataclass
class Idle:
    """What a query cost while nothing was published, and then for one small epoch."""

    seconds: float
    requests: int
    processor: float
    epoch_requests: int
    epoch_processor: float


def idle(spark: Any, partitions: int, seconds: float) -> Idle:
    """Run a query to the end of a feed, and watch it there."""
    publisher = Publisher(partitions=partitions)
    for partition in range(partitions):
        publisher.append(partition, {"n": 0})
    root = jvm()
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
        commits = Path(folder, "checkpoint", "commits")

        def epochs() -> int:
            files = commits.glob("*") if commits.exists() else ()
            return len([file for file in files if file.name.isdigit()])

        def read() -> int:
            return sum(entry["numInputRows"] for entry in query.recentProgress)

        while read() < partitions:
            time.sleep(0.1)
        while publisher.counters["fetch"] < 3 * partitions:  # each one was asked at its end
            time.sleep(0.1)
        time.sleep(1.0)
        publisher.clear_requests()
        began, used = time.perf_counter(), processor_seconds(descendants(root))
        time.sleep(seconds)
        requests = publisher.counters["fetch"]
        processor = processor_seconds(descendants(root)) - used
        watched = time.perf_counter() - began
        before = epochs()
        publisher.clear_requests()
        used = processor_seconds(descendants(root))
        publisher.extend(0, [{"n": n} for n in range(1, 11)])
        while epochs() == before:
            time.sleep(0.01)
        found = Idle(
            watched,
            requests,
            processor,
            publisher.counters["fetch"],
            processor_seconds(descendants(root)) - used,
        )
        query.stop()
    return found


def idle_table(spark: Any, sizes: list[int], seconds: float) -> Table:
    """Measure each size, and return the table."""
    table = Table(title="An idle feed: requests and processor time")
    for column in ("partitions", "requests/s", "cores busy", "requests for 10 events", "CPU s"):
        table.add_column(column, justify="right")
    for size in sizes:
        one = idle(spark, size, seconds)
        table.add_row(
            f"{size:,}",
            f"{one.requests / one.seconds:,.1f}",
            f"{one.processor / one.seconds:.3f}",
            f"{one.epoch_requests:,}",
            f"{one.epoch_processor:.2f}",
        )
    return table


def session() -> Any:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from feedapi_client.spark import FeedDataSource

    builder: Any = SparkSession.builder
    spark = (
        builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.streaming.numRecentProgressUpdates", "1000")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(FeedDataSource)
    return spark


def plain(loop: Any, url: str) -> float:
    began = time.process_time()
    count = asyncio.run(loop(url))
    return count / (time.process_time() - began)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--epochs", type=int, default=20, help=f"measured epochs of {EPOCH} events (default 20)"
    )
    arguments.add_argument("--idle", action="store_true", help="only the cost of an idle feed")
    arguments.add_argument(
        "--idle-seconds", type=float, default=60.0, help="how long to watch each (default 60)"
    )
    arguments.add_argument(
        "--idle-partitions",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1, 100, 1000, 10_000],
        help="numbers of partitions (default 1,100,1000,10000)",
    )
    given = arguments.parse_args()
    console = Console()
    warm = 20
    spark = session()
    if given.idle:
        console.print(idle_table(spark, given.idle_partitions, given.idle_seconds))
        spark.stop()
        return
    with static_feed(events=EPOCH * (given.epochs + warm), page_size=10_000) as url:
        loops = {
            "async for, each .json()": events_json,
            "batches(), each .json()": batches_json,
            "batches(), untouched": batches_untouched,
        }
        plains = {
            name: statistics.median(plain(loop, url) for _ in range(3))
            for name, loop in loops.items()
        }
        run = stream(spark, url, EPOCH, warm)
    per_core = run.events / run.processor
    table = Table(title=f"Spark streaming, epochs of {EPOCH:,} events of 150 bytes")
    for column in ("measure", "events/s of a core", "Spark / this"):
        table.add_column(column, justify="right" if column != "measure" else "left")
    table.add_row("Spark, per second of processor time", f"{per_core:,.0f}", "")
    for name, rate in plains.items():
        table.add_row(f"plain loop: {name}", f"{rate:,.0f}", f"{per_core / rate:.2f}")
    console.print(table)
    console.print(
        f"Spark, wall clock, one task slot: {run.events / run.wall:,.0f} events/s; "
        f"{run.processor / run.wall:.2f} cores busy"
    )
    with static_feed(events=100 * 60, page_size=100) as url:
        small = stream(spark, url, 100, 20)
    console.print(
        f"a micro-batch of 100 events: {statistics.median(small.batch_seconds):.3f} s, "
        f"{small.processor / len(small.batch_seconds):.3f} s of processor time"
    )
    own = own_micro_batch(spark)
    console.print(
        f"a micro-batch of 100 rows of Spark's own rate source, no Python: {own.wall:.3f} s, "
        f"{own.processor:.3f} s of processor time"
    )
    with static_feed(events=12_000_000, page_size=20_000) as url:
        large = stream(spark, url, 10 * EPOCH, 4)
    per_core = large.events / large.processor
    console.print(
        f"epochs of {10 * EPOCH:,} events: {per_core:,.0f} events/s of a core, "
        f"{per_core / plains['async for, each .json()']:.2f} of async for"
    )
    for size in (100_000, 1_000_000, 3_000_000):
        with static_feed(events=size, page_size=10_000) as url:
            memory = peak(spark, url, size)
        console.print(
            f"Python worker, an epoch of {size:,} events ({size * 150 / 1e6:,.0f} MB): "
            f"{memory:,.0f} MiB at its peak"
        )
    spark.stop()


def peak(spark: Any, url: str, limit: int) -> float:
    """Measure the peak memory of a Python worker over one epoch."""
    largest = 0.0
    done = threading.Event()
    root = jvm()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.1):
            largest = max(largest, worker_mib(descendants(root)))

    watcher = threading.Thread(target=watch)
    with tempfile.TemporaryDirectory() as folder:
        source = (
            spark.readStream.format("feedapi")
            .options(url=url, stagingLocation=f"{folder}/staging", maxEventsPerPartition=limit)
            .load()
        )
        query = (
            source.writeStream.format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        watcher.start()
        query.awaitTermination()
        done.set()
        watcher.join()
    return largest


if __name__ == "__main__":
    main()
