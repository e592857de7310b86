"""Asks partitions whether they have events (R15), and where they end. Imports no Spark.

`AvailableNow` is the trigger that reads what is there, and ends by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from feedapi_client.lineage.planner import Planner
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import FetchResult, Target, fetch, fix_end

MAX_THREADS = 16
_MAX_EMPTY_BATCHES = 5
"""Batches without an event that one probe reads: another one goes on behind them."""


class Probe:
    """Asks partitions for their next event, and reads no further than that."""

    def __init__(self, connection: FeedConnection) -> None:
        self._connection = connection
        limit = connection.options.limits.max_concurrent_fetches
        self.concurrency = min(limit, MAX_THREADS)
        """Partitions that are asked at the same time."""

    def ask(self, cursors: Mapping[int, str]) -> Iterator[list[FetchResult]]:
        """Ask the partitions from their cursors, `concurrency` of them at a time.

        The caller may stop the iteration: the remaining ones are not asked.

        Yields:
            the results of those that were asked. Empty pages move a cursor on.
        """
        targets = [Target(partition, cursor) for partition, cursor in cursors.items()]
        if len(targets) == 1:  # no pool, whose threads a process that ends would wait for
            yield [self._ask(targets[0])]
            return
        size = self.concurrency
        with ThreadPoolExecutor(min(size, len(targets) or 1), "feedapi-probe") as pool:
            for first in range(0, len(targets), size):
                yield list(pool.map(self._ask, targets[first : first + size]))

    def ends(self, partitions: Collection[int]) -> dict[int, str | None]:
        """Return the present end of each partition, as `fix_end`. Raises `FeedError`."""
        if not partitions:
            return {}
        end = partial(fix_end, self._connection)
        threads = min(self.concurrency, len(partitions))
        with ThreadPoolExecutor(threads, "feedapi-probe") as pool:
            return dict(zip(partitions, pool.map(end, partitions), strict=True))

    def _ask(self, target: Target) -> FetchResult:
        batches: list[CheckpointedEvents] = []

        def enough() -> bool:
            return bool(batches[-1].events) or len(batches) == _MAX_EMPTY_BATCHES

        return fetch(self._connection, target, limit=1, full=enough, receive=batches.append)


@dataclass(slots=True)
class AvailableNow:
    """Where a trigger that ends by itself ends, at the latest at `deadline` (monotonic clock).

    `caught_up` are the partitions that were caught up since the trigger began, or read to their
    fixed end. `ends` has the end of each partition, fixed when the trigger began or, for a later
    one, when it started.
    """

    deadline: float
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
