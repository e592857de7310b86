"""Count what telemetry and monitor cost: ``python -m tests.benchmarks.instructions``.

Valgrind's callgrind counts the instructions of a loop of `consume_loops` for a feed of two sizes.
The difference is the cost of events, without that of the start. It does not depend on what else
the machine does. It takes some minutes. What is done once a second (an export) is left out: under
valgrind a program does fifty times less in a second.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from tests.benchmarks.processes import PROGRAM, ROOT
from tests.benchmarks.static_feed import static_feed

LOOPS = ("batches_raw", "batches_raw_observed", "batches_raw_monitored")


def instructions(loop: str, *, events: int, page_size: int) -> int:
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
            },
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=60_000, help="of the larger feed")
    parser.add_argument("--page-size", type=int, default=20_000)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS))
    options = parser.parse_args()
    small = options.events // 3
    bare = 0.0
    for loop in options.loops:
        sizes = (options.events, small)
        many, few = (instructions(loop, events=n, page_size=options.page_size) for n in sizes)
        each = (many - few) / (options.events - small)
        bare = bare or each
        print(f"{loop}: {each:.0f} instructions an event, {each / bare - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
