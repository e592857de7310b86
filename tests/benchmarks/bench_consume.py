"""The consumer beside a bare httpx loop, in one run: ``python -m tests.benchmarks.bench_consume``.

Rounds alternate between the two loops: a machine whose speed drifts favours neither. The ratio is
that of the medians. With ``--against REVISION`` the library of that revision takes the place of the
bare loops.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from importlib.util import find_spec

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.benchmarks import against
from tests.benchmarks.consume_loops import (
    Loop,
    bare_json,
    bare_raw,
    batches_json,
    batches_raw,
    batches_untouched,
    events_json,
    v1_json,
    zeroeventhub,
)
from tests.benchmarks.static_feed import static_feed

MEASURES: list[tuple[str, Loop, Loop, float | None]] = [
    ("batches(), payloads untouched / httpx + decode_lines", batches_untouched, bare_raw, None),
    ("batches(), each .raw taken / httpx + decode_lines", batches_raw, bare_raw, 0.8),
    ("batches(), each .json() / httpx + orjson.loads", batches_json, bare_json, 0.95),
    ("async for, each .json() / httpx + orjson.loads", events_json, bare_json, 0.8),
]


def timed(loop: Loop, url: str, events: int) -> float:
    started = time.perf_counter()
    count = asyncio.run(loop(url))
    seconds = time.perf_counter() - started
    assert count == events, (loop.__name__, count)
    return events / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="REVISION", help="compare with another version")
    options = parser.parse_args()
    if options.against:
        sizes = {"events": options.events, "page_size": options.page_size}
        against.main(options.against, rounds=options.rounds, **sizes)
    else:
        Console().print(beside_bare_loops(options))


def beside_bare_loops(options: argparse.Namespace) -> Table:
    """Time each way to consume beside a bare loop."""
    table = Table("measure", "ours, M events/s", "theirs, M events/s", "ratio", "bar")

    def measure(name: str, ours: Loop, theirs: Loop, bar: float | None, url: str) -> None:
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in track(range(options.rounds), description=name, transient=True):
            rates[0].append(timed(ours, url, options.events))
            rates[1].append(timed(theirs, url, options.events))
        us, them = (statistics.median(r) for r in rates)
        table.add_row(
            name,
            f"{us / 1e6:.3f}",
            f"{them / 1e6:.3f}",
            f"{us / them:.2f}",
            "" if bar is None else f">= {bar}",
        )

    with static_feed(events=options.events, page_size=options.page_size) as url:
        for name, ours, bare, bar in MEASURES:
            measure(name, ours, bare, bar, url)
    if find_spec("zeroeventhub"):
        with static_feed(dialect="v1", events=options.events, page_size=options.page_size) as url:
            measure("v1, decoded / zeroeventhub from PyPI", v1_json, zeroeventhub, 5, url)
    else:
        print("For zeroeventhub: pip install fastapi && pip install --no-deps zeroeventhub")
    return table


if __name__ == "__main__":
    main()
