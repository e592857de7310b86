"""Run one scenario: the publisher, the database and the process on virtual time."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from random import Random

import anyio

from feedapi_client.testing.simulator.clock import run_in_virtual_time, virtual_clock
from feedapi_client.testing.simulator.faults import Fault, FaultKind, Faults, Target
from feedapi_client.testing.simulator.life import Life, Process
from feedapi_client.testing.simulator.oracle import Oracle, ViolationError
from feedapi_client.testing.simulator.scenario import Scenario, Settings, Step
from feedapi_client.testing.simulator.store import Database
from feedapi_client.testing.simulator.trace import Trace
from feedapi_client.testing.simulator.transport import Deployment, SimulatedPublisher
from feedapi_client.testing.simulator.wire import PageStyle
from feedapi_client.testing.simulator.world import Dialect, Method, World

SETTLE_SECONDS = 600
"""Virtual time after the last fault within which every event must be applied."""
GRACE_SECONDS = 90.0
"""Virtual time after the last fault for which an error may still be a result of it."""
QUIET_SECONDS = 5.0
"""Virtual time for which a consumer at the end of the feed is still watched."""
_STATUS_SECONDS = 0.7


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        failure: the rule that was violated; None when all held.
        text: what happened, for people.
        record: everything that happened.
        effects: how many effects became durable.
        published: how many events there were.
        seconds: virtual time.
    """

    failure: str | None
    text: str
    record: Trace
    effects: int
    published: int
    seconds: float

    @property
    def trace(self) -> list[str]:
        """Everything that happened, with its virtual time."""
        return self.record.lines()

    @property
    def digest(self) -> str:
        """A digest of the trace: equal for two runs of one scenario."""
        return self.record.digest()


def run(scenario: Scenario) -> Outcome:
    """Run a scenario to its end. Two runs of one scenario are the same, step by step."""
    histories: list[History] = []

    async def main() -> None:
        history = History(scenario)
        histories.append(history)
        await history.run()

    failure: tuple[str, str] | None = None
    try:
        run_in_virtual_time(main, backend=scenario.backend, seed=f"run {scenario.seed}")
    except ViolationError as violation:
        failure = violation.rule, str(violation)
    except Exception as error:  # noqa: BLE001 - a crash of the simulation is a failure to show
        failure = f"crash {type(error).__name__}", "".join(traceback.format_exception(error))
    return _outcome(histories[0], failure)


def _outcome(history: History, failure: tuple[str, str] | None) -> Outcome:
    return Outcome(
        failure=failure[0] if failure else None,
        text=failure[1] if failure else "every event was applied in order",
        record=history.trace,
        effects=history.oracle.effects,
        published=history.world.total(),
        seconds=history.last_time,
    )


