"""An event loop in a thread of its own, for programs without async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from feedapi_client.arguments import OneProcess
from feedapi_client.stores.threads import LOOK_SECONDS, CallerThread

T = TypeVar("T")


class NotOpenError(RuntimeError):
    """The event loop does not run, or not in this process."""


class LoopThread:
    """Runs an event loop in a thread of its own, and holds one async context manager open in it.

    anyio's `BlockingPortal` does the same for calls. It goes to the event loop and back twice for
    each of them, and its callers can do nothing while they wait. A call of this class goes there
    once, and its thread runs functions meanwhile (`CallerThread`).

    The thread is a daemon: a program that ends without `close` ends.

    Arguments:
        held: entered by `open` and left by `close`, both in the event loop.
        name: of the thread.
    """

    def __init__(self, held: AbstractAsyncContextManager[object], name: str) -> None:
        self._held = held
        self._process = OneProcess()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Not an Event: Ctrl-C in its methods may leave its lock held, for ever.
        self._running: SimpleQueue[None] = SimpleQueue()
        self._waiting: set[_Call[Any]] = set()
        self._started: dict[asyncio.Task[None], _Call[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: anyio.abc.TaskGroup
        self._stop, self._leave = asyncio.Event(), asyncio.Event()
        self._ending = False
        self._failure: BaseException | None = None

    def open(self) -> None:
        """Start the thread and enter the context manager. An interruption (Ctrl-C) ends both."""
        try:
            self._thread.start()
            while self._loop is None and self._failure is None:
                with suppress(Empty):
                    self._running.get(timeout=LOOK_SECONDS)
            self.call(self._enter)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the context manager, and wait for the end of the thread.

        Calls that other threads wait for are cancelled. In another process than the one of `open`
        it does nothing: a fork has no thread of its parent's.

        Raises what leaving raises.
        """
        if not self._process.is_this:
            return
        self.end()
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Let the thread end, without waiting for it. May be called in any thread."""
        self._ending = True  # before it looks for the loop, which sets that before it looks here
        self.post(self._stop.set)

    def post(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function in the event loop, soon. Return False if that has ended.

        May be called in any thread, and in a signal handler. In another process than the one of
        `open` it does nothing.
        """
        if self._loop is None or not self._process.is_this:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False  # it is closed
        return True

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def check_waits(self) -> None:
        if self.is_current:
            raise RuntimeError("the consumer can't be waited for in its own event loop")

    def call(self, function: Callable[[CallerThread], Awaitable[T]]) -> T:
        """Await ``function(caller)`` in the event loop; `caller` is this thread, which waits.

        Raises what the function raises. What interrupts the wait (Ctrl-C) cancels the function, and
        is raised when that has ended; a second interruption does not wait for that.

        Raises `NotOpenError` where there is no event loop, or where it ends before the call does.
        """
        self._process.check("the consumer", error=NotOpenError)
        self.check_waits()
        call = _Call(function)
        try:
            self._waiting.add(call)
            if not self.post(self._start, call):
                call.caller.over()
            call.caller.wait()
        except BaseException:
            # First, and without a call: nothing can interrupt that.
            call.interrupted = True
            if not self.post(call.interrupt):
                call.caller.over()
            call.caller.wait_for_end()
            raise
        finally:
            self._waiting.discard(call)
        return call.result()

    def _start(self, call: _Call[Any]) -> None:
        self._end_interrupted()
        if self._stop.is_set():
            call.cancel()
        elif (task := call.start()) is not None:
            self._started[task] = call
            task.add_done_callback(self._started.pop)

    def _end_interrupted(self) -> None:
        for call in list(self._started.values()):
            if call.interrupted:
                call.interrupt()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend="asyncio")
        except BaseException as error:  # noqa: BLE001 - raised by `close`
            self._failure = error
        finally:
            self._running.put(None)
            for call in list(self._waiting):
                call.caller.over()

    async def _serve(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._loop = asyncio.get_running_loop()
            self._running.put(None)
            if self._ending:
                self._stop.set()
            await self._stop.wait()
            self._end_interrupted()
            for call in list(self._started.values()):
                call.cancel()
            if self._started:
                await asyncio.wait(self._started)
            self._leave.set()

    async def _enter(self, _: CallerThread) -> None:
        await self._tasks.start(self._hold)

    async def _hold(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        entered = False
        try:
            async with self._held:
                entered = True
                task_status.started()
                await self._leave.wait()
        except Exception as error:
            if not entered:
                raise
            self._failure = error


class _Call(Generic[T]):
    """A function that is awaited in the event loop, and the thread that waits for it.

    Attributes:
        interrupted: whether the thread was interrupted. It runs nothing more, and may not wait any
            more.
    """

    def __init__(self, function: Callable[[CallerThread], Awaitable[T]]) -> None:
        self.caller = CallerThread()
        self.interrupted = False
        self._task: asyncio.Task[None] | None = None
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self._value: list[T] = []
        self._error: BaseException | None = None

    def start(self) -> asyncio.Task[None] | None:
        """Start a task of asyncio, in the event loop. None if it was cancelled before.

        In a callback anyio starts no task. This one has the context variables of the caller.
        """
        if not self._cancelled:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self._value.append(await self._function(self.caller))
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        finally:
            self.caller.over()

    def cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif self._task is None:
            self.caller.over()

    def interrupt(self) -> None:
        """Cancel the function, and refuse what it still asks of the thread. In the event loop."""
        self.cancel()
        self.caller.refuse()

    def result(self) -> T:
        """Return or raise what the function did, in the thread that waits."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if not self._value:
                raise NotOpenError("the consumer is not open: use it inside 'with'")
            return self._value[0]
        finally:
            error = None  # its traceback holds this frame: no cycle
