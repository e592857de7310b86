"""`Wakeup`: one task waits until it is woken, or for a time."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.runtime.loop import Wakeup
from tests.runtime.helpers import safety_limit

pytestmark = pytest.mark.anyio

FOR_EVER = 3600.0
"""Longer than any test."""


async def test_set_wakes_the_task_that_waits() -> None:
    wakeup, woken = Wakeup(), anyio.Event()

    async def wait(seconds: float) -> None:
        await wakeup.wait(seconds)
        woken.set()

    for seconds in (FOR_EVER, float("inf")):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, seconds)
            await anyio.wait_all_tasks_blocked()
            assert not woken.is_set()
            wakeup.set()
            with safety_limit():
                await woken.wait()
        woken = anyio.Event()


async def test_the_wait_ends_after_its_time() -> None:
    began = anyio.current_time()
    with safety_limit():
        await Wakeup().wait(0.01)
    assert anyio.current_time() - began >= 0.01 - 0.002, "clocks are allowed to be coarse"


async def test_a_time_that_is_over_ends_the_wait_at_once() -> None:
    with safety_limit():
        await Wakeup().wait(-1.0)


async def test_set_concerns_the_present_wait_only() -> None:
    """A wait that begins later is for something that its task has not looked at yet."""
    wakeup, woken = Wakeup(), False

    async def wait() -> None:
        nonlocal woken
        await wakeup.wait()
        woken = True

    wakeup.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not woken
        tasks.cancel_scope.cancel()


async def test_a_wait_can_be_cancelled_and_another_one_begin() -> None:
    wakeup = Wakeup()
    for seconds in (FOR_EVER, float("inf")):
        with anyio.move_on_after(0.0) as scope:
            await wakeup.wait(seconds)
        assert scope.cancelled_caught
        wakeup.set()  # nobody waits any more
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wakeup.wait)
        await anyio.wait_all_tasks_blocked()
        wakeup.set()
        with safety_limit():
            await anyio.wait_all_tasks_blocked()
