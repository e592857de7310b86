"""Functions that another thread has called in an event loop, without waiting for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from inspect import isawaitable
from typing import Any

import anyio
import anyio.lowlevel


class Inbox:
    """Takes functions from any thread, and runs them in the event loop that it was made in.

    A portal of anyio does so too, but its calls block the calling thread for as long as the event
    loop is blocked.
    """

    def __init__(self) -> None:
        self._loop: Any = anyio.lowlevel.current_token().native_token
        self._calls: deque[Callable[[], Any]] = deque()
        self._filled = anyio.Event()

    def put(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have a function, or coroutine function, called. To be called from another thread."""
        future: Future[Any] = Future()
        self._calls.append(partial(_answer, future, function, *args))
        if isinstance(self._loop, asyncio.AbstractEventLoop):
            self._loop.call_soon_threadsafe(self._wake)
        else:
            self._loop.run_sync_soon(self._wake)
        return future

    async def run(self) -> None:
        """Call the functions, each in a task of its own, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._filled.wait()
                self._filled = anyio.Event()
                while self._calls:
                    tasks.start_soon(self._calls.popleft())

    def _wake(self) -> None:
        self._filled.set()


async def _answer(future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    """Call a function for another thread, which may have given up."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
        future.set_result(await result if isawaitable(result) else result)
    except Exception as error:  # noqa: BLE001 - raised there
        future.set_exception(error)
    finally:
        if not future.done():
            future.set_exception(TimeoutError("the monitor is being closed"))
