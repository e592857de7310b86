"""One history: what can happen in it, and how it runs from its start to its end."""

from __future__ import annotations

from random import Random
from typing import Literal

import anyio

from feedapi_client import (
    CommitOrderError,
    CursorStore,
    FeedError,
    FeedKey,
    FencedError,
    LineageError,
)
from feedapi_client.testing.publisher import Fault, FaultTarget, Publisher, SplitMethod
from feedapi_client.testing.publisher.faults import CutLine, Hang, Lag, Reset, Status
from feedapi_client.testing.simulator.oracle import Delivery, Oracle, Trace
from feedapi_client.testing.simulator.process import (
    FEED,
    MOMENTS,
    Application,
    Moment,
    Process,
    Settings,
    StoreTrouble,
    World,
    is_simulated,
)
from feedapi_client.testing.simulator.scenario import Scenario, one_of, step

Event = Literal["kill", "rest", "cancel", "stop", "pause"]

_SETTLE_SECONDS = 600
"""Virtual time after the last fault, or after an event, within which the next one must come."""
_GRACE_SECONDS = 90.0
"""Virtual time after the last fault for which an error may still be a result of it."""
_RESTART_SECONDS = 0.5
_PAUSE_SECONDS = 10.0
_DOWN_SECONDS = 30.0
_RETRY = {"retry-after": "1"}
_FAULTS = (
    *(Status(code, headers=_RETRY) for code in (404, 429, 503)),
    *(Reset(), Reset(after_lines=0), Reset(after_lines=5), Hang()),
    *(CutLine(), CutLine(after_lines=2), Lag(3.0)),
)
_NEVER_RIGHT = (CommitOrderError, LineageError)
"""Errors that no failure of the simulation justifies."""


class History:
    """One run of a scenario. A step of a scenario is one of the methods that are marked."""

    def __init__(
        self, scenario: Scenario, application: Application, store: CursorStore, delivery: Delivery
    ) -> None:
        settings: Settings = scenario.settings
        random, began = Random(f"history {scenario.seed}"), anyio.current_time()
        self.trace = Trace(lambda: anyio.current_time() - began)
        self._publisher = Publisher(
            settings.partitions,
            page_size=settings.page_size,
            checkpoint_every=settings.checkpoint_every,
            seed=random.randrange(2**32),
        )
        self._publisher.vary, self._publisher.clock = settings.vary, self.trace.now
        self._oracle = Oracle(delivery, self.trace)
        self._world = World(
            application=application,
            store=store,
            publisher=self._publisher,
            oracle=self._oracle,
            settings=settings,
            random=random,
            trace=self.trace,
        )
        self._scenario = scenario
        self._process: Process | None = None
        self._down_until = 0.0
        self._calm_since = float("inf")

    # ------------------------------------------------------------------ steps

    @step(weight=35, count=one_of(*range(1, 41)), entities=one_of(1, 3, 12))
    def publish(self, count: int, entities: int) -> None:
        published = self._oracle.published
        for number in range(count):
            entity = number * 7 % entities
            n = published[entity] = published.get(entity, 0) + 1
            self._publisher.publish(entity, {"entity": entity, "n": n})

    @step(
        weight=15,
        which=one_of(*range(8)),
        parts=one_of(1, 2, 3),
        method=one_of("starts-after", "cursor-from"),
    )
    def split(self, which: int, parts: int, method: SplitMethod) -> None:
        partitions = self._publisher.open_partitions()
        parent = partitions[which % len(partitions)]
        if self._publisher.partitions[parent].starts_after is not None:
            # A partition can't say both what it starts after and whose cursors it takes over.
            method = "starts-after"
        self._publisher.split(parent, parts, method=method)

    @step(
        weight=15,
        share=0.6,
        fault=one_of(*_FAULTS),
        on=one_of("discovery", "fetch", "any"),
        part=one_of(0.2, 0.5, 1.0),
        seconds=one_of(0.1, 2.0, 2.0, 10.0, 10.0, 100.0),
    )
    def fault(self, fault: Fault, on: FaultTarget, part: float, seconds: float) -> None:
        self._publisher.fail(fault, on=on, seconds=seconds, share=part)

    @step(
        weight=8,
        share=0.5,
        how=one_of("fails", "stalls"),
        part=one_of(0.1, 0.5, 1.0),
        seconds=one_of(0.1, 3.0, 20.0),
    )
    def store_fault(self, how: StoreTrouble, part: float, seconds: float) -> None:
        self._world.store_faults.append((how, part, self.trace.now() + seconds))

    @step(weight=30, moment=one_of(*MOMENTS))
    def kill(self, moment: Moment) -> None:
        if self._process is not None:
            self._process.dies = moment

    @step(weight=24, what=one_of("kill", "kill", "rest", "cancel", "stop", "pause"))
    def life(self, what: Event) -> None:
        """Let something happen to the process that runs now: `rest` is a kill and a pause."""
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
            process.consumer.stop()
        else:
            process.paused_until = self.trace.now() + _PAUSE_SECONDS

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._live)
            for each in self._scenario.steps:
                await anyio.sleep(each.after)
                self.trace.add("{}", each)
                getattr(self, each.do)(**each.how)
            await self._settle()
            tasks.cancel_scope.cancel()
        self._calm_since = -_GRACE_SECONDS  # no error is justified any more
        await self._look()
        self._oracle.check()
        ended = False
        with anyio.move_on_after(_SETTLE_SECONDS):
            ended = await self._one_life(follow=False)
        if not ended:
            self._oracle.violated("end", "a consumer without follow does not end")
        self._oracle.check()

    async def _live(self) -> None:
        while True:
            await anyio.sleep(max(0.0, self._down_until - self.trace.now()))
            await self._one_life(follow=True)
            await anyio.sleep(_RESTART_SECONDS)

    async def _one_life(self, *, follow: bool) -> bool:
        """Run one process. Return whether it ended by itself and without an error."""
        self._oracle.began()
        process = self._process = Process(self._world, follow=follow)
        self.trace.add("a process starts")
        ended = await process.run()
        self._process = None
        if process.error is not None:
            self._judge(process.error, dead=process.dead)
        await self._look()
        return ended

    async def _look(self) -> None:
        """Check what is durable, whether or not the process has heard of it."""
        world = self._world
        self._oracle.stored(await world.store.load(FeedKey(FEED)))
        await world.application.look(world.store, self._oracle)

    def _judge(self, error: BaseException, *, dead: bool) -> None:
        self.trace.add("the process ends with {}: {}", type(error).__name__, error)
        # A save whose reply was lost, or that was given up, may fence the next one.
        store_failed = any(each.do == "store_fault" for each in self._scenario.steps)
        fenced = isinstance(error, FencedError) and not store_failed
        of_the_feed = isinstance(error, FeedError) and not isinstance(error, _NEVER_RIGHT)
        expected = is_simulated(error) or (of_the_feed and not fenced)
        late = self.trace.now() > self._calm_since + _GRACE_SECONDS
        if not dead and (late or not expected):
            self._oracle.violated("error", f"{type(error).__name__}: {error}", error)

    async def _settle(self) -> None:
        self._publisher.heal()
        self._world.store_faults.clear()
        self._calm_since = self.trace.now()
        self.trace.add("all faults have ended")
        waited, left = 0, self._oracle.left()
        while left and waited < _SETTLE_SECONDS and not self._oracle.violations:
            await anyio.sleep(1.0)
            before, left = left, self._oracle.left()
            waited = waited + 1 if left == before else 0
        if left:
            total = sum(self._oracle.published.values())
            self._oracle.violated("progress", f"{left} of {total} events were never handled")
