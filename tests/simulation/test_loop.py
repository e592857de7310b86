"""Virtual time: it jumps, and says so when nothing can go on."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from tests.simulation.clock import run_in_virtual_time
from tests.simulation.loop import StuckError, UnhandledError


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_day_passes_at_once(backend: Any) -> None:
    async def main() -> float:
        began = anyio.current_time()
        await anyio.sleep(86_400.0)
        return anyio.current_time() - began

    assert run_in_virtual_time(main, backend=backend, seed="a") == pytest.approx(86_400.0)


def test_the_seed_decides_in_which_order_tasks_run() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def step(number: int) -> None:
            await anyio.sleep(1.0)
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(step, number)
        return order

    runs = [run_in_virtual_time(main, backend="asyncio", seed=f"{n}") for n in range(5)]
    again = [run_in_virtual_time(main, backend="asyncio", seed=f"{n}") for n in range(5)]
    assert runs == again
    assert len({tuple(order) for order in runs}) > 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_that_waits_for_ever_is_stuck(backend: Any) -> None:
    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(StuckError, match="every task waits"):
        run_in_virtual_time(main, backend=backend, seed="a")


def test_timers_that_are_due_at_the_same_time_run_in_an_order_of_the_seed() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(6):
            asyncio.get_running_loop().call_later(1.0, order.append, number)
        await anyio.sleep(2.0)
        return order

    runs = [run_in_virtual_time(main, backend="asyncio", seed=f"{n}") for n in range(5)]
    assert len({tuple(order) for order in runs}) > 1


def test_callbacks_run_in_the_order_in_which_they_were_scheduled() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        handles = [
            asyncio.get_running_loop().call_soon(order.append, number) for number in range(6)
        ]
        handles[2].cancel()
        await anyio.sleep(1.0)
        return order

    assert run_in_virtual_time(main, backend="asyncio", seed="a") == [0, 1, 3, 4, 5]


def test_a_task_that_fails_without_anybody_being_told_is_an_error() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError("nobody reads this")

        task = asyncio.ensure_future(fails())
        await anyio.sleep(1.0)
        del task

    with pytest.raises(UnhandledError, match="nobody reads this"):
        run_in_virtual_time(main, backend="asyncio", seed="a")


def test_a_busy_loop_is_stuck() -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(StuckError, match="time stands still"):
        run_in_virtual_time(main, backend="asyncio", seed="a")
