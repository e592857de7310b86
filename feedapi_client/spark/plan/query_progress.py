"""What the progress of a streaming query says of its feed. Imports no Spark."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from feedapi_client.lineage.planner import Planner, State
from feedapi_client.spark.target import FetchResult

_MANY = 1000
_KEPT_SECONDS = 1.0
"""How long the report on many partitions is kept: to count them takes some milliseconds."""
_COUNTED_STATES = {
    State.READING: "reading",
    State.CAUGHT_UP: "caughtUp",
    State.WAITING: "waiting",
    State.DRAINED: "drained",
}


class ProgressReport:
    """Counts states, requests, and the time since partitions were caught up.

    - ``partitions``, and by state: a partition that can't be asked is counted as ``reading``.
    - ``caughtUpPartitions``: as ``caughtUp``; drained ones included.
    - ``behindSeconds``: the longest time since a partition that is not caught up was; 0 when all
      are; None when one never was.
    - ``requests``, ``retries``: of the last epoch and of the polls since the one before.
    """

    def __init__(self) -> None:
        self._caught_up_at: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._report: dict[str, Any] = {}
        self._report_until = -math.inf

    def next_epoch(self) -> None:
        """Count requests from zero."""
        self._counts.clear()
        self._report_until = -math.inf

    def add(self, result: FetchResult, *, caught_up: bool) -> None:
        """Add what a read or a poll of a partition came to."""
        self._counts["requests"] += result.requests
        self._counts["retries"] += result.retries
        if caught_up:
            self._caught_up_at[result.partition] = time.monotonic()

    def of(
        self, lineage: Planner, failing: Collection[int], asked: Collection[int]
    ) -> dict[str, Any]:
        """Return the report. Spark asks for it at each trigger, also at idle ones.

        Arguments:
            failing: partitions whose last request failed.
            asked: partitions whose request takes long.
        """
        now = time.monotonic()
        if now < self._report_until:
            return self._report
        counts = dict.fromkeys(["partitions", *_COUNTED_STATES.values()], 0)
        behind: list[float] = []
        for entry in lineage.entries.values():
            counts["partitions"] += entry.id in lineage.graph
            state = entry.state
            if state is State.CAUGHT_UP and (entry.id in failing or entry.id in asked):
                state = State.READING
            if state in _COUNTED_STATES:
                counts[_COUNTED_STATES[state]] += 1
            if state is State.READING:
                behind.append(now - self._caught_up_at.get(entry.id, -math.inf))
        longest = round(max(behind, default=0.0), 3)
        self._report = {
            **counts,
            "failing": len(failing),
            "caughtUpPartitions": counts["caughtUp"] + counts["drained"],
            "behindSeconds": None if longest == math.inf else longest,
            "requests": self._counts["requests"],
            "retries": self._counts["retries"],
        }
        self._report_until = now + _KEPT_SECONDS if len(lineage.entries) > _MANY else now
        return self._report
