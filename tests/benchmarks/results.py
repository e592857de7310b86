"""What benchmarks find: two rates side by side, as a table, as JSON and as a chart."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import track
from rich.table import Table

Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two measures, taken in turns on one machine.

    Attributes:
        name: ours and theirs, divided by a slash.
        unit: of both measures.
        ours, theirs: a measure for each round.
        bar: the ratio that is aimed at; None without one.
        less_is_better: whether a lower ratio is better, as of seconds.
    """

    name: str
    unit: str
    ours: list[float]
    theirs: list[float]
    bar: float | None = None
    less_is_better: bool = False

    @property
    def ratio(self) -> float:
        """The ratio of the medians."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest ratio of a round."""
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        return min(ratios), max(ratios)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar."""
        if self.bar is None:
            return None
        return self.ratio <= self.bar if self.less_is_better else self.ratio >= self.bar


def in_turns(
    ours: Callable[[], Ours], theirs: Callable[[], Theirs], *, rounds: int, title: str
) -> list[tuple[Ours, Theirs]]:
    """Measure both in each round, in changing order: who comes second may find a warmer machine."""
    pairs = []
    for number in track(range(rounds), description=title, transient=True):
        if number % 2:
            first = ours()
            pairs.append((first, theirs()))
        else:
            other = theirs()
            pairs.append((ours(), other))
    return pairs


def table(results: Sequence[Comparison]) -> Table:
    """Return the results as a table, with what misses its bar in red."""
    made = Table("measure", "unit", "ours", "theirs", "ratio", "spread", "bar")
    for result in results:
        sign = "<=" if result.less_is_better else ">="
        ratio = f"{result.ratio:.2f}"
        low, high = result.spread
        made.add_row(
            result.name,
            result.unit,
            f"{statistics.median(result.ours):.3g}",
            f"{statistics.median(result.theirs):.3g}",
            f"[red]{ratio}[/]" if result.met is False else ratio,
            f"{low:.2f} to {high:.2f}",
            "" if result.bar is None else f"{sign} {result.bar}",
        )
    return made


def machine() -> dict[str, Any]:
    """Describe the machine, for people who compare figures."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def write_json(results: Sequence[Comparison], path: Path) -> None:
    """Write the results with every round, the time and the machine."""
    found = [
        asdict(result) | {"ratio": result.ratio, "spread": result.spread, "met": result.met}
        for result in results
    ]
    document = {"time": datetime.now(UTC).isoformat(), "machine": machine(), "results": found}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
