"""One history: what can happen in it, and how it runs from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import get_args

import anyio

from feedapi_client import (
    CommitOrderError,
    CursorStore,
    FeedError,
    FencedError,
    Limits,
    LineageError,
)
from feedapi_client.testing.publisher import Publisher, SplitMethod
from feedapi_client.testing.simulator.network import FAULTS, Fault, Feed, Target
from feedapi_client.testing.simulator.oracle import Delivery, Oracle, StoreModel, Trace
from feedapi_client.testing.simulator.process import (
    MOMENTS,
    Application,
    Moment,
    Process,
    Trouble,
    World,
    is_simulated,
)
from feedapi_client.testing.simulator.scenario import Scenario, between, drawn, one_of, step

_SETTLE_SECONDS = 600
"""Virtual time after the last fault, or after an event, within which the next one must come."""
_GRACE_SECONDS = 90.0
"""Virtual time after the last fault for which an error may still be a result of it."""
_RESTART_SECONDS = 0.5
_PAUSE_SECONDS = 10.0
_DOWN_SECONDS = 30.0
_NEVER_RIGHT = (CommitOrderError, LineageError)
"""Errors that no failure of the simulation justifies."""
_METHODS = {"starts-after": "start after it", "cursor-from": "take over its cursor"}
_STORE = {"fails": "fail", "stalls": "take up to a minute"}
_LIFE = {
    "kill": "is killed",
    "rest": f"is killed, and starts again after {_DOWN_SECONDS:g} s",
    "cancel": "is cancelled",
    "stop": "is stopped, and starts again",
    "pause": f"pauses for {_PAUSE_SECONDS:g} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stays the same during a history. The first value is that of the plainest one.

    Attributes:
        partitions: how many the feed has at the start.
        page_size, checkpoint_every, vary: see `Publisher`.
        latency: longest time of a request without a fault, in seconds.
        store_latency: longest time of a request to the store, and of its reply.
        handling: longest time until the handler is called with a batch.
        max_concurrency: see `FeedConsumer.run`.
        batch_events, batch_bytes: `Limits.max_batch_events` and `Limits.max_batch_bytes`.
    """

    partitions: int = drawn(1, 1, 1, 2, 3, 4, 12)
    page_size: int = drawn(20, 1, 5, 20, 100)
    checkpoint_every: int = drawn(4, 1, 4, 30)
    vary: bool = drawn(False, False, True)
    latency: float = drawn(0.02, 0.005, 0.02, 0.3)
    store_latency: float = drawn(0.002, 0.001, 0.01, 0.2)
    handling: float = drawn(0.0, 0.0, 0.01, 0.3, 1.0)
    max_concurrency: int = drawn(3, 1, 3, 20)
    batch_events: int | None = drawn(None, None, None, 1, 7)
    batch_bytes: int = drawn(1024 * 1024, 1, 1_000, 1024 * 1024)


