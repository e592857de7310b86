"""What was drained by empty answers is asked again: late is better than lost (R6)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import FeedError
from feedapi_client.lineage.states import State
from feedapi_client.protocol.page import Outcome
from feedapi_client.protocol.text import shown
from feedapi_client.retry import Backoff
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.topology import Topology

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
    """When a drained partition is asked again. The pauses between two looks double.

    `own`: this session has drained it. Otherwise an operator may have, to leave out more.
    `awaited`: the attempts of a look without which the session may not end (without `follow`).
    """

    until: float
    due: float
    pause: float
    own: bool
    awaited: Backoff | None = None


class LateEvents:
    """Looks for events behind the ends that only empty answers have shown.

    One that is found is delivered, although children of the partition may be ahead of it by then.
    Behind an end that an earlier session, or an operator, has stored it is only reported.
    """

    def __init__(self, planning: Planning, client: FeedClient, topology: Topology) -> None:
        self.client = client
        self._planning = planning
        self._iteration = planning.iteration
        self._topology = topology
        self._looks: dict[int, _Look] = {}
        self._has_begun = False

    @property
    def awaited(self) -> bool:
        """Whether a look is under way or due, without which a session may not end."""
        partitions = self._planning.partitions
        awaited = (partitions[id] for id, look in self._looks.items() if look.awaited is not None)
        return any(p.looks or p.turn is not None for p in awaited)

    def ask_again(self, left: Mapping[int, float]) -> None:
        """Look behind what an earlier session has drained, for `left` seconds, at least once."""
        planner, now = self._planning.planner, self._iteration.clock()
        pause = self._iteration.limits.settle_time
        for id in self._looks:
            self._planning.partition(id).look(None)
            self._planning.advance(self._planning.partition(id))
        self._looks.clear()
        for id, seconds in left.items():
            entry = planner.entries.get(id)
            if entry is not None and entry.state is State.DRAINED and planner.is_closed(id):
                self._add(id, max(seconds, pause), pause, own=True, awaited=True)
                self._look_at(id, now)

    def discovered(self) -> None:
        """Let what is due be looked at. Call it after each discovery.

        A session without `follow` may be over before any of it is due: behind what an earlier one
        has drained it looks at once.
        """
        now, pause = self._iteration.clock(), self._iteration.limits.settle_time
        for id in self._drained_before():
            first = pause if self._iteration.settings.follow else 0.0
            self._add(id, ASKED_FOR_SECONDS, first, own=False, awaited=True)
        for id in self._planning.take_drained():
            if self._is_doubtful(id):
                self._add(id, ASKED_FOR_SECONDS, pause, own=True)
        for id, look in list(self._looks.items()):
            entry = self._planning.planner.entries[id]
            if entry.state is not State.DRAINED or now > look.until:
                del self._looks[id]
            elif now >= look.due and self._planning.planner.is_closed(id):
                look.pause *= 2
                look.due = now + look.pause
                self._look_at(id, now)

    def _add(
        self, id: int, seconds: float, first: float, *, own: bool, awaited: bool = False
    ) -> None:
        now, clock = self._iteration.clock(), self._iteration.clock
        waits = awaited and not self._iteration.settings.follow
        backoff = Backoff(attempts=_MOST_LOOKS, clock=clock) if waits else None
        pause = self._iteration.limits.settle_time
        self._looks[id] = _Look(now + seconds, now + first, pause, own, backoff)
        self._planning.partition(id)

    def _look_at(self, id: int, until: float) -> None:
        p = self._planning.partition(id)
        p.look(until)
        self._planning.advance(p)

    def _is_doubtful(self, id: int) -> bool:
        return id in self._topology.closed_since or self._planning.planner.doubted(id)

    def _drained_before(self) -> list[int]:
        """Return what is stored as drained at a session's first discovery: maybe just now."""
        had_begun, self._has_begun = self._has_begun, True
        if had_begun:
            return []
        entries = self._planning.planner.entries.values()
        drained = (e.id for e in entries if e.state is State.DRAINED and self._is_doubtful(e.id))
        return heapq.nlargest(_MOST_BEFORE, drained)

    async def look(self, p: RuntimePartition) -> None:
        """Ask a drained partition once: a turn of it.

        A failure is ignored, as the next look is soon, but for a look that is awaited.
        """
        p.look(None)
        if (look := self._looks.get(p.id)) is None:
            return
        found = False
        try:
            with anyio.fail_after(self._iteration.limits.slot_timeout):
                found = await self._has_more(p)
        except (FeedError, TimeoutError) as error:
            try:
                if look.awaited is not None:
                    p.look(self._iteration.clock() + look.awaited.pause(error))
                    return
            except (FeedError, TimeoutError):
                pass  # too many
        look.awaited = None
        if found and p.entry.state is State.DRAINED:
            self._found(p)

    def _found(self, p: RuntimePartition) -> None:
        if not self._looks.pop(p.id).own:
            self._iteration.report(
                p.id,
                "there is an event behind the end that is stored. If that was not meant, "
                f"'feedapi cursors set {p.id} CURSOR' with the stored cursor reads on: "
                f"{shown(p.entry.cursor)}",
            )
            return
        p.trouble.failed_at = self._iteration.clock()  # what answers may lag, and for long
        self._iteration.report(
            p.id,
            "an event came behind the end that its empty answers had shown: it is delivered late, "
            "perhaps after events of its children. The publisher should list lastCursor",
        )
        self._planning.perform(self._planning.planner.reopened(p.id))

    async def _has_more(self, p: RuntimePartition) -> bool:
        cursor: str | None = p.entry.cursor
        for _ in range(_MAX_PAGES):
            if cursor is None:
                return False
            found, cursor = await self._ask(p, cursor)
            if found:
                return True
        return False

    async def _ask(self, p: RuntimePartition, cursor: str) -> tuple[bool, str | None]:
        """Return whether events come behind a cursor; without any, the cursor that does come."""
        async with self.client.open(self._topology.known, p.id, cursor) as response:
            reader = response.reader
            async for chunk in response:
                if any(batch.events for batch in reader.feed(chunk)):
                    return True, None
                reader.check()
            finished = reader.finish()
        if any(batch.events for batch in finished.batches):
            return True, None
        return False, reader.cursor if finished.outcome is Outcome.PROGRESS else None
