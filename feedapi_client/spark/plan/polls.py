"""When each partition is asked for news (R15). No I/O; imports no Spark."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from feedapi_client.options import Limits

IDLE_POLLS_PER_SECOND = 50
"""Requests a second to all idle partitions together, where option maxPollInterval is not given."""
_EXPECTED_AFTER = 3
"""Polls in a row that found events, from which on the next one is expected to find some too."""


@dataclass(slots=True)
class _Poll:
    pause: float
    ticket: int = 0
    """Number of the valid entry in the heap; 0 while the partition is being read."""
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
        self._heap: list[tuple[float, int, int]] = []
        self._tickets = count(1)
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
        self._push(partition, poll, self._clock())

    def later(self, partition: int, seconds: float) -> None:
        """Poll the partition after a time that does not depend on its events."""
        self._push(partition, self._poll(partition), self._clock() + seconds)

    def caught_up(self, partition: int, *, moved: bool) -> None:
        """Note that the present end of the partition was reached.

        Arguments:
            moved: whether something came before it: events, or another cursor.
        """
        poll = self._poll(partition)
        poll.hits, poll.new = poll.hits + 1 if moved else 0, False
        self._set_idle(poll, not moved)
        poll.pause = self._shortest if moved else self._next_pause(poll.pause)
        self._push(partition, poll, self._clock() + poll.pause)

    def forget(self, partition: int) -> None:
        """Never poll the partition again, unless another method names it."""
        poll = self._polls.pop(partition, None)
        if poll is not None:
            self._set_idle(poll, False)

    def take_due(self) -> list[int]:
        """Return the partitions whose poll is due, and take them out of the schedule."""
        due: list[int] = []
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, ticket, partition = heapq.heappop(self._heap)
            if self._is_valid(partition, ticket):
                self._polls[partition].ticket = 0
                due.append(partition)
        return due

    def wait(self) -> float:
        """Return the seconds until the next poll is due; infinity when there is none."""
        while self._heap and not self._is_valid(self._heap[0][2], self._heap[0][1]):
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else math.inf

    def _poll(self, partition: int) -> _Poll:
        return self._polls.setdefault(partition, _Poll(self._shortest))

    def _is_valid(self, partition: int, ticket: int) -> bool:
        poll = self._polls.get(partition)
        return poll is not None and poll.ticket == ticket

    def _push(self, partition: int, poll: _Poll, at: float) -> None:
        poll.ticket = next(self._tickets)
        heapq.heappush(self._heap, (at, poll.ticket, partition))

    def _set_idle(self, poll: _Poll, idle: bool) -> None:
        self._idle += idle - poll.idle
        poll.idle = idle

    def _next_pause(self, pause: float) -> float:
        share = self._idle / IDLE_POLLS_PER_SECOND if self._bounded else 0.0
        return min(max(2 * pause, share), max(self._longest, share))
