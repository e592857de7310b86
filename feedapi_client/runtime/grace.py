"""The time that a consumer that was stopped leaves for what is in flight, and signals to stop."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

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


_OF_LOOP = "_signal_handlers"
"""Where the event loops of asyncio and uvloop have the handlers of `add_signal_handler`."""


class StopSignals:
    """The one receiver of SIGTERM and SIGINT, for all consumers of the process.

    The handlers before it are back once the last of its listeners has left.
    """

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[signal.Signals], object]] = {}
        self._before: dict[signal.Signals, tuple[Any, Any]] = {}
        self._loop: Any = None

    def add(self, owner: object, listener: Callable[[signal.Signals], None]) -> None:
        """Call the listener in the event loop, for each signal, until `remove`.

        Raises RuntimeError outside of the main thread, and where no event loop runs.
        """
        call_soon, loop = _call_soon()
        self._listeners[owner] = lambda number: call_soon(lambda: listener(number))
        if self._before:
            return
        self._loop = loop
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.signal(number, self._receive)
                # asyncio calls its own handlers besides Python's: they are set aside.
                self._before[number] = handler, getattr(loop, _OF_LOOP, {}).pop(number, None)
        except ValueError as error:
            self._listeners.clear()
            raise RuntimeError("signals can be handled in the main thread only") from error

    def remove(self, owner: object) -> None:
        """Call this listener no more. Does nothing for one that has left."""
        if self._listeners.pop(owner, None) is None or self._listeners:
            return
        while self._before:
            number, (handler, of_loop) = self._before.popitem()
            with suppress(ValueError):  # not in the main thread any more
                signal.signal(number, handler)
            if of_loop is not None:  # once the loop has passed over the signals so far
                put_back = partial(getattr(self._loop, _OF_LOOP).setdefault, number, of_loop)
                self._loop.call_soon(self._loop.call_soon, put_back)

    def _receive(self, number: int, _: object) -> None:
        for listener in list(self._listeners.values()):
            with suppress(RuntimeError):  # its event loop has ended
                listener(signal.Signals(number))


stop_signals = StopSignals()


def _call_soon() -> tuple[Callable[[Callable[[], object]], object], object]:
    """Return what calls a function in the event loop, from a signal handler; and that loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if "trio" not in sys.modules:
            raise
        token = sys.modules["trio"].lowlevel.current_trio_token()
        return token.run_sync_soon, None
    return loop.call_soon_threadsafe, loop
