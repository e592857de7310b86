"""The measures of `tests.benchmarks.bench_sharing` run, with processes. No time is checked."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_sharing import orphans, rate

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_partitions_of_a_killed_process_are_read_again() -> None:
    outcome = await orphans(count=2, partitions=4, lease=1.0, kills=1)
    assert len(outcome.times) == 2
    assert outcome.widest <= 1


async def test_the_rate_of_two_processes_is_measured() -> None:
    assert await rate(2, partitions=4, events=200, burn=0.0) > 0
