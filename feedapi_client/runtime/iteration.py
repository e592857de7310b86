"""`Iteration`: how one iteration goes on and ends, and what of it is reported."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import anyio

from feedapi_client.errors import FeedError
from feedapi_client.model import FeedKey, StartAt
from feedapi_client.notifications import IterationEnded, Listeners, error_text
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.handling import Handling
from feedapi_client.runtime.logs import DecisionLog, FailureLog
from feedapi_client.runtime.loop import Wakeup, loop_clock
from feedapi_client.status import Problem, ProblemName

log = logging.getLogger(__name__)

_REPORTS_KEPT = 100


class Paused:
    """The partitions that the application has paused, across the sessions of a consumer."""

    def __init__(self) -> None:
        self._all = False
        self._others: set[int] = set()
        """Those that are not as `_all` says."""

    def __contains__(self, partition: int) -> bool:
        return self._all is not (partition in self._others)

    @property
    def any(self) -> bool:
        return self._all or bool(self._others)

    def set(self, partitions: Collection[int], *, paused: bool) -> None:
        """Pause these, or read them on; all, also the unknown ones, where none is given."""
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


class Iteration:
    """One iteration: whether it goes on, why it ended, and who is told."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.feed = settings.key.url
        self.listeners = settings.listeners
        self.clock = loop_clock()
        self.decisions = DecisionLog(self.feed)
        self.failure_log = FailureLog(settings.limits.report_interval, self.feed)
        self.reports: deque[str] = deque(maxlen=_REPORTS_KEPT)
        self.began = datetime.now(UTC)
        self.began_at = self.clock()
        self.entry_waits = "for the store"
        """What the entry waits for, unless an operation of the store is under way; for people."""
        self.iterating = False
        self.over = False
        self.stopping = False
        self.stopped = anyio.Event()
        self.failure: BaseException | None = None
        """The error that the iterating task raises; None while there is none."""
        self.failed_at = datetime.now(UTC)
        self.handler_failure: Problem | None = None
        self.sound_at = self.clock()
        """When a partition was last answered soundly, or the iteration began."""
        self.handled_at: datetime | None = None
        """When the handler last got on: a batch is handled, or an event after one that failed."""
        self._end_told = False
        self._wake = Wakeup()

    # ------------------------------------------------------------------ how it ends

    @property
    def goes_on(self) -> bool:
        return not self.over and self.failure is None

    def begin(self) -> None:
        self.iterating, self.sound_at = not self.over, self.clock()

    def close(self) -> None:
        if not self.over and self.iterating:
            self._tell_end()
        self.over = True
        self.wake()

    def stop(self) -> None:
        self.stopping = True
        self.stopped.set()
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End it with an error, which the iterating task raises; the first is logged."""
        if self.failure is None:
            self.failure, self.failed_at = error, datetime.now(UTC)
            log_end(self.feed, error)
            self._tell_end()
        self.wake()

    def ended_by_handler(self, partition: int, handling: Handling) -> None:
        since = handling.since or datetime.now(UTC)
        text = f"{handling.error}, which ended the iteration"
        self.handler_failure = Problem(ProblemName.FAILED, partition, since, text)

    def _tell_end(self) -> None:
        if self._end_told or not self.listeners:
            return
        self._end_told = True
        error = error_text(self.failure)
        if error is None and self.handler_failure is not None:
            error = self.handler_failure.text
        self.listeners.tell(IterationEnded(error))

    def wake(self) -> None:
        self._wake.set()

    async def woken(self) -> None:
        """Wait for `wake`. The caller must not await between its last look and this call."""
        await self._wake.wait()

    # ------------------------------------------------------------------ what is reported

    def report(self, partition: int | None, text: str) -> None:
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
