"""Run one scenario: the publisher, the database and the process on virtual time."""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from feedapi_client.model import FeedKey
from feedapi_client.testing.simulator.clock import (
    run_in_virtual_time,
    sleep,
    uncollected,
    virtual_clock,
)
from feedapi_client.testing.simulator.faults import Fault, FaultKind, Faults, Target
from feedapi_client.testing.simulator.life import Happening, Life
from feedapi_client.testing.simulator.oracle import Oracle, ViolationError
from feedapi_client.testing.simulator.process import FEED, Process
from feedapi_client.testing.simulator.scenario import Scenario, Settings, Step
from feedapi_client.testing.simulator.shared import SharedSession
from feedapi_client.testing.simulator.silence import silenced
from feedapi_client.testing.simulator.store import STALL_SECONDS, Database
from feedapi_client.testing.simulator.trace import Trace
from feedapi_client.testing.simulator.transport import Deployment, SimulatedPublisher
from feedapi_client.testing.simulator.wall import WallClock
from feedapi_client.testing.simulator.wire import PageStyle
from feedapi_client.testing.simulator.world import Dialect, Method, World

SETTLE_SECONDS = 600
"""Virtual time after the last fault, or after an event, within which the next one must come."""
SHARED_SETTLE_SECONDS = 200
"""The same with several instances: no partition may be without one that reads it for long."""
GRACE_SECONDS = 90.0
"""Virtual time after the last fault for which an error may still be a result of it."""
QUIET_SECONDS = 5.0
"""Virtual time for which a consumer at the end of the feed is still watched."""
READ_BYTES = 65_536
"""Bytes of a response that arrive at once: what httpx reads from a socket at most."""
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
    """Run a scenario to its end. Two runs of one scenario are the same, step by step.

    The library's log is silent meanwhile: what goes wrong is part of the simulation.
    """
    with uncollected():
        return _run(scenario)


