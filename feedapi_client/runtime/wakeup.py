"""One task waits until it is woken or a time is over, again and again."""

from __future__ import annotations

import asyncio
import math

import anyio


class Wakeup:
    """Lets one task wait for others, or for a time.

    `set` concerns the present wait only: the task looks at what it waits for before each wait,
    without an await in between.

    anyio's `Event` and `CancelScope` do the same, with several times as much work for each wait.
    The parts of a session that wait before each request would spend most of their time on it. So on
    asyncio it is a future.
    """

    __slots__ = ("_is_known", "_loop", "_waiting")

    def __init__(self) -> None:
        self._is_known = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | anyio.Event | None = None

    def set(self) -> None:
        """Wake the task that waits. Does nothing when none does."""
        waiting, self._waiting = self._waiting, None
        if isinstance(waiting, anyio.Event):
            waiting.set()
        elif waiting is not None:
            _wake(waiting)

    async def wait(self, seconds: float = math.inf) -> None:
        """Wait for `set`, for at most so many seconds. For one task at a time."""
        if not self._is_known:
            self._is_known, self._loop = True, _asyncio_loop()
        loop = self._loop
        if loop is None:
            self._waiting = event = anyio.Event()
            with anyio.move_on_after(seconds):
                await event.wait()
            return
        self._waiting = future = loop.create_future()
        if seconds == math.inf:
            await future
            return
        timer = loop.call_at(loop.time() + seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop of the task that runs; None on trio, also where that is asyncio's guest."""
    try:
        return None if asyncio.current_task() is None else asyncio.get_running_loop()
    except RuntimeError:
        return None
