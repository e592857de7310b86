"""What discoveries have said, and when the next one is due (R10)."""

from __future__ import annotations

import math
from collections.abc import Collection

from feedapi_client.model import FeedInfo
from feedapi_client.options import Limits
from feedapi_client.protocol.page import FeedAnswers
from feedapi_client.runtime.loop import Wakeup, loop_clock

_GAP_SECONDS = 0.05
"""Minimum time between two discoveries, however often one is asked for. Not less than it takes to
plan what they list: 80 ms with 10,000 partitions, in which nothing is fetched or delivered."""
UNKNOWN_COMMAND_GAP_SECONDS = 5.0
"""Minimum time between two discoveries that only unknown commands caused."""
REFUSED_GAP_SECONDS = 0.25
"""Between two discoveries that only refused partitions ask for."""


class DiscoveryTimer:
    """When the next discovery is due: every `interval` seconds, and soon after it was asked for."""

    def __init__(self, interval: float) -> None:
        self.wanted = False
        """Whether a discovery was requested and none that began later has succeeded."""
        self.next = 0.0
        self._interval = interval
        self._refused_gap = min(REFUSED_GAP_SECONDS, interval)
        self._asked = math.inf
        """The earliest moment that somebody has asked for since the last discovery began."""
        self._begun = self._last = -math.inf
        self._not_before = 0.0
        self._sooner = Wakeup()
        self._clock = loop_clock()

    def soon(self) -> None:
        self._ask(self._clock())

    def refused(self, delay: float) -> None:
        """A partition is refused, and is asked again after `delay` seconds and a new discovery.

        However many partitions are refused, this leads to a few discoveries a second at most.
        """
        self._ask(max(self._clock() + delay, self._begun + self._refused_gap))

    def perhaps(self) -> None:
        """Request a discovery that may bring something new, at a limited rate."""
        gap = self._last + UNKNOWN_COMMAND_GAP_SECONDS - self._clock()
        self.later(max(0.0, gap))

    def later(self, delay: float) -> None:
        self._by(self._clock() + delay)

    def begun(self) -> None:
        self._begun = self._clock()
        self._asked = self.next = math.inf

    def succeeded(self) -> None:
        self.wanted = self._asked < math.inf
        self._last = self._clock()
        self._not_before = self._last + _GAP_SECONDS
        self.next = max(min(self._asked, self._last + self._interval), self._not_before)

    def planned(self) -> None:
        """Leave others as much time as it took to plan what the last discovery has listed."""
        now = self._clock()
        self._not_before = now + max(_GAP_SECONDS, now - self._last)
        self.next = max(self.next, self._not_before)

    def failed(self, pause: float) -> None:
        self._last = self._clock()
        self.next = self._not_before = self._last + max(_GAP_SECONDS, pause)

    async def due(self) -> None:
        while (pause := self.next - self._clock()) > 0:
            await self._sooner.wait(pause)

    def _ask(self, when: float) -> None:
        self.wanted = True
        self._asked = min(self._asked, when)
        self._by(when)

    def _by(self, when: float) -> None:
        when = max(when, self._not_before)
        if when < self.next:
            self.next = when
            self._sooner.set()


class Topology:
    """The last good discovery, and what the feed's answers are worth as evidence (R6)."""

    def __init__(self, limits: Limits, *, selects: bool) -> None:
        self.info: FeedInfo | None = None
        self.awaits_partitions = False
        """Whether discoveries list no partition, and one still may (R7)."""
        self.closed_since: dict[int, float] = {}
        """When each partition was first seen closed whose end has to be shown by its answers."""
        self.answers = FeedAnswers(limits.settle_time)
        self._selects = selects
        self._clock = loop_clock()
        self._failed_at = -math.inf
        self._told: set[int] = set()

    @property
    def known(self) -> FeedInfo:
        assert self.info is not None
        return self.info

    def discovered(self, info: FeedInfo) -> None:
        if self.info is None or self.info.partitions is not info.partitions:
            now, before = self._clock(), self.closed_since
            self.closed_since = {
                p.id: before.get(p.id, now)
                for p in info.partitions.values()
                if p.closed and (self._selects or p.last_cursor is None)
            }
        self.info = info

    def failed(self) -> None:
        self._failed_at = self._clock()

    def end_counts_from(self, partition: int) -> float:
        """The moment from which the time of the end of a partition counts, as far as it is known.

        It was seen closed then, or the feed has failed.
        """
        seen = self.closed_since.get(partition, self._clock())
        return max(seen, self._failed_at, self.answers.failed_at)

    def newly_awaited(self, of: Collection[int]) -> set[int]:
        self._told &= self.closed_since.keys()
        new = (self.closed_since.keys() & of) - self._told
        self._told |= new
        return new

    def was_told(self, partition: int) -> bool:
        return partition in self._told
