"""`simulate`: run an application's own handler and store through simulated histories."""

from __future__ import annotations

import logging
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args
from unittest import mock

import anyio

from feedapi_client import (
    CommitOrderError,
    CursorStore,
    FeedError,
    FencedError,
    Limits,
    LineageError,
    MemoryCursorStore,
    Retry,
)
from feedapi_client.testing.publisher import SplitMethod
from feedapi_client.testing.simulator.history import (
    Scenario,
    between,
    drawn,
    generate,
    one_of,
    shrink,
    step,
)
from feedapi_client.testing.simulator.network import FAULTS, Fault, Feed, Target, new_publisher
from feedapi_client.testing.simulator.oracle import (
    Delivery,
    Oracle,
    StoreModel,
    Trace,
    ViolationError,
)
from feedapi_client.testing.simulator.process import (
    Application,
    Applied,
    Calls,
    Handler,
    Moment,
    Payload,
    Process,
    Start,
    Trouble,
    World,
    is_simulated,
)
from feedapi_client.testing.simulator.virtual import Backend, run_in_virtual_time

MakeStore = Callable[[Path], CursorStore]

_SETTLE_SECONDS = 600
"""Virtual time after the last fault, or after an event, within which the next one must come."""
_GRACE_SECONDS = 90.0
"""Virtual time after the last fault for which an error may still be a result of it."""
_RESTART_SECONDS = 0.5
_PAUSE_SECONDS = 10.0
_NEVER_RIGHT = (CommitOrderError, LineageError)
"""Errors that no failure of the simulation justifies."""
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
        self, seed: int, scenario: Scenario, failure: Failure, replay: str, hint: str = ""
    ) -> None:
        last = "\n".join(_up_to_the_violation(failure.trace)[-_LINES_SHOWN:])
        super().__init__(
            f"seed {seed} on {scenario.backend}: {failure.text}{hint}\n\n"
            f"What happened, without what need not happen:\n{scenario}\n\n"
            f"The last of it:\n{last}\n\n"
            f"Repeat it: {replay}"
        )
        self.seed = seed
        self.rule = failure.rule
        self.scenario = scenario
        self.trace = failure.trace


@dataclass(frozen=True, slots=True)
class Failure:
    """What a history violated.

    Attributes:
        rule: the name of the rule; the same for all histories with the same defect.
        text: what happened.
        error: the exception that a process ended with, where that is the failure.
        trace: everything that happened, with its virtual time.
    """

    rule: str
    text: str
    error: BaseException | None
    trace: list[str]


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
    application = Application(
        handler=handler,
        applied=applied,
        event=event,
        on_failure=on_failure,
        max_concurrency=max_concurrency,
    )

    def run(scenario: Scenario) -> Failure | None:
        return _failure(scenario, application, store, delivery)

    for seed in range(first, first + seeds):
        scenario = generate(seed, backend, Settings, History)
        with _threads_begun() as begun:
            failure = run(scenario)
        if failure is not None:
            hint = _THREADS if any(thread.is_alive() for thread in begun) else ""
            scenario, failure = _shrunk(scenario, failure, run)
            text = replay.format(seed=seed, backend=backend)
            raise SimulationError(seed, scenario, failure, text, hint) from failure.error


