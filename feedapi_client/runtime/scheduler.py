"""Which partition is fetched when: a queue of those that are due, a heap of those that are not yet, a bounded number of slots.

A partition that pauses (poll interval, backoff) holds no slot, so that a healthy one never waits for a failing one (R14).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup


class Job(Protocol):
    """What is scheduled. `ticket` belongs to the scheduler: None while the job is neither queued nor pausing."""

    ticket: int | None


J = TypeVar("J", bound=Job)


class Scheduler(Generic[J]):
    """Runs `work(job)` for each job that is due, at most `slots` at once. A job is queued at most once; scheduling it anew moves it."""

    def __init__(self, work: Callable[[J], Awaitable[None]], slots: int) -> None:
        self._work = work
        self._slots = slots
        self._running = 0
        self._due: deque[tuple[int, J]] = deque()
        self._later: list[tuple[float, int, J]] = []
        self._tickets = count(1)
        self._idle: deque[anyio.Event] = deque()
        self._sooner = anyio.Event()
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Scheduler {self._running} of {self._slots} slots, {len(self._due)} due, {len(self._later)} later>"

    @property
    def contended(self) -> bool:
        """A job is due and every slot is taken."""
        return (
            any(job.ticket == ticket for ticket, job in self._due) and self._running >= self._slots
        )

    def schedule(self, job: J, delay: float = 0.0) -> None:
        """Make the job due `delay` seconds from now."""
        job.ticket = ticket = next(self._tickets)
        if delay <= 0:
            self._due.append((ticket, job))
            self._wake_slot()
            return
        due = anyio.current_time() + delay
        heapq.heappush(self._later, (due, ticket, job))
        if self._later[0][1] == ticket:
            self._sooner.set()

    @staticmethod
    def forget(job: Job) -> None:
        """Take the job off the queue."""
        job.ticket = None

    async def run(self) -> None:
        """Until cancelled. An exception of `work` ends it."""
        async with anyio.create_task_group() as self._tasks:
            try:
                for _ in range(len(self._due)):
                    self._wake_slot()
                await self._tick()
            finally:
                self._tasks = None  # what is scheduled from now on stays in the queue

    def _wake_slot(self) -> None:
        if self._tasks is None or self._running >= self._slots:
            return
        self._running += 1
        if self._idle:
            self._idle.popleft().set()
        else:
            self._tasks.start_soon(self._slot)

    async def _slot(self) -> None:
        while True:
            while self._due:
                ticket, job = self._due.popleft()
                if job.ticket == ticket:
                    job.ticket = None
                    await self._work(job)
            self._running -= 1
            woken = anyio.Event()
            self._idle.append(woken)
            await woken.wait()

    async def _tick(self) -> None:
        while True:
            now = anyio.current_time()
            while self._later and self._later[0][0] <= now:
                _, ticket, job = heapq.heappop(self._later)
                if job.ticket == ticket:
                    self._due.append((ticket, job))
                    self._wake_slot()
            self._sooner = anyio.Event()
            pause = self._later[0][0] - anyio.current_time() if self._later else float("inf")
            with anyio.move_on_after(pause):
                await self._sooner.wait()
