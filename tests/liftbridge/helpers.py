"""Waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

SAFETY_NET = 60.0
"""Seconds that nothing in these tests takes, not even on a busy machine."""
_TASKS_OF_THE_RUNNER = 2  # the one that runs fixtures and tests, and one that waits for it


async def eventually(condition: Callable[[], object], seconds: float = SAFETY_NET) -> None:
    """Wait for a condition in another process or on another connection, by asking repeatedly."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def eventually_is(ask: Callable[[], Awaitable[Any]], is_it: Callable[[Any], object]) -> Any:
    """Ask a broker repeatedly until its answer meets a condition, and return that answer."""
    with anyio.fail_after(SAFETY_NET):
        while not is_it(answer := await ask()):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    return answer


async def calls_end(seconds: float = 5.0) -> None:
    """Wait until grpc.aio has heard of the end of all calls that were cancelled.

    It hears of it a moment later, and fails in whatever runs then when the loop of the call is
    closed meanwhile (grpcio 1.74). Until then each call has a task.
    """
    with anyio.move_on_after(seconds):
        while len(asyncio.all_tasks()) > _TASKS_OF_THE_RUNNER:  # noqa: ASYNC110
            await anyio.sleep(0.005)
