"""Finds what hangs, says where it stands, and restarts what may be restarted.

Every wait of a session has a name and a beginning. What shows no sign of life for longer than
`Limits.stall_timeout` hangs: a request, a discovery, an operation of the store, a handler with one
batch. A partition that waits for nothing with a name is stalled. Requests, discoveries and stalled
partitions are restarted. Handlers and operations of a store are not: they may have done a part of
their work.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from operator import length_hint
from types import FrameType
from typing import NamedTuple

import anyio
import anyio.lowlevel

from feedapi_client.lineage.planner import Entry
from feedapi_client.notifications import ProblemFound, ProblemGone
from feedapi_client.runtime.by_key import ByKey
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.discovery import Discovery
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.heartbeat import Heartbeat
from feedapi_client.runtime.key_order import KeyedEvent, Oldest
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.positions import Positions, StoreCall
from feedapi_client.runtime.running import BatchHandler
from feedapi_client.runtime.stacks import stack_in, stack_of_task, stack_where
from feedapi_client.runtime.waits import is_over, wait_of
from feedapi_client.status import PartitionWait, Problem, ProblemName

log = logging.getLogger(__name__)

_LOOKS = 10
"""Looks within `Limits.stall_timeout`, beside those at the moments when something would be late."""
_SHORTEST = 0.001
"""Seconds between two looks, at least."""
_TELL_SECONDS = 1.0
"""Between two looks for listeners; a part of `Limits.stall_timeout` if that is shorter."""
_AT_ONCE = 500
"""Partitions that are looked at before others get their turn."""

_PAUSES = (PartitionWait.PAUSE, PartitionWait.EVIDENCE)

Restart = Callable[[], Awaitable[None]]


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
    restart: Restart | None = None


class Watchdog:
    """Looks at everything that a session waits for."""

    def __init__(
        self,
        driver: Driver,
        fetching: Fetching,
        discovery: Discovery,
        delivery: Delivery,
        problems: Callable[[], Iterable[Problem]],
    ) -> None:
        self._driver = driver
        self._fetching = fetching
        self._discovery = discovery
        self._delivery = delivery
        self._limit = driver.limits.stall_timeout
        self._problems = problems
        self._told: dict[tuple[ProblemName, int | None], Problem] = {}
        self._tells_at = float("-inf")
        self._since: dict[tuple[object, str], float] = {}
        self._reported: set[tuple[ProblemName, int | None, float]] = set()
        self._left = (0, 0)
        self._left_since = 0.0
        self._next = float("inf")
        self.heartbeat = Heartbeat(driver.clock, self._limit)
        """Says whether the event loop runs."""
        self._judges_from = float("-inf")
        self.began = driver.clock()
        """When the session began, on the clock of the event loop."""

    def __repr__(self) -> str:
        return f"<Watchdog: {len(self._reported)} problems>"

    @property
    def blocked_seconds(self) -> float:
        """For how long the event loop may have been blocked; 0 while that is not too long."""
        late = self.heartbeat.late
        return late if self._driver.iterating and late >= self._limit else 0.0

    async def run(self) -> None:
        """Report and restart what hangs, until cancelled."""
        driver = self._driver
        self.heartbeat.beat()
        while True:
            if await self._was_blocked():
                continue
            self._next = driver.clock() + self._limit / _LOOKS
            hangs = list(self._of_consumer(driver.clock()))
            for number, entry in enumerate(list(driver.planner.entries.values())):
                hangs.extend(self._of_partition(entry, driver.clock()))
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await anyio.lowlevel.checkpoint()
            found = {hang[:3] for hang in hangs}
            self._reported &= found
            for hang in hangs:
                if hang[:3] not in self._reported:
                    self._reported.add(hang[:3])
                    await self._report(hang)
            if driver.listeners.subscribed:
                self._tell_problems()
            await self.heartbeat.sleep_until(max(self._next, driver.clock() + _SHORTEST))

    def _tell_problems(self) -> None:
        """Tell listeners which problems were found since the last look, and which are gone.

        At most each second, and for at most a twentieth of the time: health is that of all
        partitions.
        """
        clock, listeners = self._driver.clock, self._driver.listeners
        if (now := clock()) >= self._tells_at:
            found = {(each.name, each.partition): each for each in self._problems()}
            before, self._told = self._told, found
            for key in before.keys() - found.keys():
                listeners.tell(ProblemGone(*key))
            for key in [key for key in found if key not in before]:
                listeners.tell(ProblemFound(*key, found[key].text))
            self._tells_at = clock() + max(
                min(_TELL_SECONDS, self._limit / _LOOKS), 20 * (clock() - now)
            )
        self._next = min(self._next, self._tells_at)

    async def _was_blocked(self) -> bool:
        """Report that the event loop was blocked, and let everything catch up before it is judged.

        Nothing shows a sign of life meanwhile, least of all requests.
        """
        heartbeat, pause = self.heartbeat, self._limit / _LOOKS
        late = heartbeat.late
        heartbeat.beat()
        if late < heartbeat.threshold:
            return False
        self._driver.report(
            None,
            f"the event loop did not run for {late:.1f} s: something in this process calls "
            "blocking code. What waited meanwhile is not judged by it",
        )
        self._judges_from = self._driver.clock() + pause
        await heartbeat.sleep_until(self._judges_from)
        return True

    def look(self) -> list[Stall]:
        """Return what hangs now."""
        now = self._driver.clock()
        hangs = list(self._of_consumer(now))
        if now < self._judges_from or self.heartbeat.late >= self.heartbeat.threshold:
            return hangs  # the event loop was blocked
        if self._driver.iterating:
            for entry in list(self._driver.planner.entries.values()):
                hangs.extend(self._of_partition(entry, now))
        return hangs

    async def _report(self, hang: Stall) -> None:
        driver = self._driver
        where = "" if hang.partition is None else f", partition {hang.partition}"
        log.log(
            logging.ERROR if hang.restart is None else logging.WARNING,
            "feed %s%s: %s (%s)\n%s",
            driver.feed,
            where,
            hang.text,
            hang.name,
            hang.stack() or "its task was not found",
            extra={"feed": driver.feed, "partition": hang.partition, "problem": hang.name.value},
        )
        if hang.restart is not None:
            await hang.restart()

    # ------------------------------------------------------------------ the whole consumer

    def _of_consumer(self, now: float) -> Iterator[Stall]:
        for call in self._driver.positions.calls:
            if self._late(call.began, now):
                yield self._store_stuck(call, now)
        discovery = self._discovery
        due = max(self._driver.timer.next, self._driver.pace.opens)
        if discovery.began is not None and self._late(discovery.began, now):
            yield self._discovery_stuck(discovery.began, "a discovery has taken", now)
        elif discovery.began is None and self._driver.iterating and self._late(due, now):
            yield self._discovery_stuck(due, "a discovery has been due for", now)
        yield from self._scheduler(now)

    def _store_stuck(self, call: StoreCall, now: float) -> Stall:
        return Stall(
            ProblemName.STORE_STUCK,
            call.partitions[0] if len(call.partitions) == 1 else None,
            call.began,
            f"{call.doing} has taken {now - call.began:.1f} s",
            lambda: stack_in(Positions.save) or stack_in(Positions.load),
        )

    def _discovery_stuck(self, began: float, text: str, now: float) -> Stall:
        async def restart() -> None:
            self._discovery.restart()

        return Stall(
            ProblemName.DISCOVERY_STUCK,
            None,
            began,
            f"{text} {now - began:.1f} s",
            lambda: stack_in(Discovery.run, self=self._discovery),
            restart,
        )

    def _scheduler(self, now: float) -> Iterator[Stall]:
        """Partitions that are due while slots are free, and none is taken."""
        scheduler = self._driver.scheduler
        stands = self._driver.iterating and scheduler.has_idle_slots and scheduler.any_due
        for key in list(self._since):
            if key[1] == "begun" and key[0] != scheduler.begun:
                self._since.pop(key, None)
        began = self._lasts((scheduler.begun, "begun"), now, stands)
        if began is not None:
            text = f"partitions are due, slots are free, and none began for {now - began:.1f} s"
            yield Stall(ProblemName.STALLED, None, began, text)

    # ------------------------------------------------------------------ one partition

    def _of_partition(self, entry: Entry, now: float) -> Iterator[Stall]:
        partition = self._driver.partitions.get(entry.id)
        if partition is not None:
            yield from self._request(partition, now)
            yield from self._handler(partition, now)
        yield from self._wait(entry, partition, now)

    def _request(self, partition: RuntimePartition, now: float) -> Iterator[Stall]:
        slot = partition.slot
        if slot is None or slot.waits_for_room:
            return
        if not self._late(slot.seen, now, self._limit + slot.silence):
            return

        async def restart() -> None:
            await self._fetching.restart(partition, now - slot.seen)

        yield Stall(
            ProblemName.FETCH_STUCK,
            partition.id,
            slot.seen,
            f"a request has shown no sign of life for {now - slot.seen:.1f} s",
            lambda: stack_in(Fetching.work, partition=partition),
            restart,
        )

    def _handler(self, partition: RuntimePartition, now: float) -> Iterator[Stall]:
        if self._delivery.keyed is not None:
            yield from self._keyed_handler(partition, now)
            return
        began = partition.handling.attempt_began
        if began is None or not partition.in_flight or partition.committing:
            return
        events = self._delivery.left
        began = max(began, self._taken_at(events, now)) if events is not None else began
        if not self._late(began, now):
            return
        what = "a batch" if events is None else "an event"
        text = f"the application has had {what} for {now - began:.1f} s"
        partition.handling.hangs = text
        yield Stall(
            ProblemName.HANDLER_STUCK,
            partition.id,
            began,
            text,
            lambda: _stack_of_handler(partition.id) or stack_of_task(self._delivery.task),
        )

    def _keyed_handler(self, partition: RuntimePartition, now: float) -> Iterator[Stall]:
        """The event that holds the cursor back; one that fails is a problem of another name."""
        oldest = self.oldest(partition.id)
        if oldest is None or oldest.pausing:
            return
        if not self._late(oldest.since, now):
            return
        does = "is handled" if oldest.begun else "waits behind another one of its key"
        text = f"an event {does} for {now - oldest.since:.1f} s: {oldest.held_back}"
        partition.handling.hangs = text
        yield Stall(
            ProblemName.HANDLER_STUCK,
            partition.id,
            oldest.since,
            text,
            lambda: _stack_of_event(partition.id),
        )

    def oldest(self, partition: int) -> Oldest | None:
        """Return the event by key that holds the cursor of a partition back, if there is one."""
        keyed = self._delivery.keyed
        return None if keyed is None else keyed.oldest(partition)

    def _taken_at(self, events: object, now: float) -> float:
        """When the application was first seen to have so many events left of its batch."""
        left = (id(events), length_hint(events))
        if self._left != left:
            self._left, self._left_since = left, now
        return self._left_since

    def _wait(
        self, entry: Entry, partition: RuntimePartition | None, now: float
    ) -> Iterator[Stall]:
        driver = self._driver
        wait = wait_of(driver, entry, partition)
        uncommitted = wait is PartitionWait.COMMIT
        began = self._lasts((entry.id, "commit"), now, uncommitted)
        if began is not None:
            yield Stall(
                ProblemName.UNCOMMITTED,
                entry.id,
                began,
                "it is read to its end, and the application has not committed that",
                lambda: stack_of_task(self._delivery.task),
            )
        nameless = wait is None and not is_over(entry, follow=driver.settings.follow)
        if partition is not None and driver.scheduler.is_scheduled(partition) and wait in _PAUSES:
            until = driver.scheduler.pauses_until(partition)
            nameless = until is not None and until < now
        began = self._lasts((entry.id, "nothing"), now, nameless)
        if began is not None:
            yield self._stalled(entry, began, now)

    def _stalled(self, entry: Entry, began: float, now: float) -> Stall:
        async def restart() -> None:
            await self._fetching.revive(entry)

        return Stall(
            ProblemName.STALLED,
            entry.id,
            began,
            f"it has waited for nothing for {now - began:.1f} s, and is read again",
            lambda: stack_in(Fetching.work, partition=self._driver.partitions.get(entry.id)),
            restart,
        )

    # ------------------------------------------------------------------ for how long

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


def _stack_of_handler(partition: int) -> str | None:
    """The stack of the task of `FeedConsumer.run` that handles a batch of the partition."""
    code = BatchHandler.__call__.__code__
    return stack_where(
        lambda frame: frame.f_code is code and frame.f_locals["batch"].partition == partition
    )


def _stack_of_event(partition: int) -> str | None:
    """The stack of the task of `FeedConsumer.run_by_key` that handles an event of the partition."""

    code = ByKey._work.__code__

    def handles(frame: FrameType) -> bool:
        item = frame.f_locals.get("item") if frame.f_code is code else None
        return isinstance(item, KeyedEvent) and item.work.batch.partition == partition

    return stack_where(handles)
