"""`simulate`: run an application's own handler and store through simulated histories."""

from __future__ import annotations

import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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
from feedapi_client.testing.simulator.scenario import Scenario, generate
from feedapi_client.testing.simulator.virtual import Backend, run_in_virtual_time

MakeStore = Callable[[Path], CursorStore]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory below it is used
"""Where files cost no disk write, on Linux."""
_LINES_SHOWN = 12


class SimulationError(AssertionError):
    """A history in which the application did something wrong.

    Attributes:
        seed: repeats it.
        rule: the name of the rule that was violated.
        scenario: what happened, without what need not happen for the same failure.
        trace: each request, save and failure of that scenario, with its virtual time.
    """

    def __init__(self, seed: int, scenario: Scenario, failure: ViolationError, replay: str) -> None:
        last = "\n".join(failure.trace[-_LINES_SHOWN:])
        super().__init__(
            f"seed {seed} on {scenario.backend}: {failure}\n\n"
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
    - Events of an entity come in order, across splits.
    - After the last failure everything is handled within bounded time, and a consumer without
      `follow` ends.
    - The handler raises nothing that does not go back to a simulated failure.
    - With `applied`: what the handler wrote is there when it returns or its cursor is stored. It is
      in the order of each entity, and each event once.

    What the store itself promises is checked by `CursorStoreContract`.

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
            without the steps that need not happen.
    """
    __tracebackhide__ = True
    application = Application(handler, applied, event, on_failure, max_concurrency)

    def run(scenario: Scenario) -> ViolationError | None:
        return _failure(scenario, application, store, delivery)

    def fails_by(rule: str) -> Callable[[Scenario], bool]:
        return lambda other: getattr(run(other), "rule", None) == rule

    for seed in range(first, first + seeds):
        scenario = generate(seed, backend, Settings, History)
        failure = run(scenario)
        if failure is not None:
            scenario = scenario.shrunk(fails_by(failure.rule))
            failure = run(scenario) or failure
            text = replay.format(seed=seed, backend=backend)
            raise SimulationError(seed, scenario, failure, text) from failure.__cause__


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
