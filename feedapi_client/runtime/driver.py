"""Carries out the planner's actions, and holds what one session's parts share.

`Fetching`, `Delivery` and `Discovery` tell the planner what happened and pass what it decides to
`Driver.apply`.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import anyio
import anyio.lowlevel

from feedapi_client.errors import FeedError, FencedError
from feedapi_client.lineage.planner import (
    Action,
    Drained,
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
from feedapi_client.model import FeedInfo, FeedKey, Position
from feedapi_client.notifications import (
    IterationEnded,
    Listeners,
    PartitionDrained,
    PartitionStarted,
    PartitionSuperseded,
    PartitionVanished,
    error_text,
)
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.pace import Pace
from feedapi_client.protocol.page import FeedAnswers, passed_limit
from feedapi_client.protocol.text import names, shown
from feedapi_client.runtime.buffer import BufferBudget
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.decisions import DecisionLog
from feedapi_client.runtime.discovery_timer import DiscoveryTimer
from feedapi_client.runtime.failure_log import FailureLog
from feedapi_client.runtime.loop_clock import loop_clock
from feedapi_client.runtime.observers import Observers
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.partition_status import partition_status
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduler import Scheduler
from feedapi_client.runtime.sharing import Sharing
from feedapi_client.runtime.streaming import Streaming
from feedapi_client.runtime.wakeup import Wakeup
from feedapi_client.status import (
    ConsumerStatus,
    PartitionStatus,
    PartitionWait,
    Problem,
    ProblemName,
)

log = logging.getLogger(__name__)

_REPORTS_KEPT = 100
_AT_ONCE = 256
"""Actions that are carried out before others get their turn."""
WaitOf = Callable[["Driver", Entry, RuntimePartition | None], PartitionWait | None]


class Paused:
    """The partitions that the application has paused, across the sessions of a consumer."""

    def __init__(self) -> None:
        self._all = False
        self._others: set[int] = set()
        """Those that are not as `_all` says."""

    def __contains__(self, partition: int) -> bool:
        return self._all is not (partition in self._others)

    def pause(self, partitions: Collection[int]) -> None:
        """Pause these; all, also those that are still unknown, where none is given."""
        self._set(partitions, paused=True)

    def resume(self, partitions: Collection[int]) -> None:
        """Read these on; all where none is given."""
        self._set(partitions, paused=False)

    def _set(self, partitions: Collection[int], *, paused: bool) -> None:
        if not partitions:
            self._all = paused
            self._others.clear()
        elif self._all is paused:
            self._others.difference_update(partitions)
        else:
            self._others.update(partitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Validated consumer configuration."""

    key: FeedKey
    start: StartAt | None
    ordered: bool
    follow: bool
    partitions: frozenset[int] | None
    on_error: Literal["raise", "park"]
    stream: bool | int
    limits: Limits
    retry: RetryPolicy
    lineage: Mapping[int, int | None] = field(default_factory=dict)
    observers: Observers = field(default_factory=Observers)
    paused: Paused = field(default_factory=Paused)
    listeners: Listeners = field(default_factory=Listeners)
    adopts: FeedKey | None = None
    """Whose positions become those of `key`, if that has none."""


def log_end(feed: str, error: BaseException) -> None:
    """Log that an error ends an iteration. Errors of other libraries are shown by type (R19)."""
    known = isinstance(error, FeedError)
    partition = error.partition if isinstance(error, FeedError) else None
    text = str(error) if known else f"feed {feed}: {type(error).__qualname__}"
    frames = "" if known else "\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
    log.error(
        "%s; that ends the iteration%s",
        text,
        frames,
        extra={"feed": feed, "partition": partition},
    )


