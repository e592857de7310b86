"""What was drained by empty answers is asked again: late is better than lost (R6)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import FeedError
from feedapi_client.lineage.planner import State
from feedapi_client.protocol.page import Outcome
from feedapi_client.protocol.text import shown
from feedapi_client.retry import Backoff
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import RuntimePartition

ASKED_FOR_SECONDS = 600.0
"""For so long a partition is asked again at discoveries."""
_MOST_BEFORE = 100
"""Partitions that were drained before a session began and are asked again: the newest ones."""
_MOST_LOOKS = 6
"""Looks that fail before a session without `follow` ends without an answer."""
_MAX_PAGES = 5
"""Pages without an event that one look reads."""


@dataclass(slots=True)
class _Look:
    """When a drained partition is asked again. The pauses between two looks double."""

    until: float
    due: float
    pause: float
    own: bool
    """Whether this session has drained it. Otherwise an operator may have, to leave out more."""


class LateEvents:
    """Looks for events behind the ends that only empty answers have shown.

    Late is better than lost: one that is found is delivered, although children of the partition may
    be ahead of it by then. Behind an end that an earlier session, or an operator, has stored it is
    only reported.
    """

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self.client = client
        self._looks: dict[int, _Look] = {}
        self._has_begun = False
        self._looking: set[int] = set()
        self._first: dict[int, Backoff] = {}
        """Partitions of earlier sessions of which one look is waited for (without `follow`)."""

    @property
    def awaited(self) -> bool:
        """Whether a look is under way or due, without which a session may not end."""
        driver = self._driver
        self._first = {
            id: backoff
            for id, backoff in self._first.items()
            if id in self._looking or driver.scheduler.is_scheduled(driver.partition(id))
        }
        return bool(self._first)

    def ask_again(self, left: Mapping[int, float]) -> None:
        """Look behind what an earlier session has drained, and deliver what is there.

        Arguments:
            left: for how many seconds. At least once, however late.
        """
        driver, now, pause = self._driver, self._driver.clock(), self._driver.limits.settle_time
        self._looks.clear()
        self._first.clear()
        for id, seconds in left.items():
            entry = driver.planner.entries.get(id)
            if (
                entry is None
                or entry.state is not State.DRAINED
                or not driver.planner.is_closed(id)
            ):
                continue
            self._looks[id] = _Look(now + max(seconds, pause), now + pause, pause, own=True)
            if not driver.settings.follow:
                self._first[id] = Backoff(attempts=_MOST_LOOKS, clock=driver.clock)
            driver.scheduler.schedule(driver.partition(id))

    def discovered(self) -> None:
        """Schedule the looks that are due. Call it after each discovery.

        A session without `follow` may be over before any of them is due: behind what an earlier one
        has drained it looks at once.
        """
        driver, now = self._driver, self._driver.clock()
        pause = driver.limits.settle_time
        for id in self._drained_before():
            first = now + pause if driver.settings.follow else now
            self._looks[id] = _Look(now + ASKED_FOR_SECONDS, first, pause, own=False)
            if not driver.settings.follow:
                self._first[id] = Backoff(attempts=_MOST_LOOKS, clock=driver.clock)
        for id in driver.take_drained():
            self._looks[id] = _Look(now + ASKED_FOR_SECONDS, now + pause, pause, own=True)
        for id, look in list(self._looks.items()):
            partition = driver.partition(id)
            if partition.entry.state is not State.DRAINED or now > look.until:
                del self._looks[id]
            elif now >= look.due and driver.planner.is_closed(id):
                look.pause *= 2
                look.due = now + look.pause
                driver.scheduler.schedule(partition)

    def _drained_before(self) -> list[int]:
        """Return what is stored as drained at a session's first discovery: maybe just now."""
        entries, had_begun = self._driver.planner.entries, self._has_begun
        self._has_begun = True
        if had_begun:
            return []
        drained = (
            id
            for id in entries
            if (id in self._driver.closed_since or self._driver.planner.doubted(id))
            and entries[id].state is State.DRAINED
        )
        return heapq.nlargest(_MOST_BEFORE, drained)

    async def look(self, partition: RuntimePartition) -> float | None:
        """Ask a drained partition once: a job of the scheduler.

        A failure is ignored, as the next look is soon, but for a look that is waited for: return
        the seconds after which it is made again. Raises `StoreError`.
        """
        if partition.id not in self._looks or partition.entry.state is not State.DRAINED:
            return None
        driver = self._driver
        self._looking.add(partition.id)
        try:
            with anyio.fail_after(driver.limits.slot_timeout):
                found = await self._has_more(partition)
        except (FeedError, TimeoutError) as error:
            return self._pause(partition.id, error)
        finally:
            self._looking.discard(partition.id)
            driver.wake()
        if found and partition.entry.state is State.DRAINED:
            await self._found(partition)
        return None

    def _pause(self, partition: int, error: Exception) -> float | None:
        try:
            return self._first[partition].pause(error) if partition in self._first else None
        except (FeedError, TimeoutError):
            return None  # too many

    async def _found(self, partition: RuntimePartition) -> None:
        driver = self._driver
        if not self._looks.pop(partition.id).own:
            driver.report(
                partition.id,
                "there is an event behind the end that is stored. If that was not meant, "
                f"'feedapi cursors set {partition.id} CURSOR' with the stored cursor reads on: "
                f"{shown(partition.entry.cursor)}",
            )
            return
        partition.failures.failed_at = driver.clock()  # what answers may lag, and for long
        driver.report(
            partition.id,
            "an event came behind the end that its empty answers had shown: it is delivered late, "
            "perhaps after events of its children. The publisher should list lastCursor",
        )
        await driver.apply(driver.planner.reopened(partition.id))

    async def _has_more(self, partition: RuntimePartition) -> bool:
        cursor: str | None = partition.entry.cursor
        for _ in range(_MAX_PAGES):
            if cursor is None:
                return False
            found, cursor = await self._ask(partition, cursor)
            if found:
                return True
        return False

    async def _ask(self, partition: RuntimePartition, cursor: str) -> tuple[bool, str | None]:
        """Return whether events come behind a cursor; without any, the cursor that does come."""
        async with self.client.open(self._driver.discovered, partition.id, cursor) as response:
            reader = response.reader
            async for chunk in response.chunks():
                if any(batch.events for batch in reader.feed(chunk)):
                    return True, None
                reader.check()
            finished = reader.finish()
        if any(batch.events for batch in finished.batches):
            return True, None
        return False, reader.cursor if finished.outcome is Outcome.PROGRESS else None
