"""Carries out the planner's actions, and holds what one session's parts share.

`Fetching`, `Delivery` and `Discovery` tell the planner what happened and pass what it decides to
`Driver.apply`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import anyio

from feedapi_client.errors import FeedError, FencedError
from feedapi_client.lineage.planner import (
    Action,
    Entry,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    StartAt,
    State,
    Stop,
)
from feedapi_client.model import FeedInfo, FeedKey
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.buffer import BufferBudget
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.clock import loop_clock
from feedapi_client.runtime.decisions import DecisionLog
from feedapi_client.runtime.discovery_timer import DiscoveryTimer
from feedapi_client.runtime.failure_log import FailureLog
from feedapi_client.runtime.linger import Linger
from feedapi_client.runtime.observers import Observers
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.partition_status import partition_status
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduler import Scheduler
from feedapi_client.runtime.sharing import Sharing
from feedapi_client.runtime.wakeup import Wakeup
from feedapi_client.status import ConsumerStatus, PartitionWait, Problem, ProblemName

log = logging.getLogger(__name__)

_REPORTS_KEPT = 100
WaitOf = Callable[["Driver", Entry, RuntimePartition | None], PartitionWait | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Validated consumer configuration."""

    key: FeedKey
    start: StartAt
    ordered: bool
    follow: bool
    partitions: frozenset[int] | None
    on_error: Literal["raise", "park"]
    stream: bool | int
    limits: Limits
    retry: RetryPolicy
    lineage: Mapping[int, int] = field(default_factory=dict)
    observers: Observers = field(default_factory=Observers)


