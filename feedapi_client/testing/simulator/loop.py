"""An asyncio event loop on virtual time, whose task steps run in an order drawn from a seed.

It does no input or output: when nothing can run, its clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from itertools import count
from random import Random
from typing import Any, TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")

MAX_STEPS_AT_ONE_TIME = 100_000
"""Iterations of the loop without virtual time passing after which a run counts as a busy loop."""


class StuckError(Exception):
    """A simulation can't go on: nothing will ever run again, or time does not pass any more."""


class VirtualSelector(selectors.BaseSelector):
    """A selector without files: waiting moves `now` ahead by the time to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[Any, selectors.SelectorKey] = {}
        self._idle_steps = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Record a file. It never becomes ready."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._files[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget a file."""
        return self._files.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the recorded files."""
        return self._files

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let `timeout` seconds of virtual time pass at once.

        Raises:
            StuckError: there is no timer, or time has not passed for too many steps.
        """
        if timeout is None:
            raise StuckError("every task waits, and no timer will wake one")
        if timeout > 0:
            self.now += timeout
            self._idle_steps = 0
        self._idle_steps += 1
        if self._idle_steps > MAX_STEPS_AT_ONE_TIME:
            self._idle_steps = 0  # the tasks can still be cancelled, and end
            raise StuckError(f"a busy loop: virtual time stands still at {self.now:.3f} s")
        return []


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number.

    anyio keeps tasks in sets and cancels them in the order of the set. By the default hash, which
    is an address, that order would change from run to run.
    """

    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one simulation.

    asyncio promises that callbacks run in the order in which they were scheduled. The steps of
    tasks are the exception here: the next one is drawn by `random` among those that are due.
    """

    def __init__(self, random: Random) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)
        self._random = random
        self._steps: list[tuple[int, Callable[..., Any], tuple[Any, ...], Context]] = []
        self._numbers = count(1)
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback. A task's step joins those that are drawn from."""
        task = getattr(callback, "__self__", None)
        if not isinstance(task, NumberedTask):
            return super().call_soon(callback, *args, context=context)
        step = (task.number, callback, args, context or copy_context())
        self._steps.append(step)
        return super().call_soon(self._run_step)

    def _run_step(self) -> None:
        # Sorted, because the order of scheduling can depend on addresses of objects.
        self._steps.sort(key=lambda step: step[0])
        chosen = self._random.randrange(len(self._steps)) if len(self._steps) > 1 else 0
        _, callback, args, context = self._steps.pop(chosen)
        context.run(callback, *args)

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> NumberedTask:
        number = next(self._numbers)
        NumberedTask.number, previous = number, NumberedTask.number
        try:
            # The constructor already asks for the hash, before the attribute can be set.
            task = NumberedTask(coroutine, loop=loop, **options)
            task.number = number
        finally:
            NumberedTask.number = previous
        return task
