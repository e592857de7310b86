"""The clock of the event loop, for code that asks it often or from another thread."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import anyio

Clock = Callable[[], float]


def loop_clock() -> Clock:
    """Return the running event loop's clock, the one of `anyio.current_time`.

    `anyio.current_time` looks for the event loop at each call, which takes 2 % of the processor
    time of a large page, and it fails in other threads. What this returns can be called anywhere.
    """
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return _trio_clock() or anyio.current_time


def _trio_clock() -> Clock | None:
    if "trio" not in sys.modules:
        return None
    import trio

    try:
        return trio.lowlevel.current_clock().current_time
    except RuntimeError:
        return None  # no event loop runs
