"""Holds small batches back for a moment, so that more events join them (`Limits.batch_linger`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio

from feedapi_client.runtime.loop_clock import Clock
from feedapi_client.runtime.partition import RuntimePartition


class Linger:
    """The partitions whose batches are held back.

    Arguments:
        seconds: for how long.
        clock: the clock of the event loop.
        announce: called with a partition whose time is over, unless it was announced before.
    """

    def __init__(
        self, seconds: float, clock: Clock, announce: Callable[[RuntimePartition], None]
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._announce = announce
        self._held: deque[tuple[float, RuntimePartition]] = deque()
        """In the order of their times, because all are held for as long."""
        self._begun = anyio.Event()

    def hold(self, partition: RuntimePartition) -> None:
        """Hold the partition back, unless it is held already."""
        if partition.lingers_until is None:
            until = self._clock() + self._seconds
            partition.linger(until)
            self._held.append((until, partition))
            self._begun.set()

    async def run(self) -> None:
        """Announce each partition when its time is over, until cancelled."""
        while True:
            if not self._held:
                self._begun = anyio.Event()
                await self._begun.wait()
            until, partition = self._held[0]
            await anyio.sleep(max(until - self._clock(), 0.0))
            self._held.popleft()
            if partition.lingers_until == until:
                self._announce(partition)
