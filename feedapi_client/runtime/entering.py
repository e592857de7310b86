"""What the entry of a consumer waits for, and a log record when that takes too long."""

from __future__ import annotations

import logging

import anyio

from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.stacks import stack_in, stack_of_task
from feedapi_client.status import ProblemName

log = logging.getLogger(__name__)

_LOOKS = 10
"""Looks within `Limits.stall_timeout`."""


def waits_for(driver: Driver) -> str:
    """Return what an entry waits for, for people."""
    calls = driver.positions.calls
    return f"for the store, {calls[0].doing}" if calls else driver.entry_waits


async def warn_if_entry_hangs(driver: Driver, task: int) -> None:
    """Log a warning whenever an entry has waited for one thing for `Limits.stall_timeout` more.

    Until cancelled.

    Arguments:
        driver: of the session that is being opened.
        task: the task that opens it, for its stack.
    """
    limit = driver.limits.stall_timeout
    doing, began, logged = "", 0.0, 0
    while True:
        now = driver.clock()
        if doing != waits_for(driver):
            doing, began, logged = waits_for(driver), now, 0
        if now - began >= (logged + 1) * limit:
            logged += 1
            _warn(driver, f"{now - began:g} s {doing}", task)
        await anyio.sleep(limit / _LOOKS)


def _stack(driver: Driver) -> str | None:
    """Where an operation of the store stands, which may be in a task of its own."""
    if not driver.positions.calls:
        return None
    return stack_in(Positions.save) or stack_in(Positions.load)


def _warn(driver: Driver, waited: str, task: int) -> None:
    log.warning(
        "feed %s: the consumer is being entered and has waited %s\n%s",
        driver.feed,
        waited,
        _stack(driver) or stack_of_task(task) or "its task was not found",
        extra={"feed": driver.feed, "problem": ProblemName.NOT_OPEN.value},
    )
