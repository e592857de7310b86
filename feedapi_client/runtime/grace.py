"""The time that a consumer that was stopped leaves for what is in flight."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from feedapi_client.runtime.loop_clock import loop_clock


class GracePeriod:
    """Calls a function when a grace period is over.

    A task of its own waits, so that `begin` works wherever the event loop runs, also in the
    callback of a signal, where anyio can't start a task.
    """

    def __init__(self, end: Callable[[float], None]) -> None:
        self._end = end
        self._clock = loop_clock()
        self._ends = math.inf
        self._seconds = math.inf
        self._changed = anyio.Event()

    def begin(self, seconds: float) -> None:
        """Let the period end after so many seconds, unless it ends before."""
        ends = self._clock() + seconds
        if ends < self._ends:
            self._ends, self._seconds = ends, seconds
            self._changed.set()

    def forget(self) -> None:
        """Let it not end: everything was finished within it."""
        self._ends = math.inf

    async def run(self) -> None:
        """Wait for the ends of periods, until cancelled."""
        while True:
            with anyio.move_on_after(self._ends - self._clock()) as waiting:
                await self._changed.wait()
                self._changed = anyio.Event()
            if waiting.cancelled_caught and self._ends <= self._clock():
                self._ends = math.inf
                self._end(self._seconds)
