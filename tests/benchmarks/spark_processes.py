"""A Spark session for benchmarks, and what its processes cost: the JVM and all below it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def session() -> Any:
    """Return a session with one task slot, which knows the source."""
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


def processes() -> list[int]:
    """The JVM that PySpark started, first, and all processes below it."""
    for pid in _descendants(os.getpid()):
        if "org.apache.spark.deploy" in _command_line(pid):
            return _descendants(pid)
    raise RuntimeError("no JVM below this process")


def processor_seconds() -> float:
    """Processor time of the processes, and of those of their children that have ended."""
    total = 0
    for pid in processes():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """The most memory that processes have had, in MiB.

    Attributes:
        worker: the largest Python worker.
        jvm: the JVM, whose heap may grow to 1 GiB.
    """

    def __init__(self) -> None:
        self.worker = 0.0
        self.jvm = 0.0

    def look(self) -> None:
        """Take what the processes have had so far."""
        root, *below = processes()
        self.jvm = max(self.jvm, _peak_mib(root))
        workers = [_peak_mib(pid) for pid in below if "pyspark.daemon" in _command_line(pid)]
        self.worker = max(self.worker, *workers, 0.0)


@contextmanager
def watched(look: Callable[[], object], *, seconds: float) -> Iterator[None]:
    """Call `look` again and again, in a thread, while the block runs, and once at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(seconds):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    look()


def committed_epochs(checkpoint: Path) -> int:
    """The number of epochs that a query has committed."""
    commits = checkpoint / "commits"
    return sum(file.name.isdigit() for file in commits.glob("*")) if commits.exists() else 0


def _descendants(root: int) -> list[int]:
    """The process and all processes below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _peak_mib(pid: int) -> float:
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return 0.0
