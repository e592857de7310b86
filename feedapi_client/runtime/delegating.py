"""`FeedConsumer.delegate`: the feed is watched here, and read elsewhere."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from feedapi_client.arguments import awaitable_of
from feedapi_client.errors import FeedError, FeedUnavailableError
from feedapi_client.model import LAST, Batch, Reached
from feedapi_client.protocol.text import are_valid
from feedapi_client.retry import Backoff
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.partition import RuntimePartition

READ = "async def read(partition, cursor): ..."
"""What such a function looks like, for messages."""
Read = Callable[[int, str], Awaitable[Reached]]


class Delegation:
    """Takes the batches of an iteration, which hold no event, and awaits `read` where there is one.

    What it comes to is committed as the cursor of a batch would be, and read on from.
    """

    def __init__(
        self,
        driver: Driver,
        fetching: Fetching,
        delivery: Delivery,
        read: Read,
        late: Mapping[int, float] | None,
    ) -> None:
        self._driver, self._fetching, self._delivery, self._read = driver, fetching, delivery, read
        self._reached: dict[int, Reached] = {}
        self._nothing: dict[int, Backoff] = {}
        """Of partitions that `read` got nothing of since it last got something."""
        fetching.watch()
        if late is not None:
            now = time.time()
            fetching.late.ask_again({id: until - now for id, until in late.items()})

    async def handle(self, batch: Batch) -> None:
        """Let the partition of a batch be read, if it has news. Raises what `read` raises."""
        if not self._driver.partitions[batch.partition].news:
            return  # empty pages have moved its cursor
        called = self._read(batch.partition, batch.cursor)
        reached = await awaitable_of(called, "read", READ)
        if not isinstance(reached, Reached):
            raise TypeError(f"read must return a Reached, not {type(reached).__name__}")
        if not are_valid(reached.cursor) or reached.cursor == LAST:
            raise ValueError("read returned a Reached whose cursor can't be one of a partition")
        self._reached[batch.partition] = reached

    async def handled(self, batch: Batch) -> None:
        """Commit what was reached, release the batch, and go on."""
        partition = self._driver.partitions[batch.partition]
        reached = self._reached.pop(batch.partition, None) or Reached(batch.cursor)
        moved = reached.cursor != batch.cursor
        nothing = partition.news and not moved
        partition.read_elsewhere(reached.cursor)
        # Whoever read waits for the save, also of a cursor that goes back to the stored one.
        if moved or reached.cursor != partition.entry.cursor:
            await self._delivery.commit(replace(batch, cursor=reached.cursor))
        await self._delivery.release(batch.partition)
        if nothing:
            await self._ask_later(partition)
            return
        self._nothing.pop(batch.partition, None)
        if not partition.started or not partition.entry.running:
            return
        if reached.more and reached.cursor != batch.cursor:
            partition.received_news()
            self._driver.announce(partition)
        else:
            self._fetching.resume(partition)

    async def _ask_later(self, partition: RuntimePartition) -> None:
        """Ask at once why that is, as the first time it may be a split; then ever later (R10)."""
        driver = self._driver
        backoff = self._nothing.setdefault(
            partition.id, Backoff.of(driver.settings.retry, clock=driver.clock)
        )
        error = FeedUnavailableError(
            f"whoever reads it got nothing {backoff.failures + 1} times in a row, the last time "
            f"{backoff.elapsed:.0f} s after the first one, although it has an event",
            feed=driver.feed,
            partition=partition.id,
        )
        try:
            pause = backoff.pause(error)
        except FeedError as final:
            await driver.fail_partition(partition, final)
            return
        if backoff.failures == 1:
            pause = 0.0
        else:
            driver.failure_log.warn(partition.id, f"{error}; asked again in {pause:.1f} s")
        if partition.started and partition.entry.running:
            driver.scheduler.schedule(partition, pause)
