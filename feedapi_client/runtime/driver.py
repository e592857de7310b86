"""Carries out the planner's actions, and holds what one session's parts share.

`Fetching`, `Delivery` and `Discovery` tell the planner what happened and pass what it decides to
`Driver.apply`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import anyio

from feedapi_client.errors import FeedError
from feedapi_client.lineage.planner import (
    Action,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    StartAt,
    Stop,
)
from feedapi_client.model import FeedInfo, FeedKey
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.buffer import BufferBudget
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.discovery_timer import DiscoveryTimer
from feedapi_client.runtime.failure_log import FailureLog
from feedapi_client.runtime.partition import RuntimePartition, partition_status
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduler import Scheduler
from feedapi_client.status import ConsumerStatus

log = logging.getLogger("feedapi_client")

_REPORTS_KEPT = 100


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


class Driver:
    """State that the parts of one session share. Several tasks may use it at once."""

    def __init__(self, settings: Settings, planner: Planner, positions: Positions) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.feed = settings.key.url
        self.planner = planner
        self.positions = positions
        self.buffer = BufferBudget(settings.limits.max_buffered_bytes)
        self.scheduler: Scheduler[RuntimePartition] = Scheduler(
            settings.limits.max_concurrent_fetches, failing=lambda partition: partition.failing
        )
        self.timer = DiscoveryTimer(settings.limits.discovery_interval)
        self.partitions: dict[int, RuntimePartition] = {}
        self.info: FeedInfo | None = None
        """The last good discovery."""
        self.reports: deque[str] = deque(maxlen=_REPORTS_KEPT)
        self.failure_log = FailureLog(settings.limits.report_interval)
        self.failure: BaseException | None = None
        """The error that the iterating task raises; None while there is none."""
        self.over = False
        self.stopping = False
        self._actions: deque[Action] = deque()
        self._ready: deque[RuntimePartition] = deque()
        self._lock = anyio.Lock()
        self._wake = anyio.Event()

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
        await self.positions.save(action.positions)
        self._actions.popleft()

    def _carry_out(self, action: Start | Stop | Rediscover | Report | Fail) -> None:
        match action:
            case Start(id, cursor):
                self._start(self.partition(id), cursor)
            case Stop(id):
                if id in self.partitions:
                    self.partitions[id].stop()
                    self.scheduler.forget(self.partitions[id])
            case Rediscover():
                self.timer.soon()
            case Report(id, text):
                self.report(id, text)
            case Fail(id, error):
                self._park(self.partition(id), error)

    def _start(self, partition: RuntimePartition, cursor: str) -> None:
        if not partition.started:
            partition.start(cursor)
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

    # ------------------------------------------------------------------ what is ready

    def announce(self, partition: RuntimePartition) -> None:
        """Let the application take what the partition holds."""
        partition.announce()
        self.enqueue(partition)

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
        self._wake = anyio.Event()
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
            self.failure = error
        self.wake()

    # ------------------------------------------------------------------ for people

    def report(self, partition: int | None, text: str) -> None:
        """Report something to the operator, in the log and in `status()`."""
        line = self._line(partition, text)
        self.reports.append(line)
        log.warning("%s", line)

    def report_failure(self, partition: int | None, text: str) -> None:
        """Report what may fail again and again: at most once in `Limits.report_interval`."""
        line = self._line(partition, text)
        if self.failure_log.warn(partition, line):
            self.reports.append(line)

    def _line(self, partition: int | None, text: str) -> str:
        where = "" if partition is None else f", partition {partition}"
        return f"feed {self.feed}{where}: {text}"

    def status(self) -> ConsumerStatus:
        """Return a snapshot of the session."""
        entries = self.planner.entries
        unsaved = {id for a in self._actions if isinstance(a, Save) for id in a.positions}
        return ConsumerStatus(
            feed=self.feed,
            dialect=self.info.dialect if self.info else None,
            buffered_bytes=self.buffer.used,
            partitions={
                id: partition_status(
                    entries[id], self.partitions.get(id), self._since(id), unsaved=id in unsaved
                )
                for id in sorted(entries)
            },
            reports=tuple(self.reports),
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
