"""The first discovery of many partitions that were all split by cursor, none of them stored.

``python -m tests.benchmarks.bench_planner``. For each number of partitions the milliseconds that
the planner takes: with an empty store, with a store that knows none of their ancestors, for a claim
of half of them by one of two instances, and for the next discovery. Twice as many should take twice
as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from feedapi_client import FeedInfo, Partition, Position
from feedapi_client.lineage.planner import Planner

SIZES = (4_096, 8_192, 16_384, 32_768)
BARS = (500, None, 200, None)
"""Milliseconds of processor time that are allowed for the largest number."""


def split_feed(size: int) -> FeedInfo:
    """Two successors of each partition of a generation that nobody lists any more."""
    listed = {p: Partition(p, cursor_from=(100_000 + p // 2,)) for p in range(size - 1)}
    return FeedInfo("v2-draft", {size - 1: Partition(size - 1), **listed})


def milliseconds(call: Callable[[], object]) -> float:
    """Return how much processor time a call takes."""
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1000


def measure(size: int) -> tuple[float, float, float, float]:
    """Return the times for one number of partitions."""
    info, stored = split_feed(size), {size - 1: Position("a")}
    empty, other, shared = (Planner(feed="http://feed", shared=number == 2) for number in range(3))
    empty.load({})
    first = milliseconds(lambda: empty.discover(info))
    other.load(stored)
    unknown = milliseconds(lambda: other.discover(info))
    saved = {e.id: e.position for e in empty.entries.values() if e.position}
    shared.load(saved)
    shared.discover(info)
    mine, others = range(size // 2), range(size // 2, size)
    claim = milliseconds(lambda: shared.refresh(saved, owned=mine, others=others))
    again = milliseconds(lambda: empty.discover(split_feed(size)))
    return first, unknown, claim, again


def main() -> None:
    """Print a table."""
    table = Table("partitions", "empty store", "ancestors unknown", "claim", "next discovery")
    for size in SIZES:
        best = [min(times) for times in zip(*(measure(size) for _ in range(3)), strict=True)]
        table.add_row(f"{size:,}", *(f"{ms:.0f} ms" for ms in best))
    table.add_row("bar", *("-" if bar is None else f"{bar} ms" for bar in BARS))
    Console().print(table)


if __name__ == "__main__":
    main()
