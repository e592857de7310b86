"""Which partition is fetched when.

A queue of those that are due, a heap of those that are not yet, a bounded number of slots. A
partition that pauses (poll interval, backoff) holds no slot: a healthy one never waits for it
(R14). Failing ones have a queue of their own, and share a part of the slots. Where a publisher
limits requests, a `Pace` says when the next one may begin, and how many at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

from feedapi_client.options import RetryPolicy
from feedapi_client.pace import Pace
from feedapi_client.runtime.loop_clock import loop_clock
from feedapi_client.runtime.wakeup import Wakeup

J = TypeVar("J")

FAILING_SHARE = 4
"""At most 1/N of the slots may be used by failing jobs (R14)."""

_TURN_SECONDS = 0.01
"""Between two looks at whether a job has begun that goes first."""


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

    The queues are in the order of `number`. `queue` is 0 among the healthy ones, 1 among the
    failing ones, None in the heap, where `when` is the moment at which it becomes due. There a job
    that `keeps` its number was due before, and takes its old place.
    """

    number: int
    queue: int | None
    when: float = 0.0
    keeps: bool = False


class Scheduler(Generic[J]):
    """Runs each job that is due, at most `slots` at once.

    A job is queued at most once; scheduling it anew moves it.

    Arguments:
        slots: jobs at the same time.
        failing: whether a job that becomes due is a failing one. All of these together use at most
            a quarter of the slots, so that they don't take them all from the others.
        pace: when a job may begin, and how many at once; whenever a slot is free without one.
    """

    def __init__(
        self,
        slots: int,
        *,
        failing: Callable[[J], bool] = lambda _: False,
        pace: Pace | None = None,
    ) -> None:
        self.slots = slots
        self.pace = Pace(RetryPolicy(), slots) if pace is None else pace
        self._failing = failing
        self._work: Callable[[J], Awaitable[float | None]] | None = None
        self._running = 0
        self._working = 0
        """How many of those that run have a job."""
        self._begun = 0
        self._tickets: dict[J, _Ticket] = {}
        self._numbers = count(1)
        self._due: tuple[deque[tuple[int, J]], ...] = (deque(), deque())  # healthy, failing
        self._due_counts = [0, 0]
        self._failing_running = 0
        self._paced = False
        """Whether jobs that are due were not begun because of the pace."""
        self._ahead = 0
        self._turned_at = -1
        """How many jobs were begun when a request that is none began last."""
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
        admitted = max(0, min(failing, self._share - self._failing_running))
        taken = self._running >= self._room
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
        """Whether a slot is free for any job, and the pace lets it begin."""
        free = self._running < self._room and self._failing_running < self._share
        return free and (self.pace.free or self._is_open)

    @property
    def running(self) -> int:
        """How many jobs run."""
        return self._running

    @property
    def _room(self) -> int:
        """How many jobs may run at once."""
        return self.slots if self.pace.free else self.pace.window

    @property
    def _share(self) -> int:
        """How many of them may be failing ones."""
        return max(1, self._room // FAILING_SHARE)

    @property
    def begun(self) -> int:
        """How many jobs were begun so far."""
        return self._begun

    def schedule(self, job: J, delay: float = 0.0) -> None:
        """Make the job due `delay` seconds from now."""
        self._schedule(job, delay, None)

    def _schedule(self, job: J, delay: float, number: int | None) -> None:
        """Do so. With the number that it had it takes its old place among those that are due."""
        self.forget(job)
        if delay <= 0:
            self._make_due(job, next(self._numbers) if number is None else number)
            return
        keeps = number is not None
        number = next(self._numbers) if number is None else number
        when = self._clock() + delay
        self._tickets[job] = _Ticket(number, None, when, keeps)
        heapq.heappush(self._later, (when, number, job))
        if self._later[0][1] == number:
            self._sooner.set()

    def forget(self, job: J) -> None:
        """Take the job off the queue."""
        ticket = self._tickets.pop(job, None)
        if ticket is not None and ticket.queue is not None:
            self._due_counts[ticket.queue] -= 1

    async def turn(self) -> None:
        """Wait until the pace lets a request begin that is no job, ahead of all jobs.

        Two of them in a row don't come before a job that is due.
        """
        pace = self.pace
        self._ahead += 1
        try:
            while (pause := pace.opens - self._clock()) > 0 or self._jobs_first:  # noqa: ASYNC110
                await anyio.sleep(max(pause, _TURN_SECONDS))
            pace.begin(self._clock())
            self._turned_at = self._begun
        finally:
            self._ahead -= 1
            self._sooner.set()

    @property
    def _jobs_first(self) -> bool:
        """Whether a job may begin before another request that is none.

        A slot that is begun and has no job yet is not in the way of the one that it is to take.
        """
        if self.pace.free or self._tasks is None or self._turned_at < self._begun:
            return False
        return self.any_due and self._working < self._room

    async def run(self, work: Callable[[J], Awaitable[float | None]]) -> None:
        """Await `work(job)` for the jobs until cancelled. An exception of `work` ends it.

        A job whose work returns a number is due again after so many seconds, in the place that it
        had: before those that became due after it.
        """
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
        due = self._due[queue]
        if due and number < due[-1][0]:
            due.insert(bisect_left(due, number, key=lambda place: place[0]), (number, job))
        else:
            due.append((number, job))
        self._due_counts[queue] += 1
        self._wake_slot()

    def _holds(self, job: J, number: int) -> bool:
        """Return whether a place in a queue is still valid: the job may have been moved."""
        ticket = self._tickets.get(job)
        return ticket is not None and ticket.number == number

    def _wake_slot(self) -> None:
        if self._tasks is None:
            return
        if not self.pace.free:  # `_tick` begins one after the other
            self._paced = True
            self._sooner.set()
        elif self._running < self.slots:
            self._begin_slot(self._tasks)

    def _begin_slot(self, tasks: TaskGroup) -> None:
        self._running += 1
        if self._idle:
            self._idle.popleft().set()
        else:
            tasks.start_soon(self._slot)

    async def _slot(self) -> None:
        assert self._work is not None
        woken = Wakeup()
        while True:
            while (found := self._take()) is not None:
                failing, number, job = found
                self._failing_running += failing
                self._working += 1
                try:
                    again = await self._work(job)
                finally:
                    self._working -= 1
                    self._failing_running -= failing
                if again is not None:
                    self._schedule(job, again, number)
            self._running -= 1
            self._idle.append(woken)
            await woken.wait()

    def _take(self) -> tuple[int, int, J] | None:
        """Take the job that is due for longest off its queue: which queue, its number, the job.

        A failing one takes its turn as long as the share of these is not used up. If it had to wait
        until no healthy one is due, it could wait for ever.
        """
        if not self.pace.free and not self._may_begin():
            self._paced = True
            self._sooner.set()
            return None
        healthy = self._drop_moved(0)
        failing = self._failing_running < self._share and self._drop_moved(1)
        if not healthy and not failing:
            return None
        queue = int(failing)
        if healthy and failing:
            queue = int(self._due[1][0][0] < self._due[0][0][0])
        number, job = self._due[queue].popleft()
        self.forget(job)
        self._begun += 1
        if not self.pace.free:
            self.pace.begin(self._clock())
            self._paced = True
            self._sooner.set()
        return queue, number, job

    def _may_begin(self) -> bool:
        """Whether the pace lets the slot that asks begin a job."""
        return self._running <= self._room and self._is_open

    @property
    def _is_open(self) -> bool:
        """Whether the pace lets a job begin now."""
        if self._ahead and not self._jobs_first:
            return False
        return self._clock() >= self.pace.opens

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
                    keeps = self._tickets[job].keeps
                    self._make_due(job, number if keeps else next(self._numbers))
            looks = self._begin_paced() if self._paced else float("inf")
            if self._later:
                looks = min(looks, self._later[0][0])
            await self._sooner.wait(looks - self._clock())

    def _begin_paced(self) -> float:
        """Begin a slot if the pace lets one begin. Return when to look again."""
        assert self._tasks is not None
        never = float("inf")
        if self.pace.free:
            self._paced = False
            for _ in range(min(sum(self._due_counts), self.slots - self._running)):
                self._begin_slot(self._tasks)
            return never
        if not self.any_due or self._running >= self._room:
            return never  # until a job becomes due or a slot is given back
        if self._ahead and not self._jobs_first:
            return never  # until the turn is over
        if self._clock() < self.pace.opens:
            return self.pace.opens
        self._begin_slot(self._tasks)
        return never  # until it has taken a job
