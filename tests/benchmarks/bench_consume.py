"""The consumer beside bare loops: ``python -m tests.benchmarks.bench_consume``.

Each loop runs in a process of its own, as a program would. Rounds alternate between two loops: a
machine whose speed drifts favours neither. The ratio is that of the medians, its spread the lowest
and the highest of the rounds. With ``--against REVISION`` the library of that revision takes the
place of the bare loops.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from tests.benchmarks import against
from tests.benchmarks.results import Comparison, in_turns, table
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

MEASURES = (
    ("batches(), payloads untouched", "batches_untouched", "bare_lines", None),
    ("batches(), each .raw taken", "batches_raw", "bare_raw", 0.8),
    ("batches(), each .json()", "batches_json", "bare_json", 0.95),
    ("async for, each .json()", "events_json", "bare_json", 0.8),
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


def measure(sizes: Sizes) -> list[Comparison]:
    """Time each way to consume, in events per second, beside a bare loop."""
    events = sizes.pick(600_000, 2000)
    pages = (1000,) if sizes.quick else (1000, events)
    return [each for size in pages for each in compare(sizes, events=events, page_size=size)]


def compare(sizes: Sizes, *, events: int, page_size: int) -> list[Comparison]:
    """`measure` with a feed of any size."""
    results = []
    for name, ours, theirs, bar in MEASURES:
        if theirs == "zeroeventhub" and not find_spec("zeroeventhub"):
            print("For zeroeventhub: pip install fastapi && pip install --no-deps zeroeventhub")
            continue
        dialect = "v1" if theirs == "zeroeventhub" else "v2-token"
        with static_feed(
            dialect=dialect, events=events, page_size=page_size, in_thread=sizes.quick
        ) as url:
            pairs = in_turns(
                sizes.speed_of(ours, url),
                sizes.speed_of(theirs, url),
                rounds=sizes.rounds,
                title=name,
            )
        results.append(
            Comparison(
                name=f"{name} / {THEIRS[theirs]}, pages of {page_size:,}",
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
        Console().print(table(compare(sizes, **feed)))


if __name__ == "__main__":
    main()