# ---------------------------------------------------------------------- what can happen


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stays the same during a history. The plain values are those of the plainest one.

    Attributes:
        partitions: how many the feed has at the start.
        dialect: of the publisher. A handler sees no difference.
        page_size, checkpoint_every, vary: see `Publisher`.
        latency: longest time of a request without a fault, in seconds.
        store_latency: longest time of a request to the store, and of its reply.
        handling: longest time until the handler is called with a batch.
        max_concurrency: see `FeedConsumer.run`.
        batch_events, batch_bytes: `Limits.max_batch_events` and `Limits.max_batch_bytes`.
    """

    partitions: int = drawn(1, 1, 1, 2, 3, 4, 12)
    dialect: Literal["v2-draft", "v2-token"] = drawn("v2-token", "v2-draft", "v2-token")
    page_size: int = drawn(20, 1, 5, 20, 100)
    checkpoint_every: int = drawn(4, 1, 4, 30)
    vary: bool = drawn(False, False, True)
    latency: float = drawn(0.02, 0.005, 0.02, 0.3)
    store_latency: float = drawn(0.002, 0.001, 0.01, 0.2)
    handling: float = drawn(0.0, 0.0, 0.01, 0.3, 1.0)
    max_concurrency: int = drawn(3, 1, 3, 20)
    batch_events: int | None = drawn(None, None, None, 1, 7)
    batch_bytes: int = drawn(1024 * 1024, 1, 1_000, 1024 * 1024)


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _publish(count: int, entities: int) -> str:
    of = "" if entities == 1 else f" of up to {_number(min(entities, count), 'entity', 'entities')}"
    return f"{_number(count, 'event is', 'events are')} published{of}"


def _split(which: int, parts: int, method: str) -> str:
    how = "start after it" if method == "starts-after" else "take over its cursor"
    into = _number(parts, "partition", "partitions")
    return f"a partition (number {which} of the open ones) is split into {into} that {how}"


def _fault(kind: str, on: str, part: float, seconds: float, behind: float) -> str:
    requests = {"both": "requests", "fetch": "fetches"}.get(on, "discoveries")
    what = FAULTS[kind].replace("some seconds", f"{behind:g} s")
    return f"{part:.0%} of the {requests} {what}, for {seconds:g} s"


def _kill(moment: str | None) -> str:
    return "the process is killed" + (f" {moment} of the next batch" if moment else "")


class History:
    """One run of a scenario. A step of a scenario is one of the methods that are marked."""

    def __init__(
        self, scenario: Scenario, application: Application, store: CursorStore, delivery: Delivery
    ) -> None:
        settings: Settings = scenario.settings
        random, pages = Random(f"history {scenario.seed}"), Random(f"pages {scenario.seed}")
        seed = pages.randrange(2**32) if settings.vary else None
        self.error: BaseException | None = None
        self._scenario = scenario
        began = anyio.current_time()
        self.trace = trace = Trace(lambda: anyio.current_time() - began)
        self._feed = feed = Feed(
            lambda: new_publisher(
                settings.partitions,
                settings.dialect,
                settings.page_size,
                settings.checkpoint_every,
                seed,
            ),
            latency=settings.latency,
            random=random,
            trace=trace,
        )
        self._oracle = oracle = Oracle(feed.published, delivery, trace)
        self._trouble = Trouble(latency=settings.store_latency, random=random, trace=trace)
        calls = Calls(oracle)
        self._world = World(
            application=application,
            feed=feed,
            store=store,
            model=StoreModel(oracle, calls.saved, trace),
            trouble=self._trouble,
            oracle=oracle,
            calls=calls,
            trace=trace,
            limits=Limits(
                max_batch_events=settings.batch_events, max_batch_bytes=settings.batch_bytes
            ),
            max_concurrency=settings.max_concurrency,
            handling=settings.handling,
        )
        self._process: Process | None = None
        self._processes = 0
        self._down_until = 0.0
        self._calm_since = float("inf")

    # ------------------------------------------------------------------ steps

    @step(_publish, weight=35, count=between(1, 40), entities=one_of(1, 3, 12))
    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self._feed.publish(number * 7 % entities)

    @step(
        _split,
        weight=15,
        which=between(0, 7),
        parts=between(1, 3),
        method=one_of("starts-after", "cursor-from"),
    )
    def split(self, which: int, parts: int, method: SplitMethod) -> None:
        """Split one of the open partitions."""
        self._feed.split(which, parts, method)

    @step(
        _fault,
        weight=15,
        share=0.6,
        kind=one_of(*FAULTS),
        on=one_of("discovery", "fetch", "both"),
        part=one_of(0.2, 0.5, 1.0),
        seconds=one_of(0.1, 2.0, 2.0, 10.0, 10.0, 100.0),
        behind=one_of(0.5, 3.0, 10.0),
    )
    def fault(self, kind: str, on: Target, part: float, seconds: float, behind: float) -> None:
        """Begin a fault of the network or the publisher."""
        self._feed.faults.append(Fault(kind, on, part, self.trace.now() + seconds, behind))

    @step(
        lambda part, seconds: f"{part:.0%} of the store's operations fail, for {seconds:g} s",
        weight=5,
        share=0.4,
        part=one_of(0.1, 0.5, 1.0),
        seconds=one_of(0.1, 3.0),
    )
    def store_fails(self, part: float, seconds: float) -> None:
        """Let operations of the store fail for some time, before they take effect or after."""
        self._trouble.failing = part
        self._trouble.failing_until = self.trace.now() + seconds

    @step(
        lambda seconds: f"the store's operations take up to a minute, for {seconds:g} s",
        weight=3,
        share=0.3,
        seconds=one_of(1.0, 20.0),
    )
    def store_stalls(self, seconds: float) -> None:
        """Let operations of the store take longer than a save may take, for some time."""
        self._trouble.stalled_until = self.trace.now() + seconds

    @step(_kill, weight=25, moment=one_of(None, *get_args(Moment)))
    def kill(self, moment: Moment | None) -> None:
        """Kill the process, at once or at a moment of its next batch."""
        if self._process is not None and moment is not None:
            self._process.dies = moment
        elif self._process is not None:
            self._process.kill()

    @step(
        lambda seconds: f"the process is killed, and starts again after {seconds:g} s",
        weight=4,
        seconds=one_of(1.0, 30.0),
    )
    def rest(self, seconds: float) -> None:
        """Let no process run for some time."""
        self._down_until = self.trace.now() + seconds
        self.kill(None)

    @step(lambda: "the process is cancelled", weight=6)
    def cancel(self) -> None:
        """Cancel the process."""
        if self._process is not None:
            self._process.scope.cancel()

    @step(lambda: "the consumer is stopped, and its process starts again", weight=6)
    def stop(self) -> None:
        """Let the process finish what is in flight."""
        if self._process is not None:
            self._process.stop()

    @step(lambda: f"the process pauses for {_PAUSE_SECONDS:g} s", weight=4)
    def pause(self) -> None:
        """Let the process handle nothing for some time."""
        if self._process is not None:
            self._process.paused_until = self.trace.now() + _PAUSE_SECONDS

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._live)
            for each in self._scenario.steps:
                await anyio.sleep(each.after)
                self.trace.add("{}", each)
                getattr(self, each.do)(**each.how)
            await self._settle()
            tasks.cancel_scope.cancel()
        self._process = None
        await self._look()
        self._oracle.check()
        ended = False
        with anyio.move_on_after(_SETTLE_SECONDS):
            ended = await self._one_life(follow=False)
        if not ended:
            self._oracle.violated("end", "a consumer without follow does not end")
        self._check_progress()
        self._oracle.check()

    async def _live(self) -> None:
        """Start a process, and another one whenever it has ended."""
        while True:
            await anyio.sleep(max(0.0, self._down_until - self.trace.now()))
            await self._one_life(follow=True)
            await anyio.sleep(_RESTART_SECONDS)

    async def _one_life(self, *, follow: bool) -> bool:
        """Run one process. Return whether it ended by itself and without an error."""
        self._processes += 1
        process = self._process = Process(self._world, self._processes, follow=follow)
        self.trace.add("a process starts")
        ended = await process.run()
        self._process = None
        if process.error is not None:
            self._judge(process.error, dead=process.dead)
        await self._look()
        return ended

    async def _look(self) -> None:
        await self._world.application.look(self._world.store, self._oracle)

    def _judge(self, error: BaseException, *, dead: bool) -> None:
        self.trace.add("the process ends with {}: {}", type(error).__name__, error)
        # A save whose reply was lost, or that was given up, may fence the next one.
        fenced = isinstance(error, FencedError) and not self._trouble.failures
        of_the_feed = isinstance(error, FeedError) and not isinstance(error, _NEVER_RIGHT)
        expected = is_simulated(error) or (of_the_feed and not fenced)
        late = self.trace.now() > self._calm_since + _GRACE_SECONDS
        if not dead and (late or not expected):
            self.error = self.error or error
            self._oracle.violated("error", f"{type(error).__name__}: {error}")

    async def _settle(self) -> None:
        """End all faults, and wait until every event is handled."""
        self._feed.faults.clear()
        self._trouble.failing_until = self._trouble.stalled_until = 0.0
        self._calm_since = self.trace.now()
        self.trace.add("all faults have ended")
        waited, left = 0, self._oracle.left()
        while left and waited < _SETTLE_SECONDS and not self._oracle.violations:
            await anyio.sleep(1.0)
            before, left = left, self._oracle.left()
            waited = waited + 1 if left == before else 0
        self._check_progress()

    def _check_progress(self) -> None:
        left, total = self._oracle.left(), sum(self._feed.published.values())
        if left:
            self._oracle.violated("progress", f"{left} of {total} events were never handled")


# ---------------------------------------------------------------------- one history


def _failure(
    scenario: Scenario, application: Application, make_store: MakeStore, delivery: Delivery
) -> Failure | None:
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

    with _silenced(), _folder() as folder:
        try:
            run_in_virtual_time(
                lambda: main(folder), backend=scenario.backend, seed=f"run {scenario.seed}"
            )
        except ViolationError as violation:
            history = histories[0]
            error = history.error if violation.rule == "error" else None
            return Failure(violation.rule, str(violation), error, history.trace.lines)
        except Exception as error:
            if not histories:
                raise  # the user's own factory of stores
            text = "".join(traceback.format_exception(error))
            rule = f"crash {type(error).__name__}"
            return Failure(rule, text, error, histories[0].trace.lines)
    return None


def _shrunk(
    scenario: Scenario, failure: Failure, run: Callable[[Scenario], Failure | None]
) -> tuple[Scenario, Failure]:
    """Return a smaller scenario with the same failure, and what it came to."""
    found = [failure]

    def fails(smaller: Scenario) -> bool:
        other = run(smaller)
        if other is None or other.rule != failure.rule:
            return False
        found.append(other)
        return True

    return shrink(scenario, fails, max_runs=_SHRINK_RUNS), found[-1]


def _up_to_the_violation(trace: list[str]) -> list[str]:
    """Return the lines of a trace up to the first violation; all without one."""
    found = (number for number, line in enumerate(trace, 1) if "  violated: " in line)
    return trace[: next(found, len(trace))]


@contextmanager
def _folder() -> Iterator[Path]:
    """Give an empty directory for one history, where possible in memory."""
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="feedapi-", dir=base) as folder:
        yield Path(folder)


@contextmanager
def _silenced() -> Iterator[None]:
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
