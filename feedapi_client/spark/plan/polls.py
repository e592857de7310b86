"""When partitions are asked for news: open ones (R15), and ended ones for a while (R6).

Imports no Spark.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from feedapi_client.options import Limits
from feedapi_client.runtime.late import ASKED_FOR_SECONDS

T = TypeVar("T")
IDLE_POLLS_PER_SECOND = 50
"""Requests a second to all idle partitions together, where option maxPollInterval is not given."""
_EXPECTED_AFTER = 3
"""Polls in a row that found events, from which on the next one is expected to find some too."""


@dataclass(slots=True)
class _Poll:
    pause: float
    due: float = math.inf
    """Infinite while the partition is being read."""
    hits: int = 0
    """Polls in a row that found events."""
    idle: bool = False
    new: bool = False
    """Never polled, and expected to have events."""


class PollSchedule:
    """The next poll of each partition.

    The pause of a partition doubles from `Limits.poll_interval` to `Limits.max_poll_interval` as
    long as it has no events, and falls back at the first one. Not thread-safe.

    Arguments:
        limits: the two intervals.
        bounded: whether the longest pause grows with the number of idle partitions, so that all of
            them together are asked at most `IDLE_POLLS_PER_SECOND` times a second.
        clock: seconds on any monotonic clock.
    """

    def __init__(
        self, limits: Limits, *, bounded: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shortest = limits.poll_interval
        self._longest = max(limits.max_poll_interval, limits.poll_interval)
        self._bounded = bounded
        self._clock = clock
        self._polls: dict[int, _Poll] = {}
        self._idle = 0

    def __repr__(self) -> str:
        return f"<PollSchedule of {len(self._polls)} partitions, {self._idle} idle>"

    def expect(self, partition: int) -> None:
        """Expect events of a partition that was never polled."""
        self._poll(partition).new = True

    def expects(self, partition: int) -> bool:
        """Whether the last polls of the partition all found events."""
        poll = self._poll(partition)
        return poll.new or poll.hits >= _EXPECTED_AFTER

    def now(self, partition: int) -> None:
        """Poll the partition at once, and after the shortest pause from then on."""
        poll = self._poll(partition)
        self._set_idle(poll, False)
        poll.pause = self._shortest
        poll.due = self._clock()

    def later(self, partition: int, seconds: float) -> None:
        """Poll the partition after a time that does not depend on its events."""
        self._poll(partition).due = self._clock() + seconds

    def caught_up(self, partition: int, *, moved: bool) -> None:
        """Note that the present end of the partition was reached.

        Arguments:
            moved: whether something came before it: events, or another cursor.
        """
        poll = self._poll(partition)
        poll.hits, poll.new = poll.hits + 1 if moved else 0, False
        self._set_idle(poll, not moved)
        poll.pause = self._shortest if moved else self._next_pause(poll.pause)
        poll.due = self._clock() + poll.pause

    def forget(self, partition: int) -> None:
        """Never poll the partition again, unless another method names it."""
        poll = self._polls.pop(partition, None)
        if poll is not None:
            self._set_idle(poll, False)

    def take_due(self) -> list[int]:
        """Return the partitions whose poll is due, and take them out of the schedule."""
        due = sorted(self.overdue(), key=lambda partition: self._polls[partition].due)
        for partition in due:
            self._polls[partition].due = math.inf
        return due

    def overdue(self) -> set[int]:
        """Return the partitions whose poll is due, and leave them in the schedule."""
        now = self._clock()
        return {partition for partition, poll in self._polls.items() if poll.due <= now}

    def wait(self) -> float:
        """Return the seconds until the next poll is due; infinity when there is none."""
        first = min((poll.due for poll in self._polls.values()), default=math.inf)
        return max(0.0, first - self._clock())

    def _poll(self, partition: int) -> _Poll:
        return self._polls.setdefault(partition, _Poll(self._shortest))

    def _set_idle(self, poll: _Poll, idle: bool) -> None:
        self._idle += idle - poll.idle
        poll.idle = idle

    def _next_pause(self, pause: float) -> float:
        share = self._idle / IDLE_POLLS_PER_SECOND if self._bounded else 0.0
        return min(max(2 * pause, share), max(self._longest, share))


@dataclass(slots=True)
class _Look:
    until: float
    due: float
    pause: float


class LateLooks(dict[int, _Look]):
    """When partitions are asked again whose end only empty answers have shown, by partition.

    As in a `FeedConsumer` that is done for ten minutes, after pauses that double. A query that
    starts later asks once more, however late: a run of ``availableNow`` lasts seconds.

    Arguments:
        stored: what the last plan holds.
        pause: seconds before the first look.
    """

    def __init__(self, stored: Mapping[int, float], pause: float) -> None:
        self._pause = pause
        now = time.monotonic()
        super().__init__((id, _Look(until, now, pause)) for id, until in stored.items())

    def drained(self, partition: int) -> None:
        """Ask the partition again for a while."""
        due = time.monotonic() + self._pause
        self[partition] = _Look(time.time() + ASKED_FOR_SECONDS, due, self._pause)

    def due(self, drained: Collection[int]) -> list[int]:
        """Return the partitions to ask now; forget those that are not `drained` and closed."""
        for id in self.keys() - drained:
            del self[id]
        now = time.monotonic()
        return [id for id, look in self.items() if look.due <= now]

    def asked(self, partition: int, *, failed: object) -> None:
        """Set the next look after one. One that `failed` is repeated, whatever the time."""
        look = self[partition]
        if not failed and time.time() > look.until:
            del self[partition]
            return
        look.pause *= 2
        look.due = time.monotonic() + look.pause

    def stored(self) -> dict[int, float]:
        """Return what the plan holds."""
        return {id: look.until for id, look in self.items()}


class PatientCall(Generic[T]):
    """A call that goes on in the background where it takes long. Not thread-safe.

    Arguments:
        name: of the thread.
        patience: seconds that the caller waits for it.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._name = name
        self._patience = patience
        self._running: Future[T] | None = None

    @property
    def running(self) -> bool:
        """Whether a call began whose result `next` did not return yet."""
        return self._running is not None

    def next(self, call: Callable[[], T]) -> T | None:
        """Return the result of the call that is running, or of this one; None while it goes on.

        Raises what the call raises. The next one begins anew then.
        """
        found = self._running
        if found is None:
            found = self._running = Future[T]()
            # A daemon: a process that ends does not wait for a feed that is down.
            threading.Thread(target=_run, args=(call, found), name=self._name, daemon=True).start()
            futures.wait([found], timeout=self._patience)
        if not found.done():
            return None
        self._running = None
        return found.result()


def _run(call: Callable[[], T], found: Future[T]) -> None:
    try:
        found.set_result(call())
    except BaseException as error:  # noqa: BLE001 - `next` raises it
        found.set_exception(error)