class Driver:
    """State that the parts of one session share. Several tasks may use it at once."""

    def __init__(self, settings: ConsumerSettings, planner: Planner, positions: Positions) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.feed = settings.key.url
        self.planner = planner
        self.positions = positions
        self.buffer = BufferBudget(settings.limits.max_buffered_bytes, settings.limits.read_bytes)
        slots = settings.limits.max_concurrent_fetches
        self.pace = Pace(settings.retry, slots)
        self.scheduler: Scheduler[RuntimePartition] = Scheduler(
            slots, failing=lambda partition: partition.failing, pace=self.pace
        )
        self.timer = DiscoveryTimer(settings.limits.discovery_interval)
        self.streaming = Streaming()
        self.observers = settings.observers
        self.listeners = settings.listeners
        self._end_told = False
        self.paused = settings.paused
        self._waiting: set[RuntimePartition] = set()
        """Paused partitions that were due."""
        self.clock = loop_clock()
        self.awaits_partitions = False
        """Whether discoveries list no partition, and one still may (R7)."""
        self.partitions: dict[int, RuntimePartition] = {}
        self.info: FeedInfo | None = None
        """The last good discovery."""
        self.closed_since: dict[int, float] = {}
        """When each partition was first seen closed whose end has to be shown by its answers."""
        self.answers = FeedAnswers(settings.limits.settle_time)
        """The answers to fetches, of all partitions."""
        self._discovery_failed_at = float("-inf")
        self._evidence_told: set[int] = set()
        """Closed partitions of which a record has said that evidence of their ends is awaited."""
        self.sound_at = self.clock()
        """When a partition was last answered soundly, or the iteration began."""
        self.handled_at: datetime | None = None
        """When the handler last got on: a batch is handled, or an event after one that failed."""
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
        self.losses = 0
        """How often a partition was stopped, or what was delivered of it given up."""
        self.iterating = False
        """Whether the iteration has begun and not ended."""
        self.over = False
        self.stopping = False
        self.stopped = anyio.Event()
        """Set with `stopping`."""
        self._drained: list[int] = []
        self._actions: deque[Action] = deque()
        self._ready: deque[RuntimePartition] = deque()
        self.overlaps = False
        """Whether batches of a partition are delivered while earlier ones of it are in flight."""
        self.watches = False
        """Whether partitions are only asked if they have an event, and are read by others."""
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
        if self.info is None or self.info.partitions is not info.partitions:
            now, before, selects = self.clock(), self.closed_since, bool(self.settings.key.filters)
            self.closed_since = {
                p.id: before.get(p.id, now)
                for p in info.partitions.values()
                if p.closed and (selects or p.last_cursor is None)
            }
        earlier, self.info = self.info, info
        if self.watches and earlier is not None:
            self._poll_moved_ends(earlier, info)

    def _poll_moved_ends(self, before: FeedInfo, info: FeedInfo) -> None:
        """Poll caught up partitions whose listed end moved on: their polls may be far apart."""
        if self.settings.key.filters:
            return  # it is another place than their end
        for id, partition in self.partitions.items():
            old, new = before.partitions.get(id), info.partitions.get(id)
            if partition.entry.state is not State.CAUGHT_UP or new is None or new.closed:
                continue
            seen = (None, partition.entry.cursor, old and old.last_cursor)
            if new.last_cursor not in seen and not partition.fetching:
                self.scheduler.schedule(partition)

    def discovery_failed(self) -> None:
        """Record that a discovery has failed: answers that are empty now prove nothing (R6)."""
        self._discovery_failed_at = self.clock()

    @property
    def feed_failed_at(self) -> float:
        """When the feed failed last, as far as that lets the time of an end begin anew (R6)."""
        return max(self._discovery_failed_at, self.answers.failed_at)

    def awaits_evidence(self, partition: RuntimePartition) -> None:
        """Log once which partitions evidence of their ends is awaited of, and how long (R6)."""
        if partition.id in self._evidence_told:
            return
        entries = self.planner.entries
        self._evidence_told &= self.closed_since.keys()
        awaited = {
            id
            for id in self.closed_since.keys() - self._evidence_told
            if id in entries and (entries[id].running or entries[id].state is State.WAITING)
        }
        self._evidence_told |= awaited
        self.decisions.awaits_evidence(awaited, partition.evidence_due - self.clock())

    def take_drained(self) -> list[int]:
        """Return the partitions that were drained since the last call by empty answers alone."""
        drained, self._drained = self._drained, []
        return [id for id in drained if id in self.closed_since or self.planner.doubted(id)]

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
                carried_out = 0
                while self._actions:
                    carried_out += 1
                    if carried_out % _AT_ONCE == 0:  # a first discovery may start 32,768 partitions
                        await anyio.lowlevel.checkpoint()
                    action = self._actions[0]
                    if isinstance(action, Save):
                        await finish(self._save(action), hurry=self.positions.hurry_saves)
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
            self._give_up(action.positions)
            self.sharing.suspect()
        else:
            self._actions.popleft()
            self.planner.saved(action.positions)
            new = {id: p for id, p in action.positions.items() if id not in action.unchanged}
            self.decisions.saved(new)
            if self.listeners:
                for id, position in new.items():
                    if position.status == "superseded":
                        self.listeners.tell(PartitionSuperseded(id))

    def _give_up(self, partitions: Collection[int]) -> None:
        """Give up what is in memory: what is stored is loaded again, and may be older."""
        self._actions.extend(self.planner.refused(partitions))
        for id in self.partitions.keys() & set(partitions):
            self.lose_delivered(id)

    def give_up_overtaken(self, stored: Mapping[int, Position], began: int) -> bool:
        """Give up partitions at rest whose stored positions somebody else has advanced.

        That is an operator, where their lease is held. `began` is the moment of the load. Return
        whether there are any: the positions have to be loaded again.
        """
        overtaken = {
            id
            for id in self.planner.overtaken(stored, began)
            if id not in self.partitions or self.partitions[id].is_settled
        }
        if overtaken and not self.applying:
            self.report(None, f"the stored cursor of {names(overtaken)} was changed: takes it")
            self._give_up(overtaken)
            return True
        return False

    def _carry_out(self, action: Start | Stop | Drained | Rediscover | Report | Fail) -> None:
        match action:
            case Start(id, cursor):
                self._start(self.partition(id), cursor)
            case Stop(id):
                self.losses += 1
                if id in self.partitions:
                    if self.partitions[id].entry.state is State.VANISHED and self.listeners:
                        self.listeners.tell(PartitionVanished(id))
                    self.partitions[id].stop()
                    self.scheduler.forget(self.partitions[id])
            case Drained(id, cursor):
                self._tell_drained(id, cursor)
            case Rediscover():
                self.timer.soon()
                if self.sharing is not None:
                    self.sharing.nudge()
            case Report(id, text):
                self.report(id, text)
            case Fail(id, error):
                self._park(self.partition(id), error)

    def _tell_drained(self, id: int, cursor: str) -> None:
        if self.planner.entries[id].state is not State.DRAINED:
            return  # its save was refused
        self.decisions.drained(id, cursor)
        self._drained.append(id)
        if self.listeners:
            self.listeners.tell(PartitionDrained(id))

    def _start(self, partition: RuntimePartition, cursor: str) -> None:
        if not partition.follows(cursor):
            if not partition.began_without_position:  # else it was listed as a successor late (R9)
                self.report(
                    partition.id,
                    "internal error: was to be read on from cursor "
                    f"{shown(partition.read_cursor)}, which does not follow the stored cursor "
                    f"{shown(cursor)}. It begins again there: events may be repeated, none is "
                    "skipped. Please report it",
                )
            partition.stop()
            self.lose_delivered(partition.id)
        if not partition.started:
            partition.start(cursor)
            if self.listeners:
                self.listeners.tell(PartitionStarted(partition.id))
            if self.iterating:
                self.decisions.started(partition.id, cursor)
        elif partition.fetching or partition.pending:
            return
        else:
            partition.read_on()
        self.scheduler.schedule(partition)

    def leave_at_end(self, partition: RuntimePartition) -> None:
        """Ask an open partition no more whose end was seen, although its requests fail (R6)."""
        self.scheduler.forget(partition)
        partition.failures.forgotten()
        self.defer(self.planner.ended(partition.id, partition.read_cursor, asked_closed=False))
        self.wake()

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
                passed=passed_limit(len(self.planner.entries)),
            )
        return self.partitions[id]

    async def fail_partition(self, partition: RuntimePartition, error: FeedError) -> None:
        """Park a partition that can't go on and its descendants, or end the iteration (R18)."""
        partition.failures.show(error)
        await self.apply([*self.planner.fail(partition.id, error), Fail(partition.id, error)])

    def lose(self, partition: RuntimePartition) -> None:
        """Stop a partition whose commit was refused: another instance reads it, or has done so."""
        assert self.sharing is not None
        self.lose_delivered(partition.id)
        self.defer(self.planner.refused([partition.id]))
        self.sharing.suspect()
        self.wake()

    def lose_delivered(self, partition: int) -> None:
        """Give up what was delivered so far of a partition, if it was read in this session."""
        if partition in self.partitions:
            self.partitions[partition].lose()
            self.losses += 1
            self.wake()

    # ------------------------------------------------------------------ what is ready

    def announce(self, partition: RuntimePartition) -> None:
        """Let the application take what the partition holds."""
        partition.announce()
        self.enqueue(partition)

    def overlap(self) -> None:
        """Deliver batches of a partition also while earlier ones of it are in flight."""
        self.overlaps = True

    def _deliverable(self, partition: RuntimePartition) -> bool:
        """Whether the application may have a batch of the partition now.

        One that has successors by cursor transfer delivers one at a time: they wait until none is
        in flight (R9).
        """
        if partition.id in self.paused:
            return False
        if not partition.in_flight or not self.overlaps:
            return partition.deliverable
        return partition.announced and not self.planner.graph.successors.get(partition.id)

    def enqueue(self, partition: RuntimePartition) -> None:
        """Queue the partition for the application, if it holds something announced."""
        if not partition.queued and self._deliverable(partition):
            partition.queue()
            self._ready.append(partition)
            self.wake()

    def next_ready(
        self, fits: Callable[[RuntimePartition], bool | None] | None = None
    ) -> RuntimePartition | None:
        """Take the next partition that holds something for the application off the queue.

        None where it does not fit: it keeps its place. One that can't fit yet loses it.
        """
        while self._ready:
            partition = self._ready[0]
            # The planner may have stopped it already, while the action waits for another's save.
            ready = self._deliverable(partition) and partition.started and partition.entry.running
            fitting = fits(partition) if ready and fits is not None else True
            if fitting is False:
                return None
            self._ready.popleft()
            partition.unqueue()
            if ready and fitting:
                return partition
        return None

    def pause(self) -> None:
        """End the requests of partitions that are paused now. What they brought is kept."""
        for partition in self.partitions.values():
            if partition.fetching and partition.id in self.paused:
                partition.cancel_request()
                self._waiting.add(partition)

    def waits_paused(self, partition: RuntimePartition) -> bool:
        """Whether a partition that is due is paused: it is due again once it is resumed."""
        if partition.id not in self.paused:
            return False
        self._waiting.add(partition)
        return True

    def resume(self) -> None:
        """Read partitions on that are paused no more."""
        for partition in [each for each in self._waiting if each.id not in self.paused]:
            self._waiting.discard(partition)
            if not self.scheduler.is_scheduled(partition):
                self.scheduler.schedule(partition)
        for partition in self.partitions.values():
            self.enqueue(partition)
        self.wake()

    def wake(self) -> None:
        """Wake the iterating task, so that it checks the state again."""
        self._wake.set()

    async def woken(self) -> None:
        """Wait for `wake`. The caller must not await between its last check and this call."""
        await self._wake.wait()

    # ------------------------------------------------------------------ how it ends

    def close(self) -> None:
        """End the session: nothing more is delivered or committed."""
        if not self.over and self.iterating:
            self._tell_end()
        self.over = True
        self.wake()

    def stop(self) -> None:
        """Stop delivering. Batches in flight can still be committed."""
        self.stopping = True
        self.stopped.set()
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the iteration: the iterating task raises the first failure.

        It is logged, too: nobody may be waiting for that task.
        """
        if self.failure is None:
            self.failure, self.failed_at = error, datetime.now(UTC)
            log_end(self.feed, error)
            self._tell_end()
        self.wake()

    def _tell_end(self) -> None:
        """Tell listeners once how the iteration has ended."""
        if self._end_told or not self.listeners:
            return
        self._end_told = True
        error = error_text(self.failure)
        if error is None and self.handler_failure is not None:
            error = self.handler_failure.text
        self.listeners.tell(IterationEnded(error))

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

    def slow_down(self, error: FeedError, *, began: float, answering: int = 0) -> None:
        """Ask the feed less often: its publisher limits requests (R14).

        Raises the error itself when it is fatal, or when none has passed for too long.

        Arguments:
            began: when the refused request began, on the clock of the event loop.
            answering: how many requests are being answered.
        """
        now = self.clock()
        slower = self.pace.refused(
            error, began=began, now=now, under_way=self.scheduler.running, answering=answering
        )
        if slower:
            self.report_failure(
                None,
                f"{error.message}: the feed is asked more slowly, "
                f"{self.pace.rate(now):.2g} times a second for now",
            )

    def _line(self, partition: int | None, text: str) -> str:
        where = "" if partition is None else f", partition {partition}"
        return f"feed {self.feed}{where}: {text}"

    def status(self, wait: WaitOf | None = None) -> ConsumerStatus:
        """Return a snapshot of the session. `wait` says what a partition waits for."""
        entries, unsaved = self.planner.entries, self._unsaved()
        return ConsumerStatus(
            feed=self.feed,
            dialect=self.info.dialect if self.info else None,
            buffered_bytes=self.buffer.used,
            partitions={id: self._status_of(entries[id], unsaved, wait) for id in sorted(entries)},
            reports=tuple(self.reports),
            began=self.began,
        )

    def status_of(self, partition: int, wait: WaitOf | None = None) -> PartitionStatus | None:
        """Return what `status` shows of one partition; None if it is not known."""
        entry = self.planner.entries.get(partition)
        return None if entry is None else self._status_of(entry, self._unsaved(), wait)

    def _unsaved(self) -> dict[int, bool]:
        """Return the partitions whose saves are to come; True: the store has nothing of it yet."""
        unsaved: dict[int, bool] = {}
        for action in self._actions:
            if isinstance(action, Save):
                for id, position in action.positions.items():
                    unsaved[id] = unsaved.get(id, False) or position.replaces is None
        return unsaved

    def _status_of(
        self, entry: Entry, unsaved: Mapping[int, bool], wait: WaitOf | None
    ) -> PartitionStatus:
        id = entry.id
        own = self.partitions.get(id)
        return partition_status(
            entry,
            own,
            self._since(entry, own),
            unsaved=id in unsaved,
            new=unsaved.get(id, False),
            owner=None if self.sharing is None else self.sharing.owner(id),
            wait=None if wait is None else wait(self, entry, own),
            paused=id in self.paused,
        )

    def _since(self, entry: Entry, own: RuntimePartition | None) -> datetime | None:
        """Return when the error began. For a descendant that is when its ancestor's began."""
        if own is not None and own.failures.since is not None:
            return own.failures.since
        error = entry.error
        if error is None or error.partition is None:
            return None
        origin = self.partitions.get(error.partition)
        return origin.failures.since if origin else None
