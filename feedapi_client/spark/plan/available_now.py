"""`AvailableNow`: a trigger that reads what is there, and ends by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from feedapi_client.lineage.planner import Planner
from feedapi_client.spark.plan.probe import Probe


@dataclass(slots=True)
class FixedEnds:
    """Where a trigger that ends by itself ends in one feed.

    `caught_up` are the partitions that were caught up since the trigger began, or read to their
    fixed end. `ends` has the end of each partition, fixed when the trigger began or, for a later
    one, when it started.
    """

    caught_up: set[int] = field(default_factory=set)
    ends: dict[int, str | None] = field(default_factory=dict)

    def left(self, runnable: Iterable[int]) -> list[int]:
        """Return what of the partitions that can be read is not caught up."""
        return [p for p in runnable if p not in self.caught_up]

    def fix_ends(self, lineage: Planner, probe: Probe) -> None:
        """Ask for the ends of the partitions that have none yet."""
        wanted = [p for p in self.left(lineage.runnable()) if p not in self.ends]
        ends = probe.ends(wanted)
        self.ends |= ends
        self.caught_up |= {p for p, end in ends.items() if end == lineage.entries[p].cursor}


@dataclass(slots=True)
class AvailableNow:
    """State of a trigger that ends by itself. `deadline` is on the monotonic clock."""

    deadline: float
    feeds: dict[str, FixedEnds] = field(default_factory=dict)

    def of(self, feed: str) -> FixedEnds:
        """Return the ends of a feed, none of them fixed the first time."""
        return self.feeds.setdefault(feed, FixedEnds())
