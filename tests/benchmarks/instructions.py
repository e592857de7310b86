"""Count what telemetry and monitor cost: ``python -m tests.benchmarks.instructions``.

Valgrind's callgrind counts the instructions of a loop of `consume_loops` for a feed of two sizes.
The difference is the cost of events, without that of the start. It does not depend on what else
the machine does. It takes some minutes.

What is done once a second (an export) is left out: under valgrind a program does fifty times less
in a second. What a monitor does in a second, for a page that is open and for Prometheus, is counted
for each answer, and then added for a consumer that reads `--rate` events a second.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from tests.benchmarks.consume_loops import ASKED_EVERY
from tests.benchmarks.processes import PROGRAM, ROOT
from tests.benchmarks.static_feed import static_feed

LOOPS = (
    "batches_raw",
    "batches_raw_observed",
    "batches_raw_traced",
    "batches_raw_monitored",
    "batches_raw_status",
    "batches_raw_scraped",
    "run_raw",
    "run_raw_observed",
    "run_raw_monitored",
)
BARE = ("batches_raw", "run_raw")
"""What the loops whose names begin like them are compared with."""
ANSWERS = {"batches_raw_status": ("the page", 2), "batches_raw_scraped": ("Prometheus", 15)}
"""Who asks, in these loops, and how many seconds apart when nothing else is configured."""
IDLE = "batches_raw_monitored"


def instructions(loop: str, *, events: int, page_size: int, time_scale: float = 1) -> int:
    """Return the instructions of a whole process, start and end included."""
    with static_feed(dialect="v2-token", events=events, page_size=page_size) as url:
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        done = subprocess.run(
            [*command, sys.executable, str(PROGRAM), loop, url],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONHASHSEED": "0",
                "PYTHONMALLOC": "pymalloc",
                "EXPORT_SECONDS": "1e6",
                "TIME_SCALE": str(time_scale),
            },
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def report(found: dict[str, float], rate: float) -> list[str]:
    """Return a line for each loop, and one for a monitor that is watched.

    Arguments:
        found: the instructions of an event, by loop.
        rate: events a second, at which what is done in a second is divided among events.
    """
    lines = []
    for loop, each in found.items():
        bare = next((found[name] for name in BARE if loop.startswith(name) and name in found), None)
        beside = "" if bare is None or loop in (*BARE, *ANSWERS) else f", {each / bare - 1:+.1%}"
        lines.append(f"{loop}: {each:.0f} instructions an event{beside}")
        if loop in ANSWERS and IDLE in found:
            lines[-1] += f", {ASKED_EVERY * (each - found[IDLE]) / 1e6:.1f} M an answer"
    if {"batches_raw", IDLE, *ANSWERS} <= found.keys():
        watched = found[IDLE]
        for loop, (_, seconds) in ANSWERS.items():
            watched += ASKED_EVERY * (found[loop] - found[IDLE]) / (seconds * rate)
        asked = " and ".join(f"{who} every {seconds} s" for who, seconds in ANSWERS.values())
        more = watched / found["batches_raw"] - 1
        lines.append(
            f"monitor asked by {asked}, at {rate:.0f} events/s: "
            f"{watched:.0f} instructions an event, {more:+.1%}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=60_000, help="of the larger feed")
    parser.add_argument("--page-size", type=int, default=20_000)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS))
    parser.add_argument("--rate", type=float, default=660_000, help="events/s of batches_raw")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1,
        help="50 makes batches as large as they are without valgrind",
    )
    options = parser.parse_args()
    feed = {"page_size": options.page_size, "time_scale": options.time_scale}
    small = options.events // 3
    found: dict[str, float] = {}
    for loop in options.loops:
        sizes = (options.events, small)
        many, few = (instructions(loop, events=n, **feed) for n in sizes)
        found[loop] = (many - few) / (options.events - small)
        print(loop, f"{found[loop]:.0f}", file=sys.stderr, flush=True)
    print(*report(found, options.rate), sep="\n")


if __name__ == "__main__":
    main()