def _run(scenario: Scenario) -> Outcome:
    histories: list[History] = []

    async def main() -> None:
        history = History(scenario)
        histories.append(history)
        try:
            with history.wall.shown():
                await history.run()
        finally:
            history.last_time = history.now()

    failure: tuple[str, str] | None = None
    try:
        with silenced():
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
        self.now = virtual_clock(scenario.backend)
        """Returns the virtual time."""
        settings = scenario.settings
        self.trace = Trace(self.now)
        self.world = World(
            settings.partitions,
            settings.dialect,
            last_cursor=settings.last_cursor,
            whole_lineage=settings.whole_lineage,
            moving_cursors=settings.moving_cursors,
            noisy=settings.noisy,
            now=self.now,
        )
        self.oracle = Oracle(
            self.world,
            transactional=settings.transactional,
            selected=settings.selected,
            ordered=settings.ordered,
            shared=bool(settings.instances),
            trace=self.trace,
        )
        if settings.chosen:
            self.oracle.chosen = set(range(settings.chosen))
        self.wall = WallClock(self.now)
        self.lineage: dict[int, int] = {}
        """The parents that discovery leaves out, by child."""
        self.faults = Faults(self._random("faults"))
        self.publisher = self._publisher(settings)
        self.database = Database(
            random=self._random("database"),
            latency=settings.store_latency,
            reply_latency=settings.reply_latency,
            trace=self.trace,
            on_effect=self.oracle.effect,
        )
        self._native = scenario.backend == "asyncio"
        self._application = self._random("application")
        self._running: list[Process] = []
        self._processes = itertools.count(1)
        self.lives = [self._life() for _ in range(settings.instances or 1)]
        self.life = self.lives[0]
        self._others: list[Life] = []
        self._tasks: TaskGroup | None = None
        self._store_fails_until = 0.0
        self._stalls_end = 0.0
        if settings.start == "last":
            self.database.on_first_save = self.oracle.started_at_the_end

    def _random(self, purpose: str) -> Random:
        # One stream for each purpose: a step left out does not change what the others draw.
        return Random(f"{purpose} {self.scenario.seed}")

    def _publisher(self, settings: Settings) -> SimulatedPublisher:
        return SimulatedPublisher(
            self.world,
            self.faults,
            style=PageStyle(
                settings.page_size,
                settings.checkpoint_every,
                settings.vary,
                settings.padding,
                min(READ_BYTES, settings.buffer_bytes // 8),
            ),
            stream=settings.stream,
            latency=settings.latency,
            random=self._random("publisher"),
            trace=self.trace,
            now=self.now,
            observe=self.oracle.fetched,
        )

    def _life(self) -> Life:
        return Life(
            self.process,
            self._running,
            oracle=self.oracle,
            database=self.database,
            trace=self.trace,
            native=self._native,
            now=self.now,
        )

    def process(self, *, follow: bool = True) -> Process:
        """Return a new process of the application."""
        return Process(
            self.scenario.settings,
            self.publisher,
            self.database,
            self.oracle,
            self._application,
            number=next(self._processes),
            native=self._native,
            follow=follow,
            **self._given(),
        )

    def _given(self) -> dict[str, Any]:
        """Return which partitions the next process is to read, and which edges it is told.

        Its operator names no partition that is gone before the consumer ever saw it.
        """
        chosen, key = self.oracle.chosen, FeedKey(FEED, "default")
        known = {p.id for p in self.world.listed(self.now())}
        known.update(self.database.positions.get(key, ()))
        return {
            "partitions": None if chosen is None else frozenset(chosen),
            "lineage": {child: up for child, up in self.lineage.items() if child in known},
        }

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for life in self.lives:
                tasks.start_soon(life.run)
            tasks.start_soon(self._watch)
            for step in self.scenario.steps:
                await sleep(step.after)
                self.do(step)
            await self._settle()
            for life in self.lives:
                life.end()
            tasks.cancel_scope.cancel()
        self.oracle.check()
        if self._rightly_stopped:
            return
        await self._read_to_the_end()
        if not self._rightly_stopped:  # else what it is to read was gone before any process saw it
            self.oracle.finished(self.database, self.process().key, self.publisher.stray_cursors)
        self.oracle.check()

    def do(self, step: Step) -> None:
        """Let a step happen."""
        self.trace.add("{}", step)
        getattr(self, step.do)(**step.how)

    async def _watch(self) -> None:
        limit, seen = self.scenario.settings.buffer_bytes, 0
        while True:
            await sleep(_STATUS_SECONDS)
            if self.now() >= self._store_fails_until:
                self.database.failing = 0.0
            process = self.life.process
            if process is not None:
                self.oracle.rate(process.transport)
                self.oracle.ends(max(process.ends_by, self._hangs_until(process)), self.now())
            if len(self.trace) == seen:
                continue  # nothing has happened that could make a status untrue
            seen = len(self.trace)
            if process is not None and process.consumer is not None and not process.session.dead:
                # After a commit that was rolled back the library can't know what is stored.
                status = process.consumer.status()
                alone = not process.overlaps and not process.rolled_back
                self.oracle.status(status, process.positions(), limit, alone=alone)

    def _hangs_until(self, process: Process) -> float:
        """Until when no stop can end this process, whatever the library does."""
        session = process.session
        frozen = session.frozen_until if isinstance(session, SharedSession) else 0.0
        return max(self._stalls_end, frozen)

    async def _settle(self) -> None:
        """End all faults, and wait until every event is applied."""
        self.faults.clear()
        self.publisher.deployment = None
        self.database.failing = self.database.stalled_until = 0.0
        self._store_fails_until = 0.0
        for life in self.lives:
            life.calm_since = self.now() + GRACE_SECONDS
        self.oracle.calm = True
        for life in self._others:
            life.end()
        if self.scenario.settings.on_error == "park":
            self.life.happens("stop")  # a partition that is parked is read by the next iteration
        self.trace.add("all faults have ended")
        waited, done = 0, self.oracle.done
        patience = SHARED_SETTLE_SECONDS if self.scenario.settings.instances else SETTLE_SECONDS
        while waited < patience:
            if self.oracle.complete() or self.oracle.violations or self._rightly_stopped:
                break
            await sleep(1.0)
            waited, done = (waited + 1 if self.oracle.done == done else 0), self.oracle.done
        positions = self.database.positions.get(self.process().key, {})
        if not self.oracle.complete() and self.oracle.is_ambiguous(positions):
            self.life.rightly_stopped = True  # parked
        if self._rightly_stopped:
            return
        self.oracle.progressed()
        if not self.oracle.violations:
            await self._be_quiet()

    @property
    def _rightly_stopped(self) -> bool:
        return any(life.rightly_stopped for life in self.lives)

    async def _be_quiet(self) -> None:
        """Watch a consumer that has nothing to do."""
        for _ in range(round(SETTLE_SECONDS / QUIET_SECONDS)):
            process, effects, began = self.life.process, self.oracle.effects, self.now()
            before = process.transport.requests if process is not None else 0
            await sleep(QUIET_SECONDS)
            if effects != self.oracle.effects:
                continue  # with start="last" the oracle does not know before how much there is
            if process is not self.life.process or process is None:
                continue
            if process.paused_until > began:
                continue  # it reads on from where it stood, whatever another process applied
            self.oracle.idled(process.transport.requests - before)
            return

    async def _read_to_the_end(self) -> None:
        """A last process without `follow` must end by itself."""
        process = self.process(follow=False)
        ended = False
        self.life.calm_since = 0.0
        with anyio.move_on_after(SETTLE_SECONDS):
            ended = await self.life.live(process)
        if not ended and not self._rightly_stopped:
            self.oracle.violated("end", "a consumer without follow does not end")

    # ------------------------------------------------------------------ steps

    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self.world.publish(number * 7 % entities)

    def split(self, which: int, parts: int, method: Method, listed_after: float = 0.0) -> None:
        """Split one of the open partitions. Children that start after it may be listed later."""
        if self.world.version(self.now()).dialect == "v1":
            return  # version 1 has no way to say so
        writable = self.world.writable()
        parent = writable[which % len(writable)].id
        self.world.split(parent, parts, method, listed_after=listed_after)

    def merge(self, which: int) -> None:
        """Merge two open partitions that share their cursors, if there are two."""
        if self.world.version(self.now()).dialect == "v1":
            return
        writable = self.world.writable()
        pairs = [
            (one.id, other.id)
            for one in writable
            for other in writable
            if one.id < other.id and one.family == other.family
        ]
        if pairs:
            self.world.merge(*pairs[which % len(pairs)])

    def split_unnamed(self, which: int, parts: int, seconds: float) -> None:
        """Split an open partition while no process runs. Discovery leaves out the parent (R8)."""
        if self.world.version(self.now()).dialect == "v1":
            return
        self.life.happens("down", seconds)
        writable = self.world.writable()
        parent = writable[which % len(writable)].id
        for child in self.world.split(parent, parts, "starts-after", forgotten=True):
            self.lineage[child] = parent

    def choose_descendants(self) -> None:
        """Read the partitions, too, that have come from those that are read."""
        if self.oracle.chosen is not None:
            self.oracle.chosen |= self.world.descendants(self.oracle.chosen)
            # Not stopped: a consumer that is stopped may be entered again, with the same selection.
            self.life.happens("cancel")

    def set_clock(self, seconds: float) -> None:
        """Set the consumer's clock: it is ahead of the publisher's by so much."""
        self.wall.off_by = seconds

    def second(self, seconds: float) -> None:
        """Let a second process of the same name run for some time."""
        assert self._tasks is not None
        self._tasks.start_soon(self._second, seconds)

    async def _second(self, seconds: float) -> None:
        life = self._life()
        self._others.append(life)
        with anyio.move_on_after(seconds):
            await life.live(self.process())

    def deploy(self, dialect: Dialect, seconds: float) -> None:
        """Deploy a new version, instance by instance."""
        versions = self.world.deploy(dialect)
        self.publisher.deployment = Deployment(versions, self.now() + seconds)

    def fault(
        self,
        kind: FaultKind,
        on: Target,
        share: float,
        seconds: float,
        behind: float = 0.0,
        parity: int | None = None,
    ) -> None:
        """Begin a fault of the network or the publisher."""
        self.faults.add(Fault(kind, on, share, self.now() + seconds, behind, parity))

    def store_fails(self, share: float, seconds: float) -> None:
        """Let operations of the database fail for some time."""
        self.database.failing = share
        self._store_fails_until = self.now() + seconds

    def store_stalls(self, seconds: float) -> None:
        """Let operations of the database take longer than a save may take, for some time."""
        self.database.stalled_until = self.now() + seconds
        self._stalls_end = self.database.stalled_until + STALL_SECONDS

    def life_step(self, what: Happening, seconds: float = 0.0, which: int = 0) -> None:
        """Let something happen to the process, or to one of several instances."""
        self.lives[which].happens(what, seconds)
