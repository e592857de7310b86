"""The consumer beside bare loops: ``python -m tests.benchmarks.bench_consume``.

Each loop runs in a process of its own, as a program would. Rounds alternate between two loops: a
machine whose speed drifts favours neither. The ratio is that of the medians, its spread the lowest
and the highest of the rounds. With ``--against REVISION`` the library of that revision takes the
place of the bare loops.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks import against
from tests.benchmarks.results import Comparison, in_turns, table
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

RAW = ("batches(), each .raw taken", "batches_raw", "bare_raw")
JSON = ("batches(), each .json()", "batches_json", "bare_json")
EACH = ("async for, each .json()", "events_json", "bare_json")
OTHERS = (
    ("batches(), payloads untouched", "batches_untouched", "bare_lines", None),
    ("SyncFeedConsumer, batches(), each .json()", "sync_batches_json", "batches_json", 0.8),
    ("SyncFeedConsumer, for, each .json()", "sync_events_json", "events_json", 0.8),
    ("batches(), .raw, with observe()", "batches_raw_observed", "batches_raw", 0.97),
    ("v1, decoded", "v1_json", "zeroeventhub", 5.0),
)
THEIRS = {
    "bare_lines": "httpx + decode_lines, streaming",
    "bare_raw": "httpx + decode_lines + bytes, streaming",
    "bare_json": "httpx + orjson.loads, streaming",
    "batches_raw": "without observe()",
    "batches_json": "with async",
    "events_json": "with async",
    "zeroeventhub": "zeroeventhub from PyPI",
}


@dataclass(frozen=True)
class Shape:
    """How a feed is cut into responses, and the bars for each `.raw`, `.json()` and event."""

    name: str
    bars: tuple[float, float, float]
    page_size: int | None = None
    """Events in a response; None for one response of all."""
    chunk: int | None = None
    share: float = 1.0
    """Of the events: the bare loop takes long for many responses."""


SHAPES = (
    Shape("one response", (0.9, 0.95, 0.84)),
    Shape("pages of 1,000", (1.25, 1.15, 1.0), page_size=1000),
    Shape("pages of 50", (1.4, 1.3, 1.2), page_size=50, share=0.2),
    Shape("one response in chunks of 4 KiB", (1.3, 1.2, 1.0), chunk=4096),
)


def measure(sizes: Sizes) -> list[Comparison]:
    """Time each way to consume, in events per second, beside a bare loop that streams."""
    events = sizes.pick(600_000, 2000)
    results = []
    for shape, tls in product(SHAPES, (False, True)):
        count = int(events * shape.share)
        feed = {"events": count, "page_size": shape.page_size or count, "chunk": shape.chunk}
        bars = (None, None, None) if tls else shape.bars
        rows = [(*row, bar) for row, bar in zip((RAW, JSON, EACH), bars, strict=True)]
        name = f"{shape.name}{', TLS' if tls else ''}"
        results += compare(sizes, rows, name, tls=tls, **feed)
    return results + compare(sizes, OTHERS, "pages of 1,000", events=events, page_size=1000)


def compare(
    sizes: Sizes, rows: Sequence[tuple[str, str, str, float | None]], shape: str, **feed: Any
) -> list[Comparison]:
    """Time loops in turns, on a feed as `static_feed` takes it."""
    results = []
    for name, ours, theirs, bar in rows:
        if theirs == "zeroeventhub" and not find_spec("zeroeventhub"):
            print("For zeroeventhub: pip install fastapi && pip install --no-deps zeroeventhub")
            continue
        dialect = "v1" if theirs == "zeroeventhub" else "v2-token"
        with static_feed(dialect=dialect, in_thread=sizes.quick, **feed) as url:
            pairs = in_turns(
                sizes.speed_of(ours, url),
                sizes.speed_of(theirs, url),
                rounds=sizes.rounds,
                title=name,
            )
        results.append(
            Comparison(
                name=f"{name} / {THEIRS[theirs]}, {shape}",
                unit="M events/s",
                ours=[each.wall / 1e6 for each, _ in pairs],
                theirs=[each.wall / 1e6 for _, each in pairs],
                bar=bar,
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="REVISION", help="compare with another version")
    options = parser.parse_args()
    feed = {"events": options.events, "page_size": options.page_size}
    if options.against:
        against.main(options.against, rounds=options.rounds, **feed)
    else:
        sizes = Sizes(options.rounds, quick=False, folder=Path())
        rows = [(*row, None) for row in (RAW, JSON, EACH)] + [*OTHERS]
        Console().print(table(compare(sizes, rows, f"pages of {options.page_size:,}", **feed)))


if __name__ == "__main__":
    main()
