"""A loop of `consume_loops` in a process of its own, with any version of the library."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.consume_loops import LOOPS, OTHERS

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "benchmarks" / "consume_loops.py"


class Speed(NamedTuple):
    """Events per second of wall time, and of processor time."""

    wall: float
    processor: float


def speed(version: Path, loop: str, url: str) -> Speed:
    """Run one loop with the library of a checkout."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), loop, url],
        env={**os.environ, "PYTHONPATH": str(version)},
        cwd=version,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{loop} failed with the library in {version}:\n{done.stderr}")
    wall, processor = map(float, done.stdout.split())
    return Speed(wall, processor)


def speed_here(loop: str, url: str) -> Speed:
    """Run one loop in this process. That starts quickly, and its figures say less."""
    wall, processor = time.perf_counter(), time.process_time()
    count = asyncio.run((LOOPS | OTHERS)[loop](url))
    return Speed(
        count / (time.perf_counter() - wall), count / max(time.process_time() - processor, 1e-9)
    )
