"""`DiscoveryTimer`: when the next discovery is due (R10)."""

from __future__ import annotations

import anyio
import pytest
from feedapi_client.runtime.discovery_timer import DiscoveryTimer

from tests.runtime.helpers import safety_limit

pytestmark = pytest.mark.anyio

NEVER = 3600.0
"""Longer than any test: an interval that ends only because of something else."""


async def is_waiting(timer: DiscoveryTimer) -> bool:
    """Whether the next discovery is not due yet."""
    due = False

    async def wait() -> None:
        nonlocal due
        await timer.due()
        due = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return not due


async def due(timer: DiscoveryTimer) -> None:
    with safety_limit():
        await timer.due()


def timer_after_a_discovery(interval: float = NEVER) -> DiscoveryTimer:
    timer = DiscoveryTimer(interval)
    timer.begun()
    timer.succeeded()
    return timer


async def test_r10_the_next_discovery_is_due_after_the_interval() -> None:
    await due(timer_after_a_discovery(0.001))
    assert await is_waiting(timer_after_a_discovery())


async def test_r10_a_discovery_that_somebody_needs_is_due_soon() -> None:
    timer = timer_after_a_discovery()
    timer.soon()
    assert timer.wanted
    await due(timer)


async def test_r10_a_waiting_task_is_woken() -> None:
    timer = timer_after_a_discovery()
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(timer.due)
            await anyio.wait_all_tasks_blocked()
            timer.soon()


async def test_r10_a_discovery_that_succeeds_is_what_was_wanted() -> None:
    timer = timer_after_a_discovery()
    timer.soon()
    timer.begun()
    timer.succeeded()
    assert not timer.wanted
    assert await is_waiting(timer)


async def test_r10_a_request_during_a_discovery_leads_to_another_one() -> None:
    timer = timer_after_a_discovery()
    timer.begun()
    timer.soon()
    timer.succeeded()
    assert timer.wanted
    await due(timer)


async def test_r12_a_failed_discovery_is_tried_again_after_its_pause_and_stays_wanted() -> None:
    timer = timer_after_a_discovery()
    timer.soon()
    timer.begun()
    timer.failed(NEVER)
    assert timer.wanted
    assert await is_waiting(timer)
    timer.failed(0.0)
    await due(timer)


async def test_r10_an_unknown_command_asks_for_a_discovery_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gap = "feedapi_client.runtime.discovery_timer.UNKNOWN_COMMAND_GAP_SECONDS"
    monkeypatch.setattr(gap, NEVER)
    timer = timer_after_a_discovery(2 * NEVER)
    timer.perhaps()
    assert await is_waiting(timer)
    monkeypatch.setattr(gap, 0.0)
    timer.perhaps()
    assert not timer.wanted, "nothing depends on it"
    await due(timer)