class History:
    """One run of a scenario. The steps are its methods."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.last_time = 0.0
        self._clock = virtual_clock(scenario.backend)
        settings = scenario.settings
        self.trace = Trace(self.now)
        self.world = World(
            settings.partitions,
            settings.dialect,
            last_cursor=settings.last_cursor,
            whole_lineage=settings.whole_lineage,
            now=self.now,
        )
        self.oracle = Oracle(
            self.world,
            transactional=settings.transactional,
            selected=settings.selected,
            trace=self.trace,
        )
        self.faults = Faults(self._random("faults"))
        self.publisher = self._publisher(settings)
        self.database = Database(
            random=self._random("database"),
            latency=settings.store_latency,
            trace=self.trace,
            on_effect=self.oracle.effect,
        )
        self._native = scenario.backend == "asyncio"
        self._application = self._random("application")
        self.life = Life(
            self.process,
            oracle=self.oracle,
            database=self.database,
            trace=self.trace,
            native=self._native,
            now=self.now,
        )
        self._store_fails_until = 0.0
        if settings.start == "last":
            self.database.on_first_save = self.oracle.started_at_the_end

    def now(self) -> float:
        """Return the virtual time."""
        self.last_time = now = self._clock()
        return now

    def _random(self, purpose: str) -> Random:
        # One stream for each purpose: a step left out does not change what the others draw.
        return Random(f"{purpose} {self.scenario.seed}")

    def _publisher(self, settings: Settings) -> SimulatedPublisher:
        return SimulatedPublisher(
            self.world,
            self.faults,
            style=PageStyle(
                settings.page_size, settings.checkpoint_every, settings.vary, settings.padding
            ),
            stream=settings.stream,
            latency=settings.latency,
            random=self._random("publisher"),
            trace=self.trace,
            now=self.now,
            observe=self.oracle.fetched,
        )

    def process(self, *, follow: bool = True) -> Process:
        """Return a new process of the application."""
        return Process(
            self.scenario.settings,
            self.publisher,
            self.database,
            self.oracle,
            self._application,
            native=self._native,
            follow=follow,
        )

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.life.run)
            tasks.start_soon(self._watch)
            for step in self.scenario.steps:
                await anyio.sleep(step.after)
                self.do(step)
            await self._settle()
            self.life.end()
            tasks.cancel_scope.cancel()
        self.oracle.check()
        await self._read_to_the_end()
        self.oracle.finished(self.database, self.process().key, self.publisher.stray_cursors)
        self.oracle.check()

    def do(self, step: Step) -> None:
        """Let a step happen."""
        self.trace.add("{}", step)
        getattr(self, step.do)(**step.how)

    async def _watch(self) -> None:
        limit, seen = self.scenario.settings.buffer_bytes, 0
        while True:
            await anyio.sleep(_STATUS_SECONDS)
            if self.now() >= self._store_fails_until:
                self.database.failing = 0.0
            process = self.life.process
            if process is not None:
                self.oracle.rate(process.transport)
            if len(self.trace) == seen:
                continue  # nothing has happened that could make a status untrue
            seen = len(self.trace)
            if process is not None and process.consumer is not None and not process.session.dead:
                self.oracle.status(process.consumer.status(), process.positions(), limit)

    async def _settle(self) -> None:
        """End all faults, and wait until every event is applied."""
        self.faults.clear()
        self.publisher.deployment = None
        self.database.failing = 0.0
        self._store_fails_until = 0.0
        self.life.calm_since = self.now() + GRACE_SECONDS
        self.trace.add("all faults have ended")
        for _ in range(SETTLE_SECONDS):
            if self.oracle.complete() or self.oracle.violations:
                break
            await anyio.sleep(1.0)
        self.oracle.progressed()
        if not self.oracle.violations:
            await anyio.sleep(QUIET_SECONDS)

    async def _read_to_the_end(self) -> None:
        """A last process without `follow` must end by itself."""
        process = self.process(follow=False)
        ended = False
        self.life.calm_since = 0.0
        with anyio.move_on_after(SETTLE_SECONDS):
            ended = await self.life.live(process)
        if not ended:
            self.oracle.violated("end", "a consumer without follow does not end")

    # ------------------------------------------------------------------ steps

    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self.world.publish(number * 7 % entities)

    def split(self, which: int, parts: int, method: Method) -> None:
        """Split one of the open partitions."""
        if self.world.version(self.now()).dialect == "v1":
            return  # version 1 has no way to say so
        writable = self.world.writable()
        self.world.split(writable[which % len(writable)].id, parts, method)

    def deploy(self, dialect: Dialect, seconds: float) -> None:
        """Deploy a new version, instance by instance."""
        versions = self.world.deploy(dialect)
        self.publisher.deployment = Deployment(versions, self.now() + seconds)

    def fault(
        self, kind: FaultKind, on: Target, share: float, seconds: float, behind: float = 0.0
    ) -> None:
        """Begin a fault of the network or the publisher."""
        self.faults.add(Fault(kind, on, share, self.now() + seconds, behind))

    def store_fails(self, share: float, seconds: float) -> None:
        """Let operations of the database fail for some time."""
        self.database.failing = share
        self._store_fails_until = self.now() + seconds

    def life_step(self, what: str, seconds: float = 0.0) -> None:
        """Let something happen to the process."""
        self.life.happens(what, seconds)
