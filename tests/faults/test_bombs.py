"""R16: no response is inflated beyond the limit of what it is for. Measured in processes."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

from tests.faults.bombs import BOMBS, DRIVERS, MAX_GROWTH
from tests.faults.feed import FaultyFeed, Operation
from tests.faults.server import RawServer

_SAFETY_LIMIT = 100.0


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
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.bombs", driver, *arguments],
        capture_output=True,
        timeout=_SAFETY_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    results = [orjson.loads(line) for line in done.stdout.splitlines()]
    for (bomb, operation), result in zip(cells, results, strict=True):
        one_call = not driver.startswith("consumer")
        expected = bomb.outcomes.call if one_call else bomb.outcomes.of(operation)
        assert result["outcome"] == expected, f"{bomb.name}, {operation}: {result}"
        assert result["growth"] <= MAX_GROWTH, f"{bomb.name}, {operation}: {result}"
