"""What a session needs of the event loop: its clock, wake-ups, tasks, and calls that are finished.

For asyncio and trio.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

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


def running_task() -> Any:
    """Return the task that runs, of asyncio or trio. Its `coroutine_of` shows where it stands.

    anyio's `get_current_task` makes an object with its name and its parents, which takes 50 times
    as long.
    """
    if _in_asyncio_task():
        return asyncio.current_task()
    import trio

    return trio.lowlevel.current_task()


def coroutine_of(task: Any) -> Any:
    return task.get_coro() if hasattr(task, "get_coro") else task.coro


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio.get_running_loop() if _in_asyncio_task() else None


class Background:
    """A task group in which each task has a cancel scope of its own.

    To end the tasks, these scopes are cancelled, and not the group. On asyncio a group that is
    cancelled also cancels the task that waits for it, which is the application's. When the
    application's own cancellation of that task comes in the same turn of the event loop, anyio
    (4.16) may take both for its own, and the application's is lost.
    """

    def __init__(self) -> None:
        self._group = anyio.create_task_group()
        self._scopes: set[anyio.CancelScope] = set()

    async def open(self) -> None:
        await self._group.__aenter__()

    def start_soon(self, work: Callable[..., Awaitable[object]], *args: Any) -> None:
        scope = anyio.CancelScope()
        self._scopes.add(scope)

        async def run() -> None:
            try:
                with scope:
                    await work(*args)
            finally:
                self._scopes.discard(scope)

        self._group.start_soon(run, name=getattr(work, "__qualname__", str(work)))

    async def close(self) -> None:
        for scope in list(self._scopes):
            scope.cancel()
        await self._group.__aexit__(None, None, None)


# ---------------------------------------------------------------------- cancellation (R20)


async def finish(
    call: Coroutine[Any, Any, None], *, hurry: Callable[[], None] | None = None
) -> None:
    """Await `call` to its end, and pass on a cancellation that came meanwhile.

    `hurry` is called when one comes, and may shorten what `call` waits for.

    A cancel scope of anyio can shield it, but nothing shields an asyncio task from a native
    cancellation (`asyncio.wait_for`, `Task.cancel`): that would end the call wherever it is. On
    asyncio it therefore runs in a task of its own. A caller that was cancelled natively gets no
    other error: the call has to deal with its failures itself.
    """
    if hurry is None:
        await _finish(call, lambda: None)
    else:
        await hurried(_finish(call, hurry), hurry)


async def hurried(work: Awaitable[None], hurry: Callable[[], None]) -> None:
    """Await `work`, which is shielded, and call `hurry` when the scope around it is cancelled."""
    over = False

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not over:
                hurry()

    async def to_the_end() -> None:
        nonlocal over
        try:
            await work
        finally:
            over = True

    await beside(watch, to_the_end())


async def _finish(call: Coroutine[Any, Any, None], hurry: Callable[[], None]) -> None:
    with anyio.CancelScope(shield=True):
        if not _in_asyncio_task():
            return await call
        task = asyncio.ensure_future(call)
        cancelled = None
        while not task.done():
            try:
                await _end_of(task)
            except asyncio.CancelledError as error:
                cancelled = error
                hurry()
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as forgotten
        raise cancelled


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait until a task has ended. A cancellation of the caller leaves it alone.

    It does what `asyncio.wait([task])` does, which takes several times as long for one task.
    """
    ended = asyncio.get_running_loop().create_future()

    def end(_: object) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    try:
        await ended
    finally:
        task.remove_done_callback(end)


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


async def beside(
    background: Callable[[], Coroutine[Any, Any, None]], work: Awaitable[None]
) -> None:
    """Await `work` while `background` runs, and then cancel that.

    Raises what `work` raises, without a group around it and with its cause.
    """
    error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(background)
        try:
            await work
        except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001 - raised below
            error = failure
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
