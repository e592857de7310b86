"""Run a program on virtual time, on asyncio or trio. A seed decides what is random."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
from asyncio import BaseEventLoop
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from heapq import heappop
from itertools import count
from random import Random
from typing import Any, Literal, TypeVar, cast
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]

MAX_TURNS_AT_ONE_TIME = 100_000
"""Turns of the loop without virtual time passing after which a program counts as a busy loop."""
_LONGEST_CALL = 0.004
"""Twice this is the longest virtual time of a function that is called in a thread."""
_FOR_EVER = 10_000_000.0
_TIE_SECONDS = 1e-9


class StuckError(Exception):
    """A simulation can't go on: nothing will ever run again, or time does not pass any more."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number.

    anyio keeps tasks in sets and cancels them in the order of the set. By the default hash, which
    is an address, that order would change from run to run.
    """

    def __init__(self, coro: Any, number: int, **options: Any) -> None:
        self.number = number  # asyncio's constructor asks for the hash
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(BaseEventLoop):
    """asyncio's own loop, whose clock jumps to the next timer when nothing can run.

    It does no input or output. asyncio promises that callbacks run in the order in which they were
    scheduled. Among the steps of tasks that are due at once it is drawn by `random` here, as is the
    order of timers that are due at the same time.

    Attributes:
        now: the virtual time, in seconds.
    """

    # Names of asyncio's that it does not document: the constructor looks for them.
    _ready: Any
    _scheduled: Any

    def __init__(self, random: Random) -> None:
        super().__init__()
        for name in ("_run_once", "_write_to_self", "_process_events", "_ready", "_scheduled"):
            if not hasattr(super(), name) and name not in vars(self):
                raise RuntimeError(f"asyncio of this Python has no BaseEventLoop.{name}")
        self.now = 0.0
        self._draws = random
        self._turns = 0
        numbers = count(1)
        self.set_task_factory(
            lambda loop, coro, **options: NumberedTask(coro, next(numbers), loop=loop, **options)
        )

    def time(self) -> float:
        return self.now

    def call_at(  # type: ignore[override]
        self, when: float, *rest: Any, **context: Any
    ) -> asyncio.TimerHandle:
        return super().call_at(when + self._draws.random() * _TIE_SECONDS, *rest, **context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Task[T]:
        """Call a function in this thread: the clock would not wait for those of `executor`."""
        del executor
        return self.create_task(anyio.to_thread.run_sync(func, *args))

    def _write_to_self(self) -> None:
        """Wake nothing: the loop never waits for a selector."""

    def _process_events(self, event_list: object) -> None:
        """Process nothing: there are no sockets."""

    def _run_once(self) -> None:
        timers, ready = self._scheduled, self._ready
        while timers and timers[0]._cancelled:
            heappop(timers)._scheduled = False
        self._turns += 1
        if self._turns > MAX_TURNS_AT_ONE_TIME:
            self._turns = 0  # the tasks can still be cancelled, and end
            raise StuckError(f"a busy loop: virtual time stands still at {self.now:.3f} s")
        if not ready:
            if not timers:
                raise StuckError("every task waits, and no timer will wake one")
            if timers[0]._when > self.now:
                self.now, self._turns = timers[0]._when, 0
        while timers and timers[0]._when <= self.now:
            handle = heappop(timers)
            handle._scheduled = False
            ready.append(handle)
        due = [ready.popleft() for _ in range(len(ready))]
        for handle in self._in_drawn_order(due):
            if not handle._cancelled:
                handle._run()

    def _in_drawn_order(self, due: list[Any]) -> list[Any]:
        """Shuffle the steps of tasks among the places that they have."""
        tasks: list[Any] = [getattr(handle._callback, "__self__", None) for handle in due]
        places = [place for place, task in enumerate(tasks) if isinstance(task, NumberedTask)]
        # Sorted: the order of scheduling can depend on addresses of objects.
        steps = [due[place] for place in sorted(places, key=lambda place: tasks[place].number)]
        self._draws.shuffle(steps)
        for place, step in zip(places, steps, strict=True):
            due[place] = step
        return due


def run_in_virtual_time(main: Callable[[], Awaitable[T]], *, backend: Backend, seed: str) -> T:
    """Run `main()` to its end on a clock that jumps ahead whenever every task waits.

    What the modules `random` and `secrets` draw is drawn from `seed`, as is the order in which
    tasks run. `anyio.to_thread.run_sync` calls its function in virtual time.

    Not thread-safe: other threads of the process draw from the seed meanwhile, too.

    Raises:
        StuckError: nothing can go on.
        Exception: what `main` raises.
    """
    with _seeded(seed), _threads_in_virtual_time(Random(f"threads {seed}")):
        return (_on_asyncio if backend == "asyncio" else _on_trio)(main, seed)


def _on_asyncio(main: Callable[[], Awaitable[T]], seed: str) -> T:
    # For type checkers the class is abstract: it lacks what needs sockets or processes.
    kind: type[Any] = VirtualLoop
    options = {"loop_factory": lambda: kind(Random(f"loop {seed}"))}
    return anyio.run(main, backend="asyncio", backend_options=options)


def _on_trio(main: Callable[[], Awaitable[T]], seed: str) -> T:
    from trio._core import _run
    from trio.testing import MockClock

    async def bounded() -> T:
        # Without a timer trio's clock does not jump: the program would hang.
        with anyio.move_on_after(_FOR_EVER):
            return await main()
        raise StuckError("every task waits, and no timer will wake one")

    inner: Any = _run
    state, ordered = inner._r.getstate(), inner._ALLOW_DETERMINISTIC_SCHEDULING
    inner._r.seed(seed)
    inner._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        options = {"clock": MockClock(autojump_threshold=0)}
        return anyio.run(bounded, backend="trio", backend_options=options)
    finally:
        inner._r.setstate(state)
        inner._ALLOW_DETERMINISTIC_SCHEDULING = ordered


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Seed what is drawn, and keep the garbage collector from running finalizers at any moment."""
    drawn, state, collecting = Random(f"secrets {seed}"), random.getstate(), gc.isenabled()
    random.seed(seed)
    gc.disable()
    try:
        with mock.patch.object(secrets, "randbits", drawn.getrandbits):
            yield
    finally:
        random.setstate(state)
        if collecting:
            gc.enable()


@contextmanager
def _threads_in_virtual_time(random: Random) -> Iterator[None]:
    """Run what is passed to `anyio.to_thread.run_sync` inline, at a time drawn from `random`."""

    async def run_sync(
        func: Callable[..., T],
        *args: Any,
        limiter: anyio.CapacityLimiter | None = None,
        **options: Any,
    ) -> T:
        await anyio.lowlevel.checkpoint()
        # As with a real thread: a call that has begun is finished, and its result may come after
        # its caller was cancelled.
        shielded = not (options.get("abandon_on_cancel") or options.get("cancellable"))
        result: Any = None
        async with limiter or anyio.Lock():
            with anyio.CancelScope(shield=shielded):
                await anyio.sleep(random.uniform(0.0, _LONGEST_CALL))
                result = func(*args)
                await anyio.sleep(random.uniform(0.0, _LONGEST_CALL))
        return cast("T", result)

    with mock.patch.object(anyio.to_thread, "run_sync", run_sync):
        yield
