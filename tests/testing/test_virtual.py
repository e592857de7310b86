"""The virtual time of `simulate`: it jumps, a seed decides the order, and nothing hangs."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from feedapi_client.testing.simulator.virtual import StuckError, run_in_virtual_time
from tests.simulation.backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_day_passes_at_once(backend: Any) -> None:
    async def main() -> float:
        began = anyio.current_time()
        await anyio.sleep(86_400.0)
        return anyio.current_time() - began

    assert run_in_virtual_time(main, backend=backend, seed="a") == pytest.approx(86_400.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides_the_order_of_tasks_and_what_is_drawn(backend: Any) -> None:
    async def main() -> tuple[list[int], float, int]:
        order: list[int] = []

        async def step(number: int) -> None:
            await anyio.sleep(1.0)
            await anyio.to_thread.run_sync(order.append, number)
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(step, number)
        return order, random.random(), secrets.randbits(60)

    runs = [run_in_virtual_time(main, backend=backend, seed=f"{n}") for n in range(5)]
    again = [run_in_virtual_time(main, backend=backend, seed=f"{n}") for n in range(5)]
    assert runs == again
    for different in zip(*runs, strict=True):
        assert len({str(one) for one in different}) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_waits_for_ever_is_stuck(backend: Any) -> None:
    with pytest.raises(StuckError, match="every task waits"):
        run_in_virtual_time(anyio.Event().wait, backend=backend, seed="a")


def test_a_busy_loop_is_stuck() -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(StuckError, match="a busy loop"):
        run_in_virtual_time(main, backend="asyncio", seed="a")


def test_asyncio_calls_functions_for_an_executor_in_virtual_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 / 0)
        return loop.time()

    assert 0.0 < run_in_virtual_time(main, backend="asyncio", seed="a") < 0.1