class Driver:
    """State that the parts of one session share. Several tasks may use it at once."""

    def __init__(self, settings: Settings, planner: Planner, positions: Positions) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.feed = settings.key.url
        self.planner = planner
        self.positions = positions
        self.buffer = BufferBudget(settings.limits.max_buffered_bytes, settings.limits.read_bytes)
        self.scheduler: Scheduler[RuntimePartition] = Scheduler(
            settings.limits.max_concurrent_fetches, failing=lambda partition: partition.failing
        )
        self.timer = DiscoveryTimer(settings.limits.discovery_interval)
        self.observers = settings.observers
        self.clock = loop_clock()
        linger = settings.limits.batch_linger
        self.linger = None if linger is None else Linger(linger, self.clock, self.announce)
        self.partitions: dict[int, RuntimePartition] = {}
        self.info: FeedInfo | None = None
        """The last good discovery."""
        self.reports: deque[str] = deque(maxlen=_REPORTS_KEPT)
        self.decisions = DecisionLog(self.feed)
        self.failure_log = FailureLog(settings.limits.report_interval, self.feed)
        self.sharing: Sharing | None = None
        """The other instances that share the feed; None without `share`."""
        self.failure: BaseException | None = None
        """The error that the iterating task raises; None while there is none."""
        self.failed_at = datetime.now(UTC)
        """When it came."""
        self.handler_failure: Problem | None = None
        """That the handler has ended the iteration."""
        self.entry_waits = "for the store"
        """What the entry waits for, unless an operation of the store is under way; for people."""
        self.began = datetime.now(UTC)
        self.iterating = False
        """Whether the iteration has begun and not ended."""
        self.over = False
        self.stopping = False
        self._actions: deque[Action] = deque()
        self._ready: deque[RuntimePartition] = deque()
        self._lock = anyio.Lock()
        self._wake = Wakeup()

    def __repr__(self) -> str:
        return f"<Driver {self.planner!r} {self.scheduler!r} {self.buffer!r}>"

    @property
    def discovered(self) -> FeedInfo:
        """The last good discovery, once there is one."""
        assert self.info is not None
        return self.info

    def update_info(self, info: FeedInfo) -> None:
        """Store the result of a successful discovery."""
        self.info = info

    # ------------------------------------------------------------------ the planner's actions

    @property
    def applying(self) -> bool:
        """Whether some of the planner's actions are not carried out yet."""
        return bool(self._actions)

    def defer(self, actions: Iterable[Action]) -> None:
        """Leave actions to whoever comes next."""
        self._actions.extend(actions)

    async def apply(self, actions: Iterable[Action] = ()) -> None:
        """Carry out actions in the planner's order, after those that are still unfinished.

        Several callers take turns. An action stays in the queue until it is done. After a
        cancellation or a `StoreError` the next caller carries out the rest.
        """
        self._actions.extend(actions)
        if not self._actions:
            return
        try:
            async with self._lock:
                while self._actions:
                    action = self._actions[0]
                    if isinstance(action, Save):
                        await finish(self._save(action))
                    else:
                        self._carry_out(action)
                        self._actions.popleft()
        finally:
            self.wake()

    async def _save(self, action: Save) -> None:
        try:
            await self.positions.save(action.positions)
        except FencedError as error:
            if self.sharing is None:
                raise
            log.info("%s: another instance was faster", error, extra={"feed": self.feed})
            self._actions.popleft()
            self._actions.extend(self.planner.refused(action.positions))
            self.sharing.suspect()
        else:
            self._actions.popleft()
            self.decisions.saved(action.positions)

    def _carry_out(self, action: Start | Stop | Rediscover | Report | Fail) -> None:
        match action:
            case Start(id, cursor):
                self._start(self.partition(id), cursor)
            case Stop(id):
                if id in self.partitions:
                    entry = self.partitions[id].entry
                    if entry.state is State.DRAINED:
                        self.decisions.drained(id, entry.cursor)
                    self.partitions[id].stop()
                    self.scheduler.forget(self.partitions[id])
            case Rediscover():
                self.timer.soon()
                if self.sharing is not None:
                    self.sharing.nudge()
            case Report(id, text):
                self.report(id, text)
            case Fail(id, error):
                self._park(self.partition(id), error)

    def _start(self, partition: RuntimePartition, cursor: str) -> None:
        if not partition.started:
            partition.start(cursor)
            if self.iterating:
                self.decisions.started(partition.id, cursor)
        elif partition.fetching or partition.pending:
            return
        else:
            partition.read_on()
        self.scheduler.schedule(partition)

    def _park(self, partition: RuntimePartition, error: FeedError) -> None:
        partition.failures.show(error)
        if self.settings.on_error == "raise":
            self.fail(error)
        else:
            self.report(None, f"parked: {error}")

    def partition(self, id: int) -> RuntimePartition:
        """Return the partition at run time. It is created at the first call."""
        if id not in self.partitions:
            self.partitions[id] = RuntimePartition(
                self.planner.entries[id],
                buffer=self.buffer,
                limits=self.limits,
                retry=self.settings.retry,
            )
        return self.partitions[id]

    async def fail_partition(self, partition: RuntimePartition, error: FeedError) -> None:
        """Park a partition that can't go on and its descendants, or end the iteration (R18)."""
        partition.failures.show(error)
        await self.apply([*self.planner.fail(partition.id, error), Fail(partition.id, error)])

    def lose(self, partition: RuntimePartition) -> None:
        """Stop a partition whose commit was refused: another instance reads it, or has done so."""
        assert self.sharing is not None
        partition.lose()
        self.defer(self.planner.refused([partition.id]))
        self.sharing.suspect()
        self.wake()

    # ------------------------------------------------------------------ what is ready

    def announce(self, partition: RuntimePartition) -> None:
        """Let the application take what the partition holds."""
        partition.announce()
        self.enqueue(partition)

    def announce_batch(self, partition: RuntimePartition) -> None:
        """Do so at once for a batch of full size, and after `Limits.batch_linger` for another."""
        if partition.announced or not self.hold_back(partition):
            self.announce(partition)

    def hold_back(self, partition: RuntimePartition) -> bool:
        """Hold what is pending back for `Limits.batch_linger`. False where it need not wait."""
        if self.linger is None or not partition.pending or partition.has_batch(self.limits):
            return False
        self.linger.hold(partition)
        return True

    def enqueue(self, partition: RuntimePartition) -> None:
        """Queue the partition for the application, if it holds something announced."""
        if partition.deliverable and not partition.queued:
            partition.queue()
            self._ready.append(partition)
            self.wake()

    def next_ready(self) -> RuntimePartition | None:
        """Take the next partition that holds something for the application off the queue."""
        while self._ready:
            partition = self._ready.popleft()
            partition.unqueue()
            # The planner may have stopped it already, while the action waits for another's save.
            if partition.deliverable and partition.started and partition.entry.running:
                return partition
        return None

    def wake(self) -> None:
        """Wake the iterating task, so that it checks the state again."""
        self._wake.set()

    async def woken(self) -> None:
        """Wait for `wake`. The caller must not await between its last check and this call."""
        await self._wake.wait()

    # ------------------------------------------------------------------ how it ends

    def close(self) -> None:
        """End the session: nothing more is delivered or committed."""
        self.over = True
        self.wake()

    def stop(self) -> None:
        """Stop delivering. Batches in flight can still be committed."""
        self.stopping = True
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the iteration: the iterating task raises the first failure."""
        if self.failure is None:
            self.failure, self.failed_at = error, datetime.now(UTC)
        self.wake()

    def ended_by_handler(self, partition: RuntimePartition) -> None:
        """Note that the application's handler has ended the iteration."""
        handling = partition.handling
        self.handler_failure = Problem(
            ProblemName.FAILED,
            partition.id,
            handling.since or datetime.now(UTC),
            f"{handling.error}, which ended the iteration",
        )

    # ------------------------------------------------------------------ for people

    def report(self, partition: int | None, text: str) -> None:
        """Report something to the operator, in the log and in `status()`."""
        line = self._line(partition, text)
        self.reports.append(line)
        log.warning("%s", line, extra={"feed": self.feed, "partition": partition})

    def report_failure(self, partition: int | None, text: str) -> None:
        """Report what may fail again and again: at most once in `Limits.report_interval`."""
        line = self._line(partition, text)
        if self.failure_log.warn(partition, line):
            self.reports.append(line)

    def _line(self, partition: int | None, text: str) -> str:
        where = "" if partition is None else f", partition {partition}"
        return f"feed {self.feed}{where}: {text}"

    def status(self, wait: WaitOf | None = None) -> ConsumerStatus:
        """Return a snapshot of the session. `wait` says what a partition waits for."""
        entries = self.planner.entries
        unsaved = {id for a in self._actions if isinstance(a, Save) for id in a.positions}
        return ConsumerStatus(
            feed=self.feed,
            dialect=self.info.dialect if self.info else None,
            buffered_bytes=self.buffer.used,
            partitions={
                id: partition_status(
                    entries[id],
                    self.partitions.get(id),
                    self._since(id),
                    unsaved=id in unsaved,
                    owner=None if self.sharing is None else self.sharing.owner(id),
                    wait=None if wait is None else wait(self, entries[id], self.partitions.get(id)),
                )
                for id in sorted(entries)
            },
            reports=tuple(self.reports),
            began=self.began,
        )

    def _since(self, id: int) -> datetime | None:
        """Return when the error began. For a descendant that is when its ancestor's began."""
        own = self.partitions.get(id)
        if own is not None and own.failures.since is not None:
            return own.failures.since
        error = self.planner.entries[id].error
        if error is None or error.partition is None:
            return None
        origin = self.partitions.get(error.partition)
        return origin.failures.since if origin else None
