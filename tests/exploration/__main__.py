"""``python -m tests.exploration``: explore all states of small feeds."""

from __future__ import annotations

import argparse
import sys

from tests.exploration.explore import Exploration
from tests.exploration.feeds import FEEDS
from tests.exploration.world import FAULTS, begin


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if something is violated, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.exploration", description=__doc__)
    parser.add_argument("--feed", help="only those with this in their name")
    parser.add_argument("--instances", type=int, choices=(1, 2), default=2)
    parser.add_argument("--faults", default=",".join(FAULTS), help="which may happen")
    parser.add_argument("--most", type=int, default=1, help="how many in one history")
    parser.add_argument(
        "--states", type=int, default=10**9, help="end after so many, for each feed"
    )
    parser.add_argument("--fine", action="store_true", help="each step of a look is a move")
    options = parser.parse_args(arguments)
    failed, total = 0, 0
    for feed in FEEDS:
        if options.feed and options.feed not in feed.name:
            continue
        faults = tuple(options.faults.split(","))
        world = begin(
            feed, instances=options.instances, faults=faults, left=options.most, fine=options.fine
        )
        found = Exploration(world, most=options.states).run()
        total += found.states
        failed += found.violation is not None
        print(f"{feed.name}: {found}", flush=True)
    print(f"{total} states, {failed} feeds with a violation")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
