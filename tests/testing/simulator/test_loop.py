"""Virtual time: it jumps, and says so when nothing can go on."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from feedapi_client.testing.simulator.clock import run_in_virtual_time
from feedapi_client.testing.simulator.loop import StuckError


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_day_passes_at_once(backend: Any) -> None:
    async def main() -> float:
        began = anyio.current_time()
        await anyio.sleep(86_400.0)
        return anyio.current_time() - began

    assert run_in_virtual_time(main, backend=backend, seed="a") == pytest.approx(86_400.0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_seed_decides_in_which_order_tasks_run(backend: Any) -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def step(number: int) -> None:
            await anyio.sleep(1.0)
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(step, number)
        return order

    runs = [run_in_virtual_time(main, backend=backend, seed=f"{n}") for n in range(5)]
    again = [run_in_virtual_time(main, backend=backend, seed=f"{n}") for n in range(5)]
    assert runs == again
    assert len({tuple(order) for order in runs}) > 1


def test_a_program_that_waits_for_ever_is_stuck() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StuckError, match="every task waits"):
        run_in_virtual_time(main, backend="asyncio", seed="a")


def test_a_busy_loop_is_stuck() -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(StuckError, match="time stands still"):
        run_in_virtual_time(main, backend="asyncio", seed="a")
