"""`Agenda`: who is asked when, how many at once, and who gives way (R14).

A queue of the partitions that are due, a heap of those that are not yet, a bounded number of turns.
One that pauses (poll interval, backoff) holds no turn: a healthy one never waits for it. Failing
ones have a queue of their own, and share a part of the turns. Where a publisher limits requests, a
`Pace` says when the next one may begin, and how many at once.

A request that hangs, a body that trickles and a stream without an end look alike from here: they
hold a turn. Whoever has held one for `Limits.slot_timeout` gives it back when others wait.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from feedapi_client.runtime.loop import Clock, Wakeup, loop_clock
from feedapi_client.runtime.pace import Pace

FAILING_SHARE = 4
"""At most 1/N of the turns may be taken by failing partitions."""
MAX_DOUBLINGS = 6
"""A partition may hold a turn for at most `slot_timeout` times two to the power of this."""

_TURN_SECONDS = 0.01
"""Between two looks at whether a partition has begun that goes first."""
_MOVED = 64
"""Moments that are not valid any more and may be kept, beside as many as there are valid ones."""
_TICKS = 4
"""Looks at all turns within the shortest time that counts."""
_SHORTEST = 20
"""No request is ended after less than `slot_timeout` divided by this."""
_ANSWERS = 8
"""No request is ended before others of late took so many times as long."""
_FORGET = 0.99
"""How much of the longest time to an answer is still remembered after the next answer."""


class Job(Protocol):
    @property
    def failing(self) -> bool:
        """Whether it shares a part of the turns with others that fail."""
        ...


J = TypeVar("J", bound=Job)


@dataclass(slots=True, eq=False)
class Turn:
    _clock: Clock
    doublings: int = 0
    """How often the time that it may be held is doubled."""
    failing: bool = False
    """Whether it is one of those that failing partitions share."""
    scope: anyio.CancelScope = field(init=False, default_factory=anyio.CancelScope)
    """To be entered by the request. It is cancelled when others need the turn, and when the
    partition is stopped. One scope for both takes less time than two."""
    began: float = field(init=False)
    seen: float = field(init=False)
    """When the request showed the last sign of life."""
    held: float = 0.0
    """Seconds, not counting those in which the event loop did not run."""
    silence: float = 0.0
    """For how many seconds the response may be silent: a stream ends itself after them."""
    answering: bool = False
    brought: bool = False
    waits_for_room: bool = False
    """The request waits for the application, not for the publisher."""
    given_back: bool = False
    task: Any = None

    def __post_init__(self) -> None:
        self.began = self.seen = self._clock()

    @property
    def age(self) -> float:
        return self._clock() - self.began

    @property
    def sound(self) -> bool:
        """Whether the response has brought a checkpoint, or is held open until there is news."""
        return self.brought or (self.answering and self.silence > 0)

    def give_back(self) -> None:
        self.given_back = True
        self.scope.cancel()


class _Ticket(NamedTuple):
    """Where a job is: in a queue of those that are due, or in the heap of later ones.

    `queue` is 0 among the healthy ones, 1 among the failing ones, None in the heap. `place`: its
    number in the queue; in the heap the one that it is to have again once it is due, if any.
    """

    queue: int | None
    until: float
    place: int | None = None


class Agenda:
    """Gives turns to those that are due, at most `turns` at once, as the pace allows."""

    def __init__(self, turns: int, timeout: float, pace: Pace) -> None:
        self.turns = turns
        self.pace = pace
        self.begun = 0
        """How many turns were given so far."""
        self.running = 0
        self._timeout = timeout
        self._clock = loop_clock()
        self._working = 0
        self._tickets: dict[Any, _Ticket] = {}
        self._numbers = count(1)
        self._due = (deque[tuple[int, Any]](), deque[tuple[int, Any]]())
        """Healthy ones, failing ones: by a number that says who has waited for longer."""
        self._failing = 0
        """How many turns failing partitions have."""
        self._later: list[tuple[float, int, Any]] = []
        self._idle: deque[Wakeup] = deque()
        self._sooner = Wakeup()
        self._work: Callable[[Any, int], Awaitable[None]] | None = None
        self._tasks: TaskGroup | None = None
        # The pace.
        self._paced = False
        """Whether somebody who is due did not begin because of the pace."""
        self._ahead = 0
        self._ahead_at = -1
        """How many turns were given when a request that is no partition's began last."""
        # Who holds a turn.
        self._held: dict[Turn, None] = {}  # the oldest first
        self._quiet = 0.0
        self._slowest = 0.0

    def __repr__(self) -> str:
        due = sum(map(len, self._due))
        later = len(self._tickets) - due
        return f"<Agenda: {self.running} of {self.turns} turns, {due} due, {later} later>"

    # ------------------------------------------------------------------ who is due

    def put(self, job: Job, until: float, place: int | None = None) -> None:
        """Let a job be due at a moment; nothing changes for one that is due then already.

        `place`: the one that it had when it got its last turn, if it is to have that again.
        """
        ticket = self._tickets.get(job)
        if ticket is not None:
            if ticket.until == until:
                return
            self.drop(job)
        if until > self._clock():
            self._tickets[job] = _Ticket(None, until, place)
            heapq.heappush(self._later, (until, next(self._numbers), job))
            if len(self._later) > 2 * len(self._tickets) + _MOVED:
                self._forget_moved()
            if self._later[0][2] is job:
                self._sooner.set()
        else:
            self._make_due(job, until, place)

    def drop(self, job: Job) -> None:
        ticket = self._tickets.pop(job, None)
        if ticket is not None and ticket.queue is not None:
            due = self._due[ticket.queue]
            del due[bisect_left(due, (ticket.place,))]

    def _forget_moved(self) -> None:
        """Forget the moments that are not valid any more: jobs may be dropped again and again."""
        later = [(each.until, job) for job, each in self._tickets.items() if each.queue is None]
        self._later = [(until, next(self._numbers), job) for until, job in later]
        heapq.heapify(self._later)

    def is_due(self, job: Job) -> bool | None:
        """Whether the job waits for a turn, and not for its time; None if it is not to get one."""
        ticket = self._tickets.get(job)
        return None if ticket is None else ticket.queue is not None

    @property
    def waits_in_vain(self) -> bool:
        """Whether somebody is due, and a turn is free that the pace lets begin."""
        free = self.running < self._room and self._failing < self._share
        return any(self._due) and free and (self.pace.free or self._is_open)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many wait for any turn that is given back; for that of a failing one only."""
        healthy, failing = map(len, self._due)
        admitted = max(0, min(failing, self._share - self._failing))
        taken = self.running >= self._room
        return (healthy + admitted if taken else 0), failing - admitted

    @property
    def _room(self) -> int:
        return self.turns if self.pace.free else self.pace.window

    @property
    def _share(self) -> int:
        return max(1, self._room // FAILING_SHARE)

    def _make_due(self, job: Job, until: float, place: int | None) -> None:
        queue = int(job.failing)
        number = next(self._numbers) if place is None else place
        self._tickets[job] = _Ticket(queue, until, number)
        due = self._due[queue]
        due.insert(bisect_left(due, (number,)), (number, job))
        self._call_worker()

    # ------------------------------------------------------------------ turns

    async def run(self, work: Callable[[J, int], Awaitable[None]]) -> None:
        """Await ``work(job, place)`` for whoever is due, until cancelled. Its error ends this."""
        self._work = work
        async with anyio.create_task_group() as self._tasks:
            try:
                for _ in range(sum(map(len, self._due))):
                    self._call_worker()
                await self._keep_time()
            finally:
                self._tasks = None  # who is put here from now on stays

    def _call_worker(self) -> None:
        if self._tasks is None:
            return
        if not self.pace.free:  # one begins after the other
            self._paced = True
            self._sooner.set()
        elif self.running < self.turns:
            self._begin_worker(self._tasks)

    def _begin_worker(self, tasks: TaskGroup) -> None:
        self.running += 1
        if self._idle:
            self._idle.popleft().set()
        else:
            tasks.start_soon(self._worker)

    async def _worker(self) -> None:
        assert self._work is not None
        woken = Wakeup()
        while True:
            while (found := self._take()) is not None:
                failing, job, place = found
                self._failing += failing
                self._working += 1
                try:
                    await self._work(job, place)
                finally:
                    self._working -= 1
                    self._failing -= failing
            self.running -= 1
            self._idle.append(woken)
            await woken.wait()

    def _take(self) -> tuple[int, Job, int] | None:
        """Take the one that is due for longest: whether it is failing, the job, and its place.

        A failing one takes its turn as long as the share of these is not used up. If it had to wait
        until no healthy one is due, it could wait for ever.
        """
        if not self.pace.free and not self._may_begin():
            self._paced = True
            self._sooner.set()
            return None
        healthy, failing = self._due
        queue = int(self._failing < self._share and bool(failing))
        if healthy and queue and healthy[0][0] < failing[0][0]:
            queue = 0
        if not self._due[queue]:
            return None
        number, job = self._due[queue][0]
        self.drop(job)
        self.begun += 1
        if not self.pace.free:
            self.pace.begin(self._clock())
            self._paced = True
            self._sooner.set()
        return queue, job, number

    # ------------------------------------------------------------------ time

    async def _keep_time(self) -> None:
        ticked = self._clock()
        while True:
            now = self._clock()
            while self._later and self._later[0][0] <= now:
                until, _, job = heapq.heappop(self._later)
                ticket = self._tickets.get(job)
                if ticket is not None and ticket.queue is None and ticket.until == until:
                    self._make_due(job, until, ticket.place)
            # Counted in looks, not by deadlines: a handler that blocks the event loop for seconds
            # must not end requests whose answers wait in the sockets.
            pause = self._shortest() / _TICKS
            if now >= ticked + pause:
                ticked = now
                self.look(pause)
            looks = min(ticked + pause, self._begin_paced() if self._paced else math.inf)
            if self._later:
                looks = min(looks, self._later[0][0])
            await self._sooner.wait(looks - self._clock())

    # ------------------------------------------------------------------ the pace

    async def ahead(self) -> None:
        """Wait until the pace lets a request begin that is no partition's, ahead of all these.

        Two of them in a row don't come before a partition that is due.
        """
        pace = self.pace
        self._ahead += 1
        try:
            # Looked at again and again: nobody tells when another partition has begun.
            while self._waits_ahead:  # noqa: ASYNC110
                await anyio.sleep(max(pace.opens - self._clock(), _TURN_SECONDS))
            pace.begin(self._clock())
            self._ahead_at = self.begun
        finally:
            self._ahead -= 1
            self._sooner.set()

    @property
    def _waits_ahead(self) -> bool:
        return self.pace.opens > self._clock() or self._partitions_first

    @property
    def _partitions_first(self) -> bool:
        """Whether a partition may begin before another request that is none of these.

        A worker that runs and has no partition yet is not in the way of the one that it is to take.
        """
        if self.pace.free or self._tasks is None or self._ahead_at < self.begun:
            return False
        return any(self._due) and self._working < self._room

    def _may_begin(self) -> bool:
        return self.running <= self._room and self._is_open

    @property
    def _is_open(self) -> bool:
        """Whether the pace lets a partition begin now."""
        if self._ahead and not self._partitions_first:
            return False
        return self._clock() >= self.pace.opens

    def _begin_paced(self) -> float:
        """Begin a worker if the pace lets one begin. Return when to look again."""
        assert self._tasks is not None
        if self.pace.free:
            self._paced = False
            for _ in range(min(sum(map(len, self._due)), self.turns - self.running)):
                self._begin_worker(self._tasks)
            return math.inf
        if not any(self._due) or self.running >= self._room:
            return math.inf  # until somebody is due or a turn is given back
        if self._ahead and not self._partitions_first:
            return math.inf  # until the other request has begun
        if self._clock() < self.pace.opens:
            return self.pace.opens
        self._begin_worker(self._tasks)
        return math.inf  # until it has taken a partition

    # ------------------------------------------------------------------ who gives way

    @property
    def answering(self) -> int:
        return sum(turn.answering for turn in self._held)

    def hold(self, turn: Turn) -> None:
        self._held[turn] = None

    def release(self, turn: Turn) -> None:
        del self._held[turn]
        if not turn.given_back:
            self._quiet = 0.0

    def brought(self, turn: Turn) -> None:
        self._quiet = 0.0
        if not turn.brought:
            turn.brought = True
            self._slowest = max(turn.age, self._slowest * _FORGET)

    def look(self, seconds: float) -> None:
        """Count the seconds since the last look, and take turns back if others need them."""
        self._quiet += seconds
        for turn in self._held:
            turn.held += seconds
        if not self._held:
            return
        some, failing = self.waiting
        if not some and not failing:
            return
        shortest = self._shortest()
        for turn in list(self._held):
            if not turn.given_back and not self._over(turn, shortest):
                continue
            if some:
                some -= 1
            elif failing and turn.failing:
                failing -= 1
            else:
                continue
            if not turn.given_back:
                turn.give_back()

    def _over(self, turn: Turn, shortest: float) -> bool:
        if turn.held >= self._timeout * 2**turn.doublings:
            return True
        silent = not turn.brought and not turn.waits_for_room and not turn.doublings
        return silent and self._quiet >= shortest and turn.held >= shortest

    def _shortest(self) -> float:
        """How long a first request may be silent while all others are silent too.

        The more wait the shorter: a round through all of them takes a few times `timeout`, and
        only with the logarithm of their number more.
        """
        waiting = self.waiting[0]
        fair = self._timeout * self.turns / (self.turns + waiting)
        return min(self._timeout, max(fair, self._timeout / _SHORTEST, _ANSWERS * self._slowest))
