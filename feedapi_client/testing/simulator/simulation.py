"""`simulate`: run an application's own handler and store through simulated histories."""

from __future__ import annotations

import logging
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import anyio

from feedapi_client import CursorStore, MemoryCursorStore, Retry
from feedapi_client.testing.simulator.history import History
from feedapi_client.testing.simulator.oracle import Delivery, ViolationError
from feedapi_client.testing.simulator.process import (
    Application,
    Applied,
    Handler,
    Payload,
    Settings,
    Start,
)
from feedapi_client.testing.simulator.progress import progress
from feedapi_client.testing.simulator.scenario import Scenario, generate, shrink, smaller
from feedapi_client.testing.simulator.virtual import Backend, run_in_virtual_time

MakeStore = Callable[[Path], CursorStore]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory below it is used
"""Where files cost no disk write, on Linux."""
_SHRINK_RUNS = 150
_LINES_SHOWN = 12
_THREADS = (
    "\nThe application has started threads of its own. Virtual time does not wait for them, which "
    "may be the reason."
)


class SimulationError(AssertionError):
    """A history in which the application did something wrong.

    Attributes:
        seed: repeats it.
        rule: the name of the rule that was violated.
        scenario: what happened, without what need not happen for the same failure.
        trace: each request, save and failure of that scenario, with its virtual time.
    """

    def __init__(
        self, seed: int, scenario: Scenario, failure: ViolationError, replay: str, hint: str = ""
    ) -> None:
        last = "\n".join(failure.trace[-_LINES_SHOWN:])
        super().__init__(
            f"seed {seed} on {scenario.backend}: {failure}{hint}\n\n"
            f"What happened, without what need not happen:\n{scenario}\n\n"
            f"The last of it:\n{last}\n\n"
            f"Repeat it: {replay}"
        )
        self.seed = seed
        self.rule = failure.rule
        self.scenario = scenario
        self.trace = failure.trace


def _in_memory(_: Path) -> CursorStore:
    return MemoryCursorStore()


def _default_event(entity: int, n: int) -> dict[str, int]:
    return {"entity": entity, "n": n}


def simulate(
    handler: Handler | Start,
    store: MakeStore = _in_memory,
    *,
    seeds: int = 200,
    first: int = 0,
    backend: Backend = "asyncio",
    applied: Applied | None = None,
    delivery: Delivery = "exactly-once",
    event: Payload = _default_event,
    on_failure: Literal["raise", "retry"] | Retry = "raise",
    max_concurrency: int | None = None,
    replay: str = "simulate(..., first={seed}, seeds=1, backend={backend!r})",
) -> None:
    """Run a handler and a store through simulated histories, one for each seed.

    In each history the process of the application is killed, cancelled, stopped and started again,
    while the publisher splits partitions, fails and lags behind, and the store is slow and fails.
    All of it happens on virtual time. A seed decides everything that is random; on trio it does not
    decide all of the order in which tasks run, so that a repetition can differ.

    What is checked in each history:

    - The handler finishes with every event: it returns, or it commits the batch.
    - Events of an entity come in order, across splits. A partition starts after its parent is
      drained.
    - After the last failure everything is handled within bounded time, and a consumer without
      `follow` ends.
    - The store returns what was saved. It saves all positions or none, and refuses those of another
      consumer.
    - The handler raises nothing that does not go back to a simulated failure.
    - With `applied`: what the handler wrote is there when it returns or its cursor is stored. It is
      in the order of each entity, and each event once.

    Not thread-safe, and not to be called while an event loop runs in the thread.

    What it can't do: wait for threads and sockets of the application's own. Functions that run in
    `anyio.to_thread.run_sync` are called in virtual time; other databases than SQLite need a
    substitute in memory.

    Arguments:
        handler: ``async def handle(batch)``, as for `FeedConsumer.run`. Or a function that is
            called with the store whenever the process starts, and returns such a handler, or an
            asynchronous context manager that gives one. Only with such a function does a process
            that starts again forget what the one before kept in memory.
        store: is called with an empty directory at the start of each history, and returns the
            store. The directory is removed afterwards.
        seeds, first: how many seeds to run, and the first one.
        backend: "asyncio" or "trio".
        applied: is called with the store, and returns which events took effect: pairs of entity and
            number in the order in which they did. For a handler that adds up, a mapping of entity
            to the number of its events. It may be ``async``. It is called while no handler runs.
        delivery: "exactly-once", or "at-least-once" if an event may take effect again after a
            restart.
        event: returns the payload of an entity's n-th event, counted from 1.
        on_failure: see `FeedConsumer.run`. A quarantine is not supported.
        max_concurrency: see `FeedConsumer.run`. By default it differs from history to history.
        replay: what a failure names as the way to repeat it.

    Raises:
        SimulationError: a rule was violated. The message names the seed and tells the history,
            without what need not happen.
        RuntimeError: an event loop runs in this thread.
        ValueError: `on_failure` names a quarantine, or `seeds` is not positive.
    """
    __tracebackhide__ = True
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, not {seeds}")
    if on_failure not in ("raise", "retry") and not (
        isinstance(on_failure, Retry) and on_failure.then == "raise"
    ):
        raise ValueError(f"on_failure must be 'raise', 'retry' or a Retry, not {on_failure!r}")
    _refuse_a_running_loop()
    application = Application(handler, applied, event, on_failure, max_concurrency)

    def run(scenario: Scenario) -> ViolationError | None:
        return _failure(scenario, application, store, delivery)

    with progress("simulating", seeds) as advance:
        for seed in range(first, first + seeds):
            scenario = generate(seed, backend, Settings, History)
            with _threads_begun() as begun:
                failure = run(scenario)
            if failure is not None:
                hint = _THREADS if any(thread.is_alive() for thread in begun) else ""
                scenario, failure = _shrunk(scenario, failure, run)
                text = replay.format(seed=seed, backend=backend)
                raise SimulationError(seed, scenario, failure, text, hint) from failure.__cause__
            advance()


