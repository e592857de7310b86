"""Calls that are cancelled after a few steps."""

from __future__ import annotations

import asyncio
from random import Random

from tests.simulation.clock import run_in_virtual_time, sleep
from tests.simulation.random_cancellation import RandomCancellation


def test_a_call_that_ends_as_its_caller_is_cancelled_is_not_reported() -> None:
    async def ends() -> None:
        raise StopAsyncIteration

    async def main() -> None:
        for number in range(50):
            impatience = RandomCancellation(1.0, Random(number), native=True)
            caller = asyncio.ensure_future(impatience.call(ends))
            for _ in range(number % 5):
                await sleep(0.0)
            caller.cancel()
            await asyncio.wait([caller])
            assert caller.cancelled() or isinstance(caller.exception(), StopAsyncIteration)

    for seed in range(10):
        run_in_virtual_time(main, backend="asyncio", seed=f"impatience {seed}")
