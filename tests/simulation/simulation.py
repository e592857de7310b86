"""Run one scenario: the publisher, the database and the process on virtual time."""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from feedapi_client.testing.simulator.simulation import silenced
from tests.simulation.clock import (
    run_in_virtual_time,
    sleep,
    uncollected,
    virtual_clock,
)
from tests.simulation.faults import FaultKind, Faults, InjectedFault, Target
from tests.simulation.incidents import (
    LeaseReplica,
    Operators,
    Order,
    Replica,
    set_clock,
)
from tests.simulation.oracle import Oracle, ViolationError
from tests.simulation.process import Process
from tests.simulation.scenario import Scenario, Settings, Step
from tests.simulation.shared import SharedSession, of_another_version
from tests.simulation.store import STALL_SECONDS, SimulatedDatabase
from tests.simulation.supervisor import ProcessEvent, Supervisor
from tests.simulation.trace import Trace
from tests.simulation.transport import Deployment, SimulatedPublisher
from tests.simulation.wall import WallClock
from tests.simulation.wire import PageStyle
from tests.simulation.world import Dialect, Method, World

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
_STOPPED_SECONDS = 30.0
"""For so long an operator stops all processes, who changes a stored position."""


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
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


def run(scenario: Scenario) -> SimulationOutcome:
    """Run a scenario to its end. Two runs of one scenario are the same, step by step.

    The library's log is silent meanwhile: what goes wrong is part of the simulation.
    """
    with uncollected():
        return _run(scenario)


def _run(scenario: Scenario) -> SimulationOutcome:
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
    except Exception as error:
        failure = f"crash {type(error).__name__}", "".join(traceback.format_exception(error))
    return _outcome(histories[0], failure)