def _failure(
    scenario: Scenario, application: Application, make_store: MakeStore, delivery: Delivery
) -> ViolationError | None:
    """Run a scenario, and return what it has violated. Two runs are the same, step by step."""
    histories: list[History] = []

    async def main(folder: Path) -> None:
        store: Any = make_store(folder)
        history = History(scenario, application, store, delivery)
        histories.append(history)
        try:
            await history.run()
        finally:
            if hasattr(store, "aclose"):
                with anyio.CancelScope(shield=True):
                    await store.aclose()

    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with silenced(), tempfile.TemporaryDirectory(prefix="feedapi-", dir=base) as folder:
        try:
            seed = f"run {scenario.seed}"
            run_in_virtual_time(lambda: main(Path(folder)), backend=scenario.backend, seed=seed)
        except ViolationError as violation:
            return violation
        except Exception as error:
            if not histories:
                raise  # the user's own factory of stores
            text = "".join(traceback.format_exception(error))
            failure = ViolationError(f"crash {type(error).__name__}", text, histories[0].trace)
            failure.__cause__ = error
            return failure
    return None


def _shrunk(
    scenario: Scenario, failure: ViolationError, run: Callable[[Scenario], ViolationError | None]
) -> tuple[Scenario, ViolationError]:
    """Return a smaller scenario with the same failure, and what it came to."""
    found = [failure]

    def fails(other: Scenario) -> bool:
        violation = run(other)
        if violation is None or violation.rule != failure.rule:
            return False
        found.append(violation)
        return True

    return shrink(scenario, fails, smaller=smaller, max_runs=_SHRINK_RUNS), found[-1]


@contextmanager
def silenced() -> Iterator[None]:
    """Write no log records of the library: what goes wrong in a history is no news."""
    log = logging.getLogger("feedapi_client")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _threads_begun() -> Iterator[list[threading.Thread]]:
    """Note the threads that this thread begins, until the block ends.

    Not of those that another thread of the process begins meanwhile: a history that is repeated
    has to say the same.
    """
    here = threading.get_ident()
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if threading.get_ident() == here:
            begun.append(thread)
        start(thread)

    with mock.patch.object(threading.Thread, "start", noted):
        yield begun


def _refuse_a_running_loop() -> None:
    try:
        anyio.current_time()
    except RuntimeError:
        return  # none runs
    raise RuntimeError("an event loop runs: call simulate from a function that is not async")
