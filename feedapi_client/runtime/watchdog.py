"""Finds what hangs, says where it stands, and restarts what may be restarted.

Every wait of a session has a name and a beginning. What shows no sign of life for longer than
`Limits.stall_timeout` hangs: a request, a discovery, an operation of the store, a handler with one
batch. A partition that waits for nothing with a name is stalled. Requests, discoveries and stalled
partitions are restarted. Handlers and operations of a store are not: they may have done a part of
their work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import length_hint
from types import FrameType
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from feedapi_client.lineage.states import Entry, Start, State
from feedapi_client.notifications import ProblemFound, ProblemGone
from feedapi_client.runtime.by_key import ByKey
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.iteration import Iteration
from feedapi_client.runtime.key_order import KeyedEvent, Oldest
from feedapi_client.runtime.partition import Phase, RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.running import BatchHandler
from feedapi_client.runtime.waiting import Wait, Waits, stack_of, stack_where
from feedapi_client.status import PartitionWait, Problem, ProblemName

log = logging.getLogger(__name__)

_LOOKS = 10
"""Looks within `Limits.stall_timeout`, beside those at the moments when something would be late."""
_SHORTEST = 0.001
"""Seconds between two looks, at least."""
_TELL_SECONDS = 1.0
"""Between two looks for listeners; a part of `Limits.stall_timeout` if that is shorter."""
_BEAT_SECONDS = 1.0
"""Between two signs of life of the event loop, at most."""
_SHORTEST_BLOCK, _LONGEST_BLOCK = 1.0, 5.0
"""Seconds after which an event loop that does not run is reported. Between them, a tenth of
`Limits.stall_timeout`."""
_AT_ONCE = 500
"""Partitions that are looked at before others get their turn."""
_ENDED = (State.DRAINED, State.SUPERSEDED, State.PARKED, State.VANISHED)


class Stall(NamedTuple):
    """Something that hangs.

    Attributes:
        name: what kind of problem it is.
        partition: whose; None for what concerns all.
        began: when it began, or last showed a sign of life, on the clock of the event loop.
        text: what it is, for people.
        stack: where its task stands.
        restart: starts it anew; None for what must not be restarted.
    """

    name: ProblemName
    partition: int | None
    began: float
    text: str
    stack: Callable[[], str | None] = lambda: None
    restart: Callable[[], object] | None = None


class Watchdog:
    """Looks at everything that a session waits for. `problems`: of its health, for listeners."""

    def __init__(
        self,
        planning: Planning,
        fetching: Fetching,
        delivery: Delivery,
        waits: Waits,
        problems: Callable[[], Iterable[Problem]],
    ) -> None:
        self.waits = waits
        self._planning = planning
        self._iteration = planning.iteration
        self._clock = planning.iteration.clock
        self._fetching = fetching
        self._delivery = delivery
        self._limit = planning.iteration.limits.stall_timeout
        self._problems = problems
        self._told: dict[tuple[ProblemName, int | None], Problem] = {}
        self._tells_at = float("-inf")
        self._since: dict[tuple[object, str], float] = {}
        self._reported: set[tuple[ProblemName, int | None, float]] = set()
        self._left = (0, 0)
        self._left_since = 0.0
        self._next = float("inf")
        self._judges_from = float("-inf")
        # Whether the event loop runs is seen by a clock that goes on while it does not.
        self._block = min(_LONGEST_BLOCK, max(_SHORTEST_BLOCK, self._limit / 10))
        self._beat = min(_BEAT_SECONDS, self._limit / 10)
        self._beaten = time.monotonic()

    def __repr__(self) -> str:
        return f"<Watchdog: {len(self._reported)} problems>"

    # ------------------------------------------------------------------ looks

    async def run(self) -> None:
        self._beaten = time.monotonic()
        while True:
            if await self._was_blocked():
                continue
            self._next = self._clock() + self._limit / _LOOKS
            hangs = list(self._of_consumer(self._clock()))
            for number, entry in enumerate(list(self._planning.planner.entries.values())):
                hangs.extend(self._of_partition(entry, self._clock()))
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await anyio.lowlevel.checkpoint()
            self._reported &= {hang[:3] for hang in hangs}
            for hang in hangs:
                if hang[:3] not in self._reported:
                    self._reported.add(hang[:3])
                    self._report(hang)
            if self._iteration.listeners.subscribed:
                self._tell_problems()
            await self._sleep_until(max(self._next, self._clock() + _SHORTEST))

    def look(self) -> list[Stall]:
        now = self._clock()
        hangs = list(self._of_consumer(now))
        if now < self._judges_from or self._late_beat >= self._block:
            return hangs  # the event loop was blocked
        if self._iteration.iterating:
            for entry in list(self._planning.planner.entries.values()):
                hangs.extend(self._of_partition(entry, now))
        return hangs

    def _report(self, hang: Stall) -> None:
        feed = self._iteration.feed
        where = "" if hang.partition is None else f", partition {hang.partition}"
        log.log(
            logging.ERROR if hang.restart is None else logging.WARNING,
            "feed %s%s: %s (%s)\n%s",
            feed,
            where,
            hang.text,
            hang.name,
            hang.stack() or "its task was not found",
            extra={"feed": feed, "partition": hang.partition, "problem": hang.name.value},
        )
        if hang.restart is not None:
            hang.restart()

    def _tell_problems(self) -> None:
        """Tell listeners which problems were found since the last look, and which are gone.

        At most each second, and for at most a twentieth of the time: health is that of all
        partitions.
        """
        listeners = self._iteration.listeners
        if (now := self._clock()) >= self._tells_at:
            found = {(each.name, each.partition): each for each in self._problems()}
            before, self._told = self._told, found
            for key in before.keys() - found.keys():
                listeners.tell(ProblemGone(*key))
            for key in [key for key in found if key not in before]:
                listeners.tell(ProblemFound(*key, found[key].text))
            pause = min(_TELL_SECONDS, self._limit / _LOOKS)
            self._tells_at = self._clock() + max(pause, 20 * (self._clock() - now))
        self._next = min(self._next, self._tells_at)

    # ------------------------------------------------------------------ whether the loop runs

    @property
    def blocked_seconds(self) -> float:
        """For how long the event loop may have been blocked; 0 while that is not too long."""
        late = self._late_beat
        return late if self._iteration.iterating and late >= self._limit else 0.0

    @property
    def _late_beat(self) -> float:
        """How much later than planned the next sign of life is, in seconds; negative before."""
        return time.monotonic() - self._beaten - self._beat

    async def _sleep_until(self, moment: float) -> None:
        """Sleep, with signs of life meanwhile. Return early when the event loop was blocked."""
        while True:
            self._beaten = time.monotonic()
            wake_up = min(moment, self._clock() + self._beat)
            await anyio.sleep_until(wake_up)
            if wake_up >= moment or self._late_beat >= self._block:
                return

    async def _was_blocked(self) -> bool:
        """Report that the event loop was blocked, and let everything catch up before it is judged.

        Nothing shows a sign of life meanwhile, least of all requests.
        """
        late, self._beaten = self._late_beat, time.monotonic()
        if late < self._block:
            return False
        self._iteration.report(
            None,
            f"the event loop did not run for {late:.1f} s: something in this process calls "
            "blocking code. What waited meanwhile is not judged by it",
        )
        self._judges_from = self._clock() + self._limit / _LOOKS
        await self._sleep_until(self._judges_from)
        return True

    # ------------------------------------------------------------------ what hangs

    def _of_consumer(self, now: float) -> Iterator[Stall]:
        for wait in list(self.waits.all):
            if self._late(wait.began, now):
                text = f"{_doing(wait)} {now - wait.began:.1f} s"
                stack = partial(stack_of, wait.task)
                yield Stall(wait.name, wait.partition, wait.began, text, stack, wait.restart)
        if not self._iteration.iterating:
            return
        agenda = self._planning.agenda
        due = max(self._planning.timer.next, agenda.pace.opens)
        if self.waits.of(ProblemName.DISCOVERY_STUCK) is None and self._late(due, now):
            text = f"a discovery has been due for {now - due:.1f} s"
            yield Stall(ProblemName.DISCOVERY_STUCK, None, due, text)
        for key in [key for key in self._since if key[1] == "begun" and key[0] != agenda.begun]:
            del self._since[key]
        began = self._lasts((agenda.begun, "begun"), now, agenda.waits_in_vain)
        if began is not None:
            text = f"partitions are due, slots are free, and none began for {now - began:.1f} s"
            yield Stall(ProblemName.STALLED, None, began, text)

    def _of_partition(self, entry: Entry, now: float) -> Iterator[Stall]:
        p = self._planning.partitions.get(entry.id)
        if p is not None:
            yield from self._request(p, now)
            yield from self._handler(p, now)
        wait = self.wait_of(entry, p)
        began = self._lasts((entry.id, "commit"), now, wait is PartitionWait.COMMIT)
        if began is not None:
            yield Stall(
                ProblemName.UNCOMMITTED,
                entry.id,
                began,
                "it is read to its end, and the application has not committed that",
                partial(stack_of, self._delivery.task),
            )
        nameless = wait is None and not self._is_over(entry)
        began = self._lasts((entry.id, "nothing"), now, nameless)
        if began is not None:
            text = f"it has waited for nothing for {now - began:.1f} s, and is read again"
            restart = partial(self._revive, entry)
            yield Stall(ProblemName.STALLED, entry.id, began, text, restart=restart)

    def _request(self, p: RuntimePartition, now: float) -> Iterator[Stall]:
        turn = p.turn
        if turn is None or turn.waits_for_room:
            return
        if self._late(turn.seen, now, self._limit + turn.silence):
            text = f"a request has shown no sign of life for {now - turn.seen:.1f} s"
            stack, restart = partial(stack_of, turn.task), partial(self._fetching.restart, p)
            yield Stall(ProblemName.FETCH_STUCK, p.id, turn.seen, text, stack, restart)

    def _handler(self, p: RuntimePartition, now: float) -> Iterator[Stall]:
        if self._delivery.keyed is not None:
            yield from self._keyed_handler(p, now)
            return
        began = p.handling.attempt_began
        if began is None or not p.in_flight or p.committing:
            return
        events = self._delivery.left
        began = max(began, self._taken_at(events, now)) if events is not None else began
        if not self._late(began, now):
            return
        what = "a batch" if events is None else "an event"
        text = f"the application has had {what} for {now - began:.1f} s"
        p.handling.hangs = text

        def stack() -> str | None:
            return _stack_of_handler(p.id) or stack_of(self._delivery.task)

        yield Stall(ProblemName.HANDLER_STUCK, p.id, began, text, stack)

    def _keyed_handler(self, p: RuntimePartition, now: float) -> Iterator[Stall]:
        """The event that holds the cursor back; one that fails is a problem of another name."""
        oldest = self.oldest(p.id)
        if oldest is None or oldest.pausing or not self._late(oldest.since, now):
            return
        does = "is handled" if oldest.begun else "waits behind another one of its key"
        text = f"an event {does} for {now - oldest.since:.1f} s: {oldest.held_back}"
        p.handling.hangs = text
        stack = partial(_stack_of_event, p.id)
        yield Stall(ProblemName.HANDLER_STUCK, p.id, oldest.since, text, stack)

    def oldest(self, partition: int) -> Oldest | None:
        keyed = self._delivery.keyed
        return None if keyed is None else keyed.oldest(partition)

    def _taken_at(self, events: object, now: float) -> float:
        """When the application was first seen to have so many events left of its batch."""
        left = (id(events), length_hint(events))
        if self._left != left:
            self._left, self._left_since = left, now
        return self._left_since

    def _revive(self, entry: Entry) -> None:
        p = self._planning.partition(entry.id)
        if entry.running:
            self._planning.perform([Start(entry.id, entry.cursor)])
        self._planning.advance(p)

    def _late(self, began: float, now: float, limit: float | None = None) -> bool:
        """Whether something has lasted for too long; otherwise remember when it will have."""
        deadline = began + (self._limit if limit is None else limit)
        if now >= deadline:
            return True
        self._next = min(self._next, deadline)
        return False

    def _lasts(self, key: tuple[object, str], now: float, holds: bool) -> float | None:
        """Since when something has held that keeps no time of its own; None if not for too long."""
        if not holds:
            self._since.pop(key, None)
            return None
        began = self._since.setdefault(key, now)
        return began if self._late(began, now) else None

    # ------------------------------------------------------------------ what a partition waits for

    def _is_over(self, entry: Entry) -> bool:
        """Whether a partition waits for nothing because nothing of it is to be read."""
        follow = self._iteration.settings.follow
        return entry.state in _ENDED or (entry.state is State.CAUGHT_UP and not follow)

    def wait_of(self, entry: Entry, p: RuntimePartition | None) -> PartitionWait | None:
        """Return what a partition waits for in a session that runs; None if that has no name.

        Each wait is looked at, and not just remembered: a partition for which nobody will do
        anything any more has none. `p` is None for one that was never read in this session.
        """
        wait = None if p is None else self._for_application(p)
        if wait is not None:
            return wait
        if entry.state is State.WAITING:
            return PartitionWait.PARENT
        if entry.state is State.ELSEWHERE:
            return PartitionWait.LEASE
        if self._is_over(entry):
            return None
        if entry.id in self._iteration.settings.paused:
            return PartitionWait.RESUME
        wait = None if p is None else self._for_publisher(p)
        if wait is None and self._planning.applying:
            return PartitionWait.SAVE  # one of the planner's actions, carried out in turn
        return wait

    def _for_application(self, p: RuntimePartition) -> PartitionWait | None:
        if p.committing:
            return PartitionWait.SAVE
        if p.in_flight:
            if p.handling.attempt_began is not None:
                return PartitionWait.APPLICATION
            return PartitionWait.RETRY if p.handling.retry_at else PartitionWait.SAVE
        if p.announced and p.queued:
            return PartitionWait.DELIVERY
        return PartitionWait.COMMIT if self._planning.phase(p) is Phase.COMMIT else None

    def _for_publisher(self, p: RuntimePartition) -> PartitionWait | None:
        if p.turn is not None and p.turn.waits_for_room:
            return PartitionWait.BUFFER
        due = self._planning.agenda.is_due(p)
        if due is False and p.until < self._clock():
            return None  # its time is over, and nobody looks
        if p.evidence_since is not None and (p.turn is not None or due is not None):
            return PartitionWait.EVIDENCE
        if p.turn is not None:
            return PartitionWait.RESPONSE
        if due is not None:
            return PartitionWait.SLOT if due else PartitionWait.PAUSE
        return PartitionWait.DISCOVERY if p.trouble.refused else None


def _doing(wait: Wait) -> str:
    return f"{wait.text} has taken" if wait.restart is None else wait.text


def _stack_of_handler(partition: int) -> str | None:
    code = BatchHandler.__call__.__code__
    return stack_where(
        lambda frame: frame.f_code is code and frame.f_locals["batch"].partition == partition
    )


def _stack_of_event(partition: int) -> str | None:
    code = ByKey._work.__code__

    def handles(frame: FrameType) -> bool:
        item = frame.f_locals.get("item") if frame.f_code is code else None
        return isinstance(item, KeyedEvent) and item.work.batch.partition == partition

    return stack_where(handles)


def waits_for(iteration: Iteration, waits: Waits) -> str:
    call = waits.of(ProblemName.STORE_STUCK)
    return iteration.entry_waits if call is None else f"for the store, {call.text}"


async def warn_if_entry_hangs(iteration: Iteration, waits: Waits, task: Any) -> None:
    """Log a warning whenever an entry has waited for one thing for `Limits.stall_timeout` more.

    Until cancelled. `task` opens the session.
    """
    limit = iteration.limits.stall_timeout
    doing, began, logged = "", 0.0, 0
    while True:
        now, waited = iteration.clock(), waits_for(iteration, waits)
        if doing != waited:
            doing, began, logged = waited, now, 0
        if now - began >= (logged + 1) * limit:
            logged += 1
            call = waits.of(ProblemName.STORE_STUCK)
            log.warning(
                "feed %s: the consumer is being entered and has waited %g s %s\n%s",
                iteration.feed,
                now - began,
                doing,
                stack_of(task if call is None else call.task) or "its task was not found",
                extra={"feed": iteration.feed, "problem": ProblemName.NOT_OPEN.value},
            )
        await anyio.sleep(limit / _LOOKS)
