"""R14, R16: no response costs more memory than its limit, measured in processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import orjson
import pytest

from tests.faults.bombs import BOMBS, DRIVERS, MAX_GROWTH
from tests.faults.feed import FaultyFeed, Operation
from tests.faults.matrix import FAULTS
from tests.faults.outcomes import Fault
from tests.faults.responses import whole
from tests.faults.server import RawServer, Repeat

_SAFETY_LIMIT = 100.0


def _repeats(fault: Fault) -> bool:
    return any(isinstance(step, Repeat) for step in fault.spoil(b"{}"))


def _measure(driver: str, *cells: str) -> list[dict[str, Any]]:
    """Run a driver in a process of its own; `cells` are pairs of a URL and an operation."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.bombs", driver, *cells],
        capture_output=True,
        timeout=_SAFETY_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [orjson.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_r16_a_bomb_is_an_error_of_ours_and_costs_no_memory(server: RawServer, driver: str) -> None:
    operations: tuple[Operation, ...] = ("fetch", "last")
    if driver.startswith("consumer"):
        operations = ("entry", *operations)
    cells = [(bomb, operation) for bomb in BOMBS for operation in operations]
    for bomb in BOMBS:
        bomb.spoil(b"")  # to make it takes longer than a request may take
    healthy = server.add(FaultyFeed("fetch", BOMBS[0].spoil, 0).reply)
    arguments = [healthy.url, "fetch"]
    for bomb, operation in cells:
        arguments += [server.add(FaultyFeed(operation, bomb.spoil, None).reply).url, operation]
    results = _measure(driver, *arguments)
    for (bomb, operation), result in zip(cells, results, strict=True):
        one_call = not driver.startswith("consumer")
        expected = bomb.outcomes.call if one_call else bomb.outcomes.of(operation)
        assert result["outcome"] == expected, f"{bomb.name}, {operation}: {result}"
        assert result["growth"] <= MAX_GROWTH, f"{bomb.name}, {operation}: {result}"


FLOODS = [fault for fault in FAULTS if fault.group in ("timing", "framing") and _repeats(fault)]


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_r14_a_flood_ends_and_costs_no_memory(server: RawServer, driver: str) -> None:
    healthy = server.add(FaultyFeed("fetch", whole, 0).reply)
    arguments = [healthy.url, "fetch"]
    for flood in FLOODS:
        arguments += [server.add(FaultyFeed("fetch", flood.spoil, None).reply).url, "fetch"]
    results = _measure(driver, *arguments)
    for flood, result in zip(FLOODS, results, strict=True):
        assert result["outcome"] in ("FeedUnavailableError", "TornResponseError"), flood.name
        assert result["growth"] <= MAX_GROWTH, f"{flood.name}: {result}"
