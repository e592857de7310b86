"""An asyncio event loop on virtual time, whose task steps run in an order drawn from a seed.

It does no input or output: when nothing can run, its clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from random import Random
from types import coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

OWNER: ContextVar[int | None] = ContextVar("OWNER", default=None)
"""The number of the simulated process that a task belongs to."""
Call = tuple[Callable[..., object], tuple[Any, ...], Context]
"""A callback that is due: the function, its arguments, and where it runs."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_STEPS_AT_ONE_TIME = 100_000
"""Turns of the loop without virtual time passing after which a run counts as a busy loop."""
LONGEST_CALL = 0.004
"""Longest virtual time of a function that is called in an executor, in seconds."""
_TASK_NUMBER = itemgetter(0)


class StuckError(Exception):
    """A simulation can't go on: nothing will ever run again, or time does not pass any more."""


class UnhandledError(Exception):
    """A task or a callback failed, or was dropped unfinished, and nobody was told."""


class VirtualHandle(asyncio.TimerHandle):
    """A callback that is due, or a timer. `call` is None once it was cancelled."""

    __slots__ = ("call",)
    call: Call | None

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Any):
        self.call = (callback, args, context)

    def cancel(self) -> None:
        """See `asyncio.Handle.cancel`."""
        self.call = None

    def cancelled(self) -> bool:
        """See `asyncio.Handle.cancelled`."""
        return self.call is None


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number.

    anyio keeps tasks in sets and cancels them in the order of the set. By the default hash, which
    is an address, that order would change from run to run.
    """

    __slots__ = ("__hash__", "number", "owner")
    __hash__: Any
    """Its number's own method. anyio asks many times, and a method in Python would take longer."""
    number: int
    owner: int | None

    def __repr__(self) -> str:
        # anyio shows the task in the reason of each cancellation. asyncio's own takes long.
        return f"<task {self.number}>"


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one simulation.

    asyncio promises that callbacks run in the order in which they were scheduled. The steps of
    tasks are the exception here: the next one is drawn by `random` among those that are due. So is
    the order of timers that are due at the same time.

    Attributes:
        now: the virtual time, in seconds.
        unhandled: what asyncio would log: an exception that nobody was told of.
    """

    create_future: Any
    """Returns a future of this loop. A function in Python would take longer."""

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.unhandled: list[str] = []
        self._exception_handler: Callable[..., object] | None = None
        self._random = random
        self._draw = random.random
        self._due: deque[VirtualHandle | None] = deque()
        """In the order in which they run. None: the step of a task, to be drawn then."""
        self._steps: list[tuple[int, Call]] = []
        self._timers: list[tuple[float, float, int, VirtualHandle]] = []
        self._numbers = count(1)
        self._idle_turns = 0
        self._stopping = self._running = self._closed = False
        self._generators: list[weakref.ref[AsyncGenerator[Any, Any]]] = []
        """Those that were begun. A WeakSet takes several times as long, and has no order."""
        self._context = copy_context()
        self.create_future = partial(asyncio.Future, loop=self)

    # ------------------------------------------------------------------ what is scheduled

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback. A task's step joins those that are drawn from."""
        if context is None:
            context = copy_context()
        task = getattr(callback, "__self__", None)
        if type(task) is NumberedTask:
            self._steps.append((task.number, (callback, args, context)))
            self._due.append(None)
            return _STEP
        handle = VirtualHandle(callback, args, context)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback for `delay` seconds of virtual time from now."""
        handle = VirtualHandle(callback, args, copy_context() if context is None else context)
        timer = self.now + delay, self._draw(), next(self._numbers), handle
        heappush(self._timers, timer)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback for a virtual time."""
        handle = VirtualHandle(callback, args, copy_context() if context is None else context)
        heappush(self._timers, (when, self._draw(), next(self._numbers), handle))
        return handle

    def create_task(self, coro: Any, **options: Any) -> NumberedTask:
        """Start a task. Its number counts callbacks and tasks of this loop."""
        task, number = NumberedTask.__new__(NumberedTask), next(self._numbers)
        # asyncio's constructor asks for the hash.
        task.number, task.owner = number, OWNER.get()
        task.__hash__ = number.__hash__
        task.__init__(coro, loop=self, **options)  # type: ignore[misc]
        return task

    def get_task_factory(self) -> Any:
        """Return None: tasks are always numbered ones."""
        return None

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call a function in this thread, a few virtual milliseconds from now.

        `executor` is not used: the clock would not wait for its threads.
        """
        del executor
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                outcome = partial(future.set_exception, error)
            else:
                outcome = partial(future.set_result, result)
            if not future.cancelled():
                outcome()

        self.call_later(self._random.uniform(0.0, LONGEST_CALL), call)
        return future

    async def sleep(self, seconds: float) -> None:
        """Do what `asyncio.sleep` does. That asks for the running loop, which is a system call."""
        if seconds <= 0:
            await _turn()
            return
        future: asyncio.Future[None] = self.create_future()
        timer = VirtualHandle(_wake, (future,), self._context)
        heappush(self._timers, (self.now + seconds, self._draw(), next(self._numbers), timer))
        try:
            await future
        finally:
            timer.call = None

    # ------------------------------------------------------------------ turns

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future is done, and return its result.

        Raises:
            StuckError: every task waits and there is no timer, or time does not pass.
        """
        done = asyncio.ensure_future(future, loop=self)
        done.add_done_callback(self._stop)
        self.run_forever()
        done.remove_done_callback(self._stop)
        return done.result()

    def run_forever(self) -> None:
        """Run until `stop`."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._begun, self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self._turns()
        finally:
            self._stopping = self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _turns(self) -> None:
        """Run what is due, turn after turn. When nothing is, time passes until the next timer."""
        due, steps, timers = self._due, self._steps, self._timers
        while not self._stopping:
            if due:
                self._idle_turns += 1
                if self._idle_turns > MAX_STEPS_AT_ONE_TIME:
                    self._idle_turns = 0  # the tasks can still be cancelled, and end
                    raise StuckError(f"a busy loop: virtual time stands still at {self.now:.3f} s")
            else:
                self._wait()
            while timers and timers[0][0] <= self.now:
                due.append(heappop(timers)[3])
            for _ in range(len(due)):
                handle = due.popleft()
                if handle is not None:
                    call = handle.call
                    if call is None:
                        continue  # it was cancelled
                elif len(steps) > 1:
                    # Sorted: the order of scheduling can depend on addresses of objects.
                    steps.sort(key=_TASK_NUMBER)
                    call = steps.pop(int(self._draw() * len(steps)))[1]
                else:
                    call = steps.pop()[1]
                try:
                    call[2].run(call[0], *call[1])
                except Exception as error:
                    context = {"message": "a callback failed", "exception": error}
                    self.call_exception_handler(context)

    def _wait(self) -> None:
        """Let time pass until the next timer."""
        timers = self._timers
        while timers and timers[0][3].call is None:
            heappop(timers)
        if not timers:
            raise StuckError("every task waits, and no timer will wake one")
        if timers[0][0] > self.now:
            self.now, self._idle_turns = timers[0][0], 0

    def _stop(self, _: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End `run_forever` after this turn."""
        self._stopping = True

    def is_running(self) -> bool:
        """Return whether `run_forever` is under way."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Forget all that is scheduled."""
        self._closed = True
        self._due.clear()
        self._steps.clear()
        self._timers.clear()

    # ------------------------------------------------------------------ what goes wrong

    get_debug: Any = bool
    """Returns False. asyncio asks for each future: a method in Python would take longer."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell the handler of an exception that nobody is told of; without one, record it."""
        if self._exception_handler is not None:
            self._exception_handler(self, context)
            return
        self.unhandled.append(f"{context['message']}: {context.get('exception')!r}")

    def set_exception_handler(self, handler: Callable[..., object] | None) -> None:
        """See `asyncio.loop.set_exception_handler`."""
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """See `call_exception_handler`."""
        self.call_exception_handler(context)

    def _begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.append(weakref.ref(generator))

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that are still open."""
        generators, self._generators = self._generators, []
        for reference in generators:
            generator = reference()
            if generator is not None:
                await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no executor."""


def process_tasks(owner: int) -> list[NumberedTask]:
    """Return the unfinished tasks of a simulated process, in the loop that runs."""
    tasks = (task for task in asyncio.all_tasks() if isinstance(task, NumberedTask))
    return sorted((t for t in tasks if t.owner == owner), key=lambda task: task.number)


def new_loop(random: Random) -> VirtualLoop:
    """Return a new loop. It lacks what needs sockets, processes or threads."""
    kind: type[Any] = VirtualLoop  # abstract, for type checkers, without these methods
    loop: VirtualLoop = kind(random)
    return loop


@coroutine
def _turn() -> Generator[None]:
    """Wait for the next turn of the loop, as `asyncio.sleep(0)` does."""
    yield


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


_STEP = VirtualHandle(print, (), None)
"""What `call_soon` returns for the step of a task, which nobody cancels."""
