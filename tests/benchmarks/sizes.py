"""How much is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.processes import ROOT, Speed, speed, speed_here


@dataclass(frozen=True)
class Sizes:
    """What the parts of ``python -m tests.benchmarks`` are told.

    Attributes:
        rounds: how often each pair is measured.
        quick: only show that it runs: small feeds, and no process for each loop.
        folder: where charts go.
        postgres: the URL of a server for SQLAlchemy with asyncpg; None to start one.
    """

    rounds: int
    quick: bool
    folder: Path
    postgres: str | None = None

    def speed_of(self, loop: str, url: str) -> Callable[[], Speed]:
        """Return what runs one of `consume_loops`."""
        return lambda: speed_here(loop, url) if self.quick else speed(ROOT, loop, url)

    def pick(self, usual: int, quick: int) -> int:
        """Return one of two numbers."""
        return quick if self.quick else usual
