"""Clients of other languages on the same feed: ``python -m tests.benchmarks.bench_clients``.

Their adapters are the folders of ``tests/benchmarks/clients``; its README says how to add one.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

from rich.console import Console

from tests.benchmarks.results import Comparison, in_turns, table
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

FOLDER = Path(__file__).parent / "clients"


def adapters() -> list[str]:
    """Return the names of all adapters."""
    return sorted(path.parent.name for path in FOLDER.glob("*/command"))


def built(name: str) -> list[str] | None:
    """Build an adapter. Return its command; None when what it needs is not installed."""
    folder = FOLDER / name
    build, command = folder / "build", shlex.split((folder / "command").read_text())
    if build.exists():
        words = shlex.split(build.read_text())
        if shutil.which(words[0]) is None:
            return None
        subprocess.run(words, cwd=folder, check=True)
    program = folder / command[0] if command[0].startswith("./") else command[0]
    return command if shutil.which(program) else None


def rate(name: str, command: list[str], url: str, dialect: str, events: int) -> float:
    """Return events per second of a client, by its own clock."""
    done = subprocess.run(
        [*command, url, dialect], cwd=FOLDER / name, check=True, capture_output=True, text=True
    )
    count, seconds = done.stdout.split()
    if int(count) != events:
        raise RuntimeError(f"{name} read {count} of {events} events")
    return events / float(seconds)


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare `batches()` with each `.json()` with every adapter, or those that need no build."""
    names = [
        name for name in adapters() if not (sizes.quick and (FOLDER / name / "build").exists())
    ]
    return compare(sizes, names, events=sizes.pick(600_000, 500))


def compare(
    sizes: Sizes, names: list[str], *, events: int, dialect: str = "v2-token"
) -> list[Comparison]:
    """Compare with some adapters, in events per second."""
    results = []
    loop = "v1_json" if dialect == "v1" else "batches_json"
    with static_feed(dialect=dialect, events=events, in_thread=sizes.quick) as url:
        for name in names:
            command = built(name)
            if command is None:
                print(f"The adapter {name} is left out: what it needs is not installed")
                continue
            pairs = in_turns(
                sizes.speed_of(loop, url),
                partial(rate, name, command, url, dialect, events),
                rounds=sizes.rounds,
                title=name,
            )
            results.append(
                Comparison(
                    name=f"batches(), each .json() / {name}",
                    unit="M events/s",
                    ours=[mine.wall / 1e6 for mine, _ in pairs],
                    theirs=[other / 1e6 for _, other in pairs],
                )
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=adapters())
    parser.add_argument("--events", type=int, default=600_000)
    parser.add_argument("--dialect", choices=("v1", "v2-token"), default="v2-token")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = Sizes(options.rounds, quick=False, folder=Path())
    names = options.only or adapters()
    Console().print(table(compare(sizes, names, events=options.events, dialect=options.dialect)))


if __name__ == "__main__":
    main()
