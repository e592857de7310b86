"""Run a program on virtual time, on asyncio or trio, so that a seed decides all that is random."""

from __future__ import annotations

import asyncio
import gc
import importlib
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Literal, TypeVar

import anyio

from feedapi_client.testing.simulator.loop import new_loop

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]


def run_in_virtual_time(main: Callable[[], Awaitable[T]], *, backend: Backend, seed: str) -> T:
    """Run `main()` to its end on a clock that jumps ahead whenever every task waits.

    The order in which tasks run, and the `random` module of the process (the jitter of pauses),
    are drawn from `seed`. The state of both is put back afterwards.

    Not thread-safe. Raises what `main` raises, and `StuckError` when nothing can go on (asyncio).
    """
    with _seeded_process(seed):
        if backend == "asyncio":
            options: dict[str, Any] = {"loop_factory": lambda: new_loop(Random(seed))}
            return anyio.run(main, backend="asyncio", backend_options=options)
        from trio.testing import MockClock

        with _seeded_trio(seed):
            options = {"clock": MockClock(autojump_threshold=0)}
            return anyio.run(main, backend="trio", backend_options=options)


def virtual_clock(backend: Backend) -> Callable[[], float]:
    """Return the clock of the program that runs. It takes less time than `anyio.current_time`."""
    if backend == "asyncio":
        return asyncio.get_running_loop().time
    import trio

    return trio.current_time


@contextmanager
def _seeded_process(seed: str) -> Iterator[None]:
    """Seed `random`, and keep the garbage collector from running finalizers at random moments."""
    before, collecting = random.getstate(), gc.isenabled()
    random.seed(seed)
    gc.disable()
    try:
        yield
    finally:
        random.setstate(before)
        if collecting:
            gc.enable()


@contextmanager
def _seeded_trio(seed: str) -> Iterator[None]:
    """Let trio draw the order of tasks from the seed.

    trio has no public switch for this. These two names are what pytest-trio and Hypothesis use
    too; tests/testing/simulator/test_determinism.py fails if they lose their meaning.
    """
    runner: Any = importlib.import_module("trio._core._run")
    generator, deterministic = runner._r, runner._ALLOW_DETERMINISTIC_SCHEDULING
    before = generator.getstate()
    generator.seed(seed)
    runner._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        yield
    finally:
        generator.setstate(before)
        runner._ALLOW_DETERMINISTIC_SCHEDULING = deterministic
