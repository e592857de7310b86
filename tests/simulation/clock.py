"""Run a program on virtual time, on asyncio or trio. A seed decides what is random."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Literal, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from feedapi_client import model
from tests.simulation.loop import (
    StuckError,
    UnhandledError,
    VirtualLoop,
    new_loop,
)
from tests.simulation.trio_order import in_one_order

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]


FOR_EVER = 10_000_000.0
"""Seconds of virtual time after which a program counts as stuck (trio)."""


def run_in_virtual_time(main: Callable[[], Awaitable[T]], *, backend: Backend, seed: str) -> T:
    """Run `main()` to its end on a clock that jumps ahead whenever every task waits.

    The `random` module of the process (the jitter of pauses) and the revisions of positions are
    drawn from `seed`, and their state is put back afterwards. So is, on asyncio, the order in which
    tasks run. trio draws that order itself: see `in_one_order`. `staggered` gives each seed an
    order of its own there.

    Not thread-safe.

    Raises:
        StuckError: nothing can go on.
        UnhandledError: a task or a callback failed and nobody was told (asyncio).
        Exception: what `main` raises.
    """
    with _seeded_process(seed):
        if backend == "asyncio":
            return _run_on_asyncio(main, seed)
        from trio.testing import MockClock

        options = {"clock": MockClock(autojump_threshold=0)}
        with _running(None):
            return in_one_order(
                lambda: anyio.run(_bounded, main, backend="trio", backend_options=options)
            )


def _run_on_asyncio(main: Callable[[], Awaitable[T]], seed: str) -> T:
    loop = new_loop(Random(seed))
    with _running(loop):
        result = anyio.run(main, backend="asyncio", backend_options={"loop_factory": lambda: loop})
    if loop.unhandled:
        raise UnhandledError("; ".join(loop.unhandled))
    return result


async def _bounded(main: Callable[[], Awaitable[T]]) -> T:
    """Await `main()`. trio's clock does not jump when there is no timer: the program would hang."""
    with anyio.move_on_after(FOR_EVER):
        return await main()
    raise StuckError("every task waits, and no timer will wake one")


class _Run:
    """The program that runs: its loop on asyncio, None on trio.

    Noted for `sleep` and `staggered`: to ask the backend each time takes long.
    """

    loop: VirtualLoop | None = None


_run = _Run()


@contextmanager
def _running(loop: VirtualLoop | None) -> Iterator[None]:
    before, _run.loop = _run.loop, loop
    try:
        yield
    finally:
        _run.loop = before


def in_drawn_order() -> bool:
    """Return whether the loop draws the order of tasks from the seed, so that none is staggered."""
    return _run.loop is not None


async def staggered(random: Random) -> None:
    """Let other tasks run, as often as drawn, where the loop does not draw their order."""
    for _ in range(random.randrange(4)):
        await anyio.lowlevel.checkpoint()


def sleep(seconds: float) -> Awaitable[None]:
    """Return what to await for a pause. It takes less time than `anyio.sleep`."""
    loop = _run.loop
    return anyio.sleep(seconds) if loop is None else loop.sleep(seconds)


def virtual_clock(backend: Backend) -> Callable[[], float]:
    """Return the clock of the program that runs. It takes less time than `anyio.current_time`."""
    if backend == "asyncio":
        return asyncio.get_running_loop().time
    import trio

    return trio.current_time


@contextmanager
def _seeded_process(seed: str) -> Iterator[None]:
    """Seed what is drawn, and keep the garbage collector from running finalizers at any moment."""
    before, draw_step, revisions = random.getstate(), model.draw_step, random.Random(seed)
    random.seed(seed)
    model.draw_step = lambda: revisions.randint(1, 2**20)
    try:
        with uncollected():
            yield
    finally:
        random.setstate(before)
        model.draw_step = draw_step


@contextmanager
def uncollected() -> Iterator[None]:
    """Do without the garbage collector in the block.

    It runs soon after the block, on all that the block has made. What is dropped by then takes it
    no more than one look.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
