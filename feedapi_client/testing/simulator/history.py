"""One history: what can happen in it, and how it runs from its start to its end."""

from __future__ import annotations

from functools import partial
from random import Random

import anyio

from feedapi_client import (
    CommitOrderError,
    CursorStore,
    FeedError,
    FeedKey,
    FencedError,
    LineageError,
)
from feedapi_client.testing.publisher import Publisher, SplitMethod
from feedapi_client.testing.simulator.network import (
    FAULTS,
    FEED,
    STORE_FAULTS,
    Faults,
    InjectedFault,
    SimulatedFeed,
    Target,
)
from feedapi_client.testing.simulator.oracle import Delivery, Oracle, StoreModel, Trace
from feedapi_client.testing.simulator.process import (
    MOMENTS,
    Application,
    Moment,
    Process,
    Settings,
    World,
    is_simulated,
)
from feedapi_client.testing.simulator.scenario import Scenario, one_of, step

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
_LIFE = {
    "kill": "is killed",
    "rest": f"is killed, and starts again after {_DOWN_SECONDS:g} s",
    "cancel": "is cancelled",
    "stop": "is stopped, and starts again",
    "pause": f"pauses for {_PAUSE_SECONDS:g} s",
}


class History:
    """One run of a scenario. A step of a scenario is one of the methods that are marked."""

    def __init__(
        self, scenario: Scenario, application: Application, store: CursorStore, delivery: Delivery
    ) -> None:
        settings: Settings = scenario.settings
        random, began = Random(f"history {scenario.seed}"), anyio.current_time()
        self.trace = Trace(lambda: anyio.current_time() - began)
        make = partial(
            Publisher,
            settings.partitions,
            page_size=settings.page_size,
            checkpoint_every=settings.checkpoint_every,
            seed=random.randrange(2**32) if settings.vary else None,
        )
        self._faults = Faults(random, self.trace)
        self._feed = SimulatedFeed(make, self._faults, latency=settings.latency)
        self._oracle = Oracle(self._feed.published, delivery, self.trace)
        self._world = World(
            application=application,
            store=store,
            feed=self._feed,
            oracle=self._oracle,
            model=StoreModel(self._oracle),
            settings=settings,
        )
        self._scenario = scenario
        self._process: Process | None = None
        self._down_until = 0.0
        self._calm_since = float("inf")

    # ------------------------------------------------------------------ steps

    @step(
        "{count:event is|events are} published (entities: {entities})",
        weight=35,
        count=one_of(*range(1, 41)),
        entities=one_of(1, 3, 12),
    )
    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self._feed.publish(number * 7 % entities)

    @step(
        "a partition (number {which} of the open ones) is split into {parts} that {method}",
        weight=15,
        words=_METHODS,
        which=one_of(*range(8)),
        parts=one_of(1, 2, 3),
        method=one_of(*_METHODS),
    )
    def split(self, which: int, parts: int, method: SplitMethod) -> None:
        """Split one of the open partitions."""
        self._feed.split(which, parts, method)

    @step(
        "{part:.0%} of the {on} {kind}, for {seconds:g} s",
        weight=15,
        share=0.6,
        words=FAULTS,
        kind=one_of(*FAULTS),
        on=one_of("discoveries", "fetches", "requests"),
        part=one_of(0.2, 0.5, 1.0),
        seconds=one_of(0.1, 2.0, 2.0, 10.0, 10.0, 100.0),
    )
    def fault(self, kind: str, on: Target, part: float, seconds: float) -> None:
        """Begin a fault of the network or the publisher."""
        self._faults.active.append(InjectedFault(kind, on, part, self.trace.now() + seconds))

    @step(
        "{part:.0%} of the store's operations {kind}, for {seconds:g} s",
        weight=8,
        share=0.5,
        words=STORE_FAULTS,
        kind=one_of(*STORE_FAULTS),
        part=one_of(0.1, 0.5, 1.0),
        seconds=one_of(0.1, 3.0, 20.0),
    )
    def store_fault(self, kind: str, part: float, seconds: float) -> None:
        """Let operations of the store go wrong for some time."""
        self.fault(kind, "operations", part, seconds)

    @step("the process is killed {moment} of the next batch", weight=30, moment=one_of(*MOMENTS))
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
            process.consumer.stop()
        else:
            process.paused_until = self.trace.now() + _PAUSE_SECONDS

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._live)
            for each in self._scenario.steps:
                await anyio.sleep(each.after)
                self.trace.add("{}", self._scenario.tell(each))
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
        """Start a process, and another one whenever it has ended."""
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
        world = self._world
        world.model.loaded(await world.store.load(FeedKey(FEED)))  # a reason of what is wrong below
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
        """End all faults, and wait until every event is handled."""
        self._faults.active.clear()
        self._calm_since = self.trace.now()
        self.trace.add("all faults have ended")
        waited, left = 0, self._oracle.left()
        while left and waited < _SETTLE_SECONDS and not self._oracle.violations:
            await anyio.sleep(1.0)
            before, left = left, self._oracle.left()
            waited = waited + 1 if left == before else 0
        if left:
            total = sum(self._feed.published.values())
            self._oracle.violated("progress", f"{left} of {total} events were never handled")