def _outcome(history: History, failure: tuple[str, str] | None) -> SimulationOutcome:
    return SimulationOutcome(
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
            manners=settings.manners,
            now=self.now,
        )
        self.oracle = Oracle(
            self.world,
            transactional=settings.transactional,
            selected=settings.selected,
            ordered=settings.ordered,
            shared=bool(settings.instances),
            from_the_end=settings.start == "last",
            trace=self.trace,
        )
        if settings.chosen:
            self.oracle.chosen = set(range(settings.chosen))
        self.wall = WallClock(self.now)
        self.lineage: dict[int, int] = {}
        """The parents that discovery leaves out, by child."""
        self.faults = Faults(
            self._random("faults"), failing=settings.failing, steady=self._random("failing")
        )
        self.publisher = self._publisher(settings)
        self.database = SimulatedDatabase(
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
        self.supervisors = [self._supervisor() for _ in range(settings.instances or 1)]
        self.supervisor = self.supervisors[0]
        self._others: list[Supervisor] = []
        self._tasks: TaskGroup | None = None
        self._rolled_back: tuple[int, list[int]] | None = None
        """The partition that is listed again under its old id, and its successors."""
        self._store_fails_until = 0.0
        self._stalls_end = 0.0
        self.operators = Operators(self.world, self.database, self.oracle, self.now)
        if any(step.do == "fail_over" for step in scenario.steps):
            self.replica = Replica(
                self.database,
                self.oracle,
                transactional=settings.transactional,
                from_the_end=settings.start == "last",
            )
        self.lease_replica = LeaseReplica(self.database)
        self._keeps_leases = any(step.do == "leases_go_back" for step in scenario.steps)
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

    def _supervisor(self) -> Supervisor:
        return Supervisor(
            self.process,
            self._running,
            oracle=self.oracle,
            database=self.database,
            trace=self.trace,
            native=self._native,
            now=self.now,
        )

    def process(self, *, follow: bool | None = None) -> Process:
        """Return a new process of the application. By default it follows as the settings say."""
        settings = self.scenario.settings
        if settings.mixed:
            settings = of_another_version(settings, self._application)
        return Process(
            settings,
            self.publisher,
            self.database,
            self.oracle,
            self._application,
            number=next(self._processes),
            native=self._native,
            follow=settings.follow if follow is None else follow,
            **self._given(),
        )

    def _given(self) -> dict[str, Any]:
        """Return which partitions the next process is to read, and which edges it is told.

        An edge may be told before its child is listed.
        """
        chosen = self.oracle.chosen
        return {
            "partitions": None if chosen is None else frozenset(chosen),
            "lineage": dict(self.lineage),
        }

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for supervisor in self.supervisors:
                tasks.start_soon(supervisor.run)
            tasks.start_soon(self._watch)
            for step in self.scenario.steps:
                await sleep(step.after)
                self.do(step)
            await self._settle()
            for supervisor in self.supervisors:
                supervisor.end()
            tasks.cancel_scope.cancel()
        self.oracle.check()
        if self._rightly_stopped:
            return
        await self._read_to_the_end()
        if not self._rightly_stopped:  # else what it is to read was gone before any process saw it
            self.oracle.finished(self.database, self.process().key, self.publisher.stray_cursors)
            self.oracle.paced(self.publisher.rate)
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
            if self._keeps_leases:
                self.lease_replica.keep()
            process = self.supervisor.process
            if process is not None:
                self.oracle.rate(process.transport)
                self.oracle.ends(max(process.ends_by, self._hangs_until(process)), self.now())
                self._check_rollback(process)
                process.look()
            if len(self.trace) == seen:
                continue  # nothing has happened that could make a status untrue
            seen = len(self.trace)
            if process is not None and process.consumer is not None and not process.session.dead:
                # After a commit that was rolled back the library can't know what is stored.
                status = process.consumer.status()
                alone = not (process.overlaps or process.rolled_back or self.oracle.changed)
                self.oracle.status(status, process.positions(), limit, alone=alone)

    def _check_rollback(self, process: Process) -> None:
        again = self.oracle.rolled_back(process.positions())
        since = process.transport.evidence.open_since
        changed = process.overlaps or self.oracle.changed
        if process.consumer is None or not process.iterates or process.session.dead or changed:
            return
        if again.intersection(since):
            named = {id: since[id] for id in again.intersection(since)}
            self.oracle.shows_rollback(process.consumer.health(), named, self.now())

    def _hangs_until(self, process: Process) -> float:
        """Until when no stop can end this process, whatever the library does."""
        session = process.session
        frozen = session.frozen_until if isinstance(session, SharedSession) else 0.0
        return max(self._stalls_end, frozen)

    async def _settle(self) -> None:
        """End all faults, and wait until every event is applied."""
        self._go_forward()
        self.faults.clear()
        self.publisher.deployment = None
        self.database.failing = self.database.stalled_until = 0.0
        self._store_fails_until = 0.0
        for supervisor in self.supervisors:
            supervisor.calm_since = self.now() + GRACE_SECONDS
        self.oracle.calm = True
        for supervisor in self._others:
            supervisor.end()
        if self.scenario.settings.on_error == "park":
            for supervisor in self.supervisors:
                supervisor.happens(
                    "stop"
                )  # a partition that is parked is read by the next iteration
        if self.oracle.changed:
            self._publish_everywhere()
            if not self.scenario.settings.instances and self._lost_ends():
                self.supervisor.happens("stop")
        self.trace.add("all faults have ended")
        waited, done = 0, self.oracle.done
        patience = SHARED_SETTLE_SECONDS if self.scenario.settings.instances else SETTLE_SECONDS
        while waited < patience:
            if self.oracle.complete() or self.oracle.violations or self._rightly_stopped:
                break
            await self._read_what_was_passed_over()
            await sleep(1.0)
            waited, done = (waited + 1 if self.oracle.done == done else 0), self.oracle.done
        positions = self.database.positions.get(self.process().key, {})
        if not self.oracle.complete() and self.oracle.is_ambiguous(positions):
            self.supervisor.rightly_stopped = True  # parked
        if self._rightly_stopped:
            return
        self.oracle.progressed()
        if not self.oracle.violations and self.scenario.settings.follow:
            await self._be_quiet()

    async def _read_what_was_passed_over(self) -> None:
        """An operator does what reports of events behind a stored end say (R6)."""
        for supervisor in self.supervisors:
            if supervisor.process is not None and supervisor.process.consumer is not None:
                supervisor.process.tell()
        if not self.oracle.reported:
            return
        key = self.process().key
        behind = self.oracle.left_behind(self.database.positions.get(key, {}))
        told = self.oracle.reported.intersection(behind)
        if not told:
            return
        self.trace.add("an operator reads partitions {} on", sorted(told))
        for supervisor in self.supervisors:
            supervisor.happens("rest", _STOPPED_SECONDS)
        while self._running:
            await sleep(0.1)
        self.oracle.reported -= told
        self.operators.reopen(key, told)

    def _publish_everywhere(self) -> None:
        """Publish an event to each open partition.

        A consumer learns that a stored position was changed when its next save is refused.
        """
        for partition in self.world.writable():
            self.world.publish(min(partition.slots, key=lambda slot: (slot % 2, slot)))

    def _lost_ends(self) -> bool:
        """Return whether a closed partition is stored as open, after a failover.

        A lone consumer that has drained it saves nothing of it any more, and can't learn that. An
        operator has to start it again.
        """
        stored = self.database.positions.get(self.process().key, {})
        closed = (p.id for p in self.world.listed(self.now()) if p.closed <= self.now())
        return any(id not in stored or stored[id].status == "open" for id in closed)

    @property
    def _rightly_stopped(self) -> bool:
        return any(supervisor.rightly_stopped for supervisor in self.supervisors)

    async def _be_quiet(self) -> None:
        """Watch a consumer that has nothing to do."""
        for _ in range(round(SETTLE_SECONDS / QUIET_SECONDS)):
            process, effects, began = self.supervisor.process, self.oracle.effects, self.now()
            before = process.transport.requests if process is not None else 0
            await sleep(QUIET_SECONDS)
            if effects != self.oracle.effects:
                continue  # with start="last" the oracle does not know before how much there is
            if process is not self.supervisor.process or process is None:
                continue
            if process.paused_until > began:
                continue  # it reads on from where it stood, whatever another process applied
            self.oracle.idled(process.transport.requests - before)
            return

    async def _read_to_the_end(self) -> None:
        """The last processes, without `follow`, must end by themselves."""
        ended: list[Supervisor] = []

        async def live(supervisor: Supervisor) -> None:
            if await supervisor.live(self.process(follow=False)):
                ended.append(supervisor)

        with anyio.move_on_after(SETTLE_SECONDS):
            async with anyio.create_task_group() as tasks:
                for supervisor in self.supervisors:
                    supervisor.calm_since = 0.0
                    tasks.start_soon(live, supervisor)
        if len(ended) < len(self.supervisors) and not self._rightly_stopped:
            self.oracle.violated("end", "a consumer without follow does not end")

    # ------------------------------------------------------------------ steps

    def publish(self, count: int, entities: int) -> None:
        """Publish events, one for each entity in turn."""
        for number in range(count):
            self.world.publish(number * 7 % entities)

    def split(self, which: int, parts: int, method: Method, listed_after: float = 0.0) -> None:
        """Split one of the open partitions. Children that start after it may be listed later."""
        if self.world.version(self.now()).dialect == "v1" or self._rolled_back is not None:
            return  # version 1 has no way to say so
        writable = self.world.writable()
        parent = writable[which % len(writable)].id
        self.world.split(parent, parts, method, listed_after=listed_after)

    def merge(self, which: int) -> None:
        """Merge two open partitions that share their cursors, if there are two."""
        if self.world.version(self.now()).dialect == "v1" or self._rolled_back is not None:
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

    def roll_back(self, which: int, seconds: float) -> None:
        """Undo a split by cursor transfer, and make it again some seconds later."""
        split = self.world.split_by_transfer()
        if not split or self._rolled_back is not None:
            return
        partition = split[which % len(split)]
        self._rolled_back = partition, self.world.roll_back(partition)
        assert self._tasks is not None
        self._tasks.start_soon(self._roll_forward, seconds)

    async def _roll_forward(self, seconds: float) -> None:
        await sleep(seconds)
        self._go_forward()

    def _go_forward(self) -> None:
        if self._rolled_back is not None:
            self.trace.add("the publisher goes forward again")
            self.world.roll_forward(*self._rolled_back)
            self._rolled_back = None

    def split_unnamed(self, which: int, parts: int, seconds: float) -> None:
        """Split an open partition while no process runs. Discovery leaves out the parent (R8)."""
        if self.world.version(self.now()).dialect == "v1" or self._rolled_back is not None:
            return
        self.rest(seconds)
        writable = self.world.writable()
        parent = writable[which % len(writable)].id
        for child in self.world.split(parent, parts, "starts-after", forgotten=True):
            self.lineage[child] = parent

    def choose_descendants(self) -> None:
        """Read the partitions, too, that have come from those that are read."""
        if self.oracle.chosen is not None:
            self.oracle.chosen |= self.world.descendants(self.oracle.chosen)
            # Not stopped: a consumer that is stopped may be entered again, with the same selection.
            for supervisor in self.supervisors:
                supervisor.happens("cancel")

    def set_clock(self, seconds: float) -> None:
        """Set the consumer's clock: it is ahead of the publisher's by so much."""
        self.wall.off_by = seconds

    def second(self, seconds: float) -> None:
        """Let a second process of the same name run for some time."""
        assert self._tasks is not None
        self._tasks.start_soon(self._second, seconds)

    async def _second(self, seconds: float) -> None:
        supervisor = self._supervisor()
        self._others.append(supervisor)
        with anyio.move_on_after(seconds):
            await supervisor.live(self.process())

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
        self.faults.add(InjectedFault(kind, on, share, self.now() + seconds, behind, parity))

    def store_fails(self, share: float, seconds: float) -> None:
        """Let operations of the database fail for some time."""
        self.database.failing = share
        self._store_fails_until = self.now() + seconds

    def store_stalls(self, seconds: float) -> None:
        """Let operations of the database take longer than a save may take, for some time."""
        self.database.stalled_until = self.now() + seconds
        self._stalls_end = self.database.stalled_until + STALL_SECONDS

    def rest(self, seconds: float) -> None:
        """Let no process run for some time."""
        for supervisor in self.supervisors:
            supervisor.happens("rest", seconds)

    def fail_over(self, lost: int, leases: bool = True) -> None:
        """Let a replica of the database take over, which lacks the last saves."""
        self.replica.promote(lost, leases=leases)

    def lease_clock(self, seconds: float) -> None:
        """Let the clock of the database that keeps the leases jump."""
        set_clock(self.database.leases, seconds)

    def leases_go_back(self, seconds: float) -> None:
        """Let a replica of the lease store take over, which lacks the last seconds."""
        self.lease_replica.promote(seconds)

    def operate(self, order: Order, which: int) -> None:
        """Let an operator change a stored position."""
        self.operators.change(order, self.process().key, which)

    def life_step(self, what: ProcessEvent, seconds: float = 0.0, which: int = 0) -> None:
        """Let something happen to the process, or to one of several instances."""
        self.supervisors[which].happens(what, seconds)
