"""Which partition is fetched when.

A queue of those that are due, a heap of those that are not yet, a bounded number of slots. A
partition that pauses (poll interval, backoff) holds no slot: a healthy one never waits for it
(R14).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

J = TypeVar("J")


class _Ticket(NamedTuple):
    """A job's place: in the queue of those that are due, or in the heap of later ones."""

    number: int
    due: bool


class Scheduler(Generic[J]):
    """Runs each job that is due, at most `slots` at once.

    A job is queued at most once; scheduling it anew moves it.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._work: Callable[[J], Awaitable[None]] | None = None
        self._running = 0
        self._tickets: dict[J, _Ticket] = {}
        self._numbers = count(1)
        self._due: deque[tuple[int, J]] = deque()
        self._due_count = 0
        self._later: list[tuple[float, int, J]] = []
        self._idle: deque[anyio.Event] = deque()
        self._sooner = anyio.Event()
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        later = len(self._tickets) - self._due_count
        return (
            f"<Scheduler {self._running} of {self._slots} slots, {self._due_count} due, "
            f"{later} later>"
        )

    @property
    def contended(self) -> bool:
        """Whether a job is due and every slot is taken."""
        return self._due_count > 0 and self._running >= self._slots

    def is_scheduled(self, job: J) -> bool:
        """Whether the job is due or pausing."""
        return job in self._tickets

    def schedule(self, job: J, delay: float = 0.0) -> None:
        """Make the job due `delay` seconds from now."""
        self.forget(job)
        number = next(self._numbers)
        if delay <= 0:
            self._make_due(job, number)
            return
        self._tickets[job] = _Ticket(number, due=False)
        heapq.heappush(self._later, (anyio.current_time() + delay, number, job))
        if self._later[0][1] == number:
            self._sooner.set()

    def forget(self, job: J) -> None:
        """Take the job off the queue."""
        ticket = self._tickets.pop(job, None)
        if ticket is not None and ticket.due:
            self._due_count -= 1

    async def run(self, work: Callable[[J], Awaitable[None]]) -> None:
        """Await `work(job)` for the jobs until cancelled. An exception of `work` ends it."""
        self._work = work
        async with anyio.create_task_group() as self._tasks:
            try:
                for _ in range(self._due_count):
                    self._wake_slot()
                await self._tick()
            finally:
                self._tasks = None  # what is scheduled from now on stays in the queue

    def _make_due(self, job: J, number: int) -> None:
        self._tickets[job] = _Ticket(number, due=True)
        self._due.append((number, job))
        self._due_count += 1
        self._wake_slot()

    def _holds(self, job: J, number: int) -> bool:
        """Return whether a place in a queue is still valid: the job may have been moved."""
        ticket = self._tickets.get(job)
        return ticket is not None and ticket.number == number

    def _wake_slot(self) -> None:
        if self._tasks is None or self._running >= self._slots:
            return
        self._running += 1
        if self._idle:
            self._idle.popleft().set()
        else:
            self._tasks.start_soon(self._slot)

    async def _slot(self) -> None:
        assert self._work is not None
        while True:
            while self._due:
                number, job = self._due.popleft()
                if self._holds(job, number):
                    self.forget(job)
                    await self._work(job)
            self._running -= 1
            woken = anyio.Event()
            self._idle.append(woken)
            await woken.wait()

    async def _tick(self) -> None:
        while True:
            now = anyio.current_time()
            while self._later and self._later[0][0] <= now:
                _, number, job = heapq.heappop(self._later)
                if self._holds(job, number):
                    self._make_due(job, number)
            self._sooner = anyio.Event()
            pause = self._later[0][0] - anyio.current_time() if self._later else float("inf")
            with anyio.move_on_after(pause):
                await self._sooner.wait()