class History:
    """One run of a scenario. A step of a scenario is one of the methods that are marked.

    Attributes:
        trace: everything that happened.
        error: the exception that a process ended with, where that is the failure.
    """

    def __init__(
        self, scenario: Scenario, application: Application, store: CursorStore, delivery: Delivery
    ) -> None:
        settings: Settings = scenario.settings
        random, began = Random(f"history {scenario.seed}"), anyio.current_time()
        self.error: BaseException | None = None
        self.trace = trace = Trace(lambda: anyio.current_time() - began)
        make = partial(
            Publisher,
            settings.partitions,
            page_size=settings.page_size,
            checkpoint_every=settings.checkpoint_every,
            seed=random.randrange(2**32) if settings.vary else None,
        )
        feed = Feed(make, latency=settings.latency, random=random, trace=trace)
        self._oracle = Oracle(feed.published, delivery, trace)
        self._world = World(
            application=application,
            store=store,
            feed=feed,
            oracle=self._oracle,
            model=StoreModel(self._oracle),
            trouble=Trouble(latency=settings.store_latency, random=random, trace=trace),
            limits=Limits(
                max_batch_events=settings.batch_events, max_batch_bytes=settings.batch_bytes
            ),
            max_concurrency=settings.max_concurrency,
            handling=settings.handling,
        )
        self._steps = scenario.steps
        self._process: Process | None = None
        self._processes = 0
        self._down_until = 0.0
        self._calm_since = float("inf")

    # ------------------------------------------------------------------ steps

    @step(
        "{count:event is|events are} published of up to {entities:entity|entities}",
        weight=35,
        count=between(1, 40),
        entities=one_of(1, 3, 12),
    )
    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self._world.feed.publish(number * 7 % entities)

    @step(
        "a partition (number {which} of the open ones) is split into {parts} that {method}",
        weight=15,
        words=_METHODS,
        which=between(0, 7),
        parts=between(1, 3),
        method=one_of(*_METHODS),
    )
    def split(self, which: int, parts: int, method: SplitMethod) -> None:
        """Split one of the open partitions."""
        self._world.feed.split(which, parts, method)

    @step(
        "{part:.0%} of the {on} {kind}, for {seconds:g} s",
        weight=15,
        share=0.6,
        words=FAULTS,
        kind=one_of(*FAULTS),
        on=one_of(*get_args(Target)),
        part=one_of(0.2, 0.5, 1.0),
        seconds=one_of(0.1, 2.0, 2.0, 10.0, 10.0, 100.0),
    )
    def fault(self, kind: str, on: Target, part: float, seconds: float) -> None:
        """Begin a fault of the network or the publisher."""
        self._world.feed.faults.append(Fault(kind, on, part, self.trace.now() + seconds))

    @step(
        "{part:.0%} of the store's operations {kind}, for {seconds:g} s",
        weight=8,
        share=0.5,
        words=_STORE,
        kind=one_of("fails", "fails", "stalls"),
        part=one_of(0.1, 0.5, 1.0),
        seconds=one_of(0.1, 3.0, 20.0),
    )
    def store(self, kind: str, part: float, seconds: float) -> None:
        """Let operations of the store go wrong for some time."""
        trouble = self._world.trouble
        trouble.kind, trouble.part, trouble.until = kind, part, self.trace.now() + seconds

    @step("the process is killed {moment} of the next batch", weight=18, moment=one_of(*MOMENTS))
    def kill(self, moment: Moment) -> None:
        """Kill the process at a moment of its next batch."""
        if self._process is not None:
            self._process.dies = moment

    @step("the process {what}", weight=24, words=_LIFE, what=one_of("kill", *_LIFE))
    def life(self, what: str) -> None:
        """Let something happen to the process that runs now, if one does."""
        process = self._process
        if what == "rest":
            self._down_until = self.trace.now() + _DOWN_SECONDS
        if process is None:
            return
        if what in ("kill", "rest"):
            process.kill()
        elif what == "cancel":
            process.scope.cancel()
        elif what == "stop":
            process.stop()
        else:
            process.paused_until = self.trace.now() + _PAUSE_SECONDS

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._live)
            for each in self._steps:
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
        fenced = isinstance(error, FencedError) and not self._world.trouble.failures
        of_the_feed = isinstance(error, FeedError) and not isinstance(error, _NEVER_RIGHT)
        expected = is_simulated(error) or (of_the_feed and not fenced)
        late = self.trace.now() > self._calm_since + _GRACE_SECONDS
        if not dead and (late or not expected):
            self.error = self.error or error
            self._oracle.violated("error", f"{type(error).__name__}: {error}")

    async def _settle(self) -> None:
        """End all faults, and wait until every event is handled."""
        self._world.feed.faults.clear()
        self._world.trouble.kind = ""
        self._calm_since = self.trace.now()
        self.trace.add("all faults have ended")
        waited, left = 0, self._oracle.left()
        while left and waited < _SETTLE_SECONDS and not self._oracle.violations:
            await anyio.sleep(1.0)
            before, left = left, self._oracle.left()
            waited = waited + 1 if left == before else 0
        self._check_progress()

    def _check_progress(self) -> None:
        left, total = self._oracle.left(), sum(self._world.feed.published.values())
        if left:
            self._oracle.violated("progress", f"{left} of {total} events were never handled")
