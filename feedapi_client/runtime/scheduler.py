"""Which partition is fetched when.

A queue of those that are due, a heap of those that are not yet, a bounded number of slots. A
partition that pauses (poll interval, backoff) holds no slot: a healthy one never waits for it
(R14). Failing ones have a queue of their own, and share a part of the slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

from feedapi_client.runtime.clock import loop_clock
from feedapi_client.runtime.wakeup import Wakeup

J = TypeVar("J")

FAILING_SHARE = 4
"""At most 1/N of the slots may be used by failing jobs (R14)."""


class Waiting(NamedTuple):
    """How many jobs are due and wait for a slot.

    Attributes:
        any: those that any slot serves that becomes free.
        failing: those that only the slot of another failing job serves.
    """

    any: int
    failing: int


class _Ticket(NamedTuple):
    """A job's place: in a queue of those that are due, or in the heap of later ones.

    `queue` is 0 among the healthy ones, 1 among the failing ones, None in the heap, where `when` is
    the moment at which it becomes due.
    """

    number: int
    queue: int | None
    when: float = 0.0


class Scheduler(Generic[J]):
    """Runs each job that is due, at most `slots` at once.

    A job is queued at most once; scheduling it anew moves it.

    Arguments:
        slots: jobs at the same time.
        failing: whether a job that becomes due is a failing one. All of these together use at most
            a quarter of the slots, so that they don't take them all from the others.
    """

    def __init__(self, slots: int, *, failing: Callable[[J], bool] = lambda _: False) -> None:
        self.slots = slots
        self._failing = failing
        self._share = max(1, slots // FAILING_SHARE)
        self._work: Callable[[J], Awaitable[None]] | None = None
        self._running = 0
        self._begun = 0
        self._tickets: dict[J, _Ticket] = {}
        self._numbers = count(1)
        self._due: tuple[deque[tuple[int, J]], ...] = (deque(), deque())  # healthy, failing
        self._due_counts = [0, 0]
        self._failing_running = 0
        self._later: list[tuple[float, int, J]] = []
        self._idle: deque[Wakeup] = deque()
        self._sooner = Wakeup()
        self._clock = loop_clock()
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        due = sum(self._due_counts)
        return (
            f"<Scheduler {self._running} of {self.slots} slots, {due} due, "
            f"{len(self._tickets) - due} later>"
        )

    @property
    def waiting(self) -> Waiting:
        """How many jobs wait although they are due."""
        healthy, failing = self._due_counts
        admitted = min(failing, self._share - self._failing_running)
        taken = self._running >= self.slots
        return Waiting(healthy + admitted if taken else 0, failing - admitted)

    def is_scheduled(self, job: J) -> bool:
        """Whether the job is due or pausing."""
        return job in self._tickets

    def pauses_until(self, job: J) -> float | None:
        """When a scheduled job becomes due; None for one that is due already."""
        ticket = self._tickets[job]
        return ticket.when if ticket.queue is None else None

    @property
    def any_due(self) -> bool:
        """Whether a job is due and not begun."""
        return any(self._due_counts)

    @property
    def has_idle_slots(self) -> bool:
        """Whether a slot is free for any job."""
        return self._running < self.slots and self._failing_running < self._share

    @property
    def begun(self) -> int:
        """How many jobs were begun so far."""
        return self._begun

    def schedule(self, job: J, delay: float = 0.0) -> None:
        """Make the job due `delay` seconds from now."""
        self.forget(job)
        number = next(self._numbers)
        if delay <= 0:
            self._make_due(job, number)
            return
        when = self._clock() + delay
        self._tickets[job] = _Ticket(number, None, when)
        heapq.heappush(self._later, (when, number, job))
        if self._later[0][1] == number:
            self._sooner.set()

    def forget(self, job: J) -> None:
        """Take the job off the queue."""
        ticket = self._tickets.pop(job, None)
        if ticket is not None and ticket.queue is not None:
            self._due_counts[ticket.queue] -= 1

    async def run(self, work: Callable[[J], Awaitable[None]]) -> None:
        """Await `work(job)` for the jobs until cancelled. An exception of `work` ends it."""
        self._work = work
        async with anyio.create_task_group() as self._tasks:
            try:
                for _ in range(sum(self._due_counts)):
                    self._wake_slot()
                await self._tick()
            finally:
                self._tasks = None  # what is scheduled from now on stays in the queue

    def _make_due(self, job: J, number: int) -> None:
        queue = int(self._failing(job))
        self._tickets[job] = _Ticket(number, queue)
        self._due[queue].append((number, job))
        self._due_counts[queue] += 1
        self._wake_slot()

    def _holds(self, job: J, number: int) -> bool:
        """Return whether a place in a queue is still valid: the job may have been moved."""
        ticket = self._tickets.get(job)
        return ticket is not None and ticket.number == number

    def _wake_slot(self) -> None:
        if self._tasks is None or self._running >= self.slots:
            return
        self._running += 1
        if self._idle:
            self._idle.popleft().set()
        else:
            self._tasks.start_soon(self._slot)

    async def _slot(self) -> None:
        assert self._work is not None
        woken = Wakeup()
        while True:
            while (found := self._take()) is not None:
                failing, job = found
                self._failing_running += failing
                try:
                    await self._work(job)
                finally:
                    self._failing_running -= failing
            self._running -= 1
            self._idle.append(woken)
            await woken.wait()

    def _take(self) -> tuple[int, J] | None:
        """Take the job that is due for longest off its queue: which queue, and the job.

        A failing one takes its turn as long as the share of these is not used up. If it had to wait
        until no healthy one is due, it could wait for ever.
        """
        healthy = self._drop_moved(0)
        failing = self._failing_running < self._share and self._drop_moved(1)
        if not healthy and not failing:
            return None
        queue = int(failing)
        if healthy and failing:
            queue = int(self._due[1][0][0] < self._due[0][0][0])
        _, job = self._due[queue].popleft()
        self.forget(job)
        self._begun += 1
        return queue, job

    def _drop_moved(self, queue: int) -> bool:
        """Drop the places that are not valid any more. Return whether a job is due."""
        due = self._due[queue]
        while due and not self._holds(due[0][1], due[0][0]):
            due.popleft()
        return bool(due)

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            while self._later and self._later[0][0] <= now:
                _, number, job = heapq.heappop(self._later)
                if self._holds(job, number):
                    self._make_due(job, number)
            pause = self._later[0][0] - self._clock() if self._later else float("inf")
            await self._sooner.wait(pause)
