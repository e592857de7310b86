"""Asks partitions whether they have events (R15). Imports no Spark."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from feedapi_client.spark.connection import FeedConnection
from feedapi_client.spark.fetch import FetchResult, PartitionReader, Target

GRACE_PERIOD = 2.0
"""Seconds for which a probe retries temporary errors."""
_MAX_THREADS = 32


class Probe:
    """Finds out whether an epoch is worth planning.

    The pause between two probes grows from `Limits.poll_interval` to `Limits.max_poll_interval`
    as long as no partition has events.
    """

    def __init__(self, connection: FeedConnection) -> None:
        self._connection = connection
        self._limits = connection.options.limits
        self._pause = self._limits.poll_interval
        self._next = 0.0

    @property
    def due(self) -> bool:
        """Whether the pause since the last probe is over."""
        return time.monotonic() >= self._next

    def reset(self) -> None:
        """Probe again at once, with the shortest pause afterwards."""
        self._pause, self._next = self._limits.poll_interval, 0.0

    def ask(self, cursors: Mapping[int, str]) -> list[FetchResult]:
        """Ask the partitions, a few at a time, until one has an event.

        Returns:
            the results of those that were asked. Empty pages move a cursor on.
        """
        if not cursors:
            return []
        targets = [Target(partition, cursor) for partition, cursor in cursors.items()]
        threads = min(self._limits.max_concurrent_fetches, _MAX_THREADS, len(targets))
        results: list[FetchResult] = []
        with ThreadPoolExecutor(threads, thread_name_prefix="feedapi-probe") as pool:
            for first in range(0, len(targets), threads):
                results += pool.map(self._ask, targets[first : first + threads])
                if any(result.events for result in results):
                    return results
        self._next = time.monotonic() + self._pause
        self._pause = min(self._limits.max_poll_interval, self._pause * 2)
        return results

    def _ask(self, target: Target) -> FetchResult:
        reader = PartitionReader(
            self._connection,
            target,
            limit=1,
            full=lambda: True,
            grace_period=GRACE_PERIOD,
            hold_open=False,
        )
        return reader.read()
