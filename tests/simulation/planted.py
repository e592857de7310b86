"""Bugs that are planted to see whether the simulator finds them: how they are planted and found.

The bugs themselves are in `planted_planner`, `planted_runtime` and `planted_stores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.__main__ import replay_command
from tests.simulation.scenario import generate
from tests.simulation.simulation import run

Plant = Callable[[pytest.MonkeyPatch], None]


def found_by(seeds: range, backend: Any = "asyncio") -> tuple[int, str] | None:
    """The first seed that fails, and the rule that it violates."""
    for seed in seeds:
        outcome = run(generate(seed, backend))
        if outcome.failure is not None:
            return seed, outcome.failure
    return None


def command(seed: int, backend: str) -> str:
    """The command that repeats a seed."""
    return replay_command(seed, backend)
