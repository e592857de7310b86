"""Another version of the library beside this one, on the same feed."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.consume_loops import LOOPS, NEWER
from tests.benchmarks.processes import ROOT, speed
from tests.benchmarks.results import in_turns
from tests.benchmarks.static_feed import static_feed


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check a revision out into a folder of its own, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="feedapi-client-") as folder:
        path = Path(folder) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), revision], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compare(revision: str, *, events: int, page_size: int, rounds: int) -> Table:
    """Time each loop that both versions can run, in turns, and return the medians' ratios."""
    table = Table(f"this version / {revision}", "M events/s", "before", "ratio", "processor time")
    with checkout(revision) as before:
        has_monitor = (before / "feedapi_client" / "monitor").exists()
        for loop in LOOPS if has_monitor else [loop for loop in LOOPS if loop not in NEWER]:
            dialect = "v1" if loop.startswith("v1") else "v2-token"
            with static_feed(dialect=dialect, events=events, page_size=page_size) as url:
                pairs = in_turns(
                    partial(speed, ROOT, loop, url),
                    partial(speed, before, loop, url),
                    rounds=rounds,
                    title=loop,
                )
            now, then = zip(*pairs, strict=True)
            wall = [statistics.median(one.wall for one in each) for each in (now, then)]
            processor = [statistics.median(one.processor for one in each) for each in (now, then)]
            table.add_row(
                loop,
                f"{wall[0] / 1e6:.3f}",
                f"{wall[1] / 1e6:.3f}",
                f"{wall[0] / wall[1]:.3f}",
                f"{processor[0] / processor[1]:.3f}",
            )
    return table


def main(revision: str, *, events: int, page_size: int, rounds: int) -> None:
    """Print the comparison."""
    Console().print(compare(revision, events=events, page_size=page_size, rounds=rounds))
