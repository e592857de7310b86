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
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning

READ = "async def read(partition, cursor): ..."
"""What such a function looks like, for messages."""
Read = Callable[[int, str], Awaitable[Reached]]


class Delegation:
    """Awaits `read` where a batch, which holds no event, has news, and commits what it comes to."""

    def __init__(
        self,
        planning: Planning,
        fetching: Fetching,
        delivery: Delivery,
        read: Read,
        late: Mapping[int, float] | None,
    ) -> None:
        self._planning, self._delivery, self._read = planning, delivery, read
        self._reached: dict[int, Reached] = {}
        self._nothing: dict[int, Backoff] = {}
        """Of partitions that `read` got nothing of since it last got something."""
        fetching.watch()
        if late is not None:
            now = time.time()
            fetching.late.ask_again({id: until - now for id, until in late.items()})

    async def handle(self, batch: Batch) -> None:
        """Let the partition of a batch be read, if it has news. Raises what `read` raises."""
        if not self._planning.partitions[batch.partition].news:
            return  # empty pages have moved its cursor
        called = self._read(batch.partition, batch.cursor)
        reached = await awaitable_of(called, "read", READ)
        if not isinstance(reached, Reached):
            raise TypeError(f"read must return a Reached, not {type(reached).__name__}")
        if not are_valid(reached.cursor) or reached.cursor == LAST:
            raise ValueError("read returned a Reached whose cursor can't be one of a partition")
        self._reached[batch.partition] = reached

    async def handled(self, batch: Batch) -> None:
        planning = self._planning
        p = planning.partitions[batch.partition]
        reached = self._reached.pop(batch.partition, None) or Reached(batch.cursor)
        moved = reached.cursor != batch.cursor
        nothing = p.news and not moved
        p.read_elsewhere(reached.cursor)
        # Whoever read waits for the save, also of a cursor that goes back to the stored one.
        if moved or reached.cursor != p.entry.cursor:
            await self._delivery.commit(replace(batch, cursor=reached.cursor))
        if nothing:
            self._ask_later(p)
        else:
            self._nothing.pop(batch.partition, None)
        self._delivery.release(batch.partition)
        further = reached.more and reached.cursor != batch.cursor
        if further and p.started and p.entry.running:
            p.received_news()
            planning.announce(p)
            planning.advance(p)

    def _ask_later(self, p: RuntimePartition) -> None:
        """Ask at once why that is, as the first time it may be a split; then ever later (R10)."""
        iteration = self._planning.iteration
        backoff = self._nothing.setdefault(
            p.id, Backoff.of(iteration.settings.retry, clock=iteration.clock)
        )
        error = FeedUnavailableError(
            f"whoever reads it got nothing {backoff.failures + 1} times in a row, the last time "
            f"{backoff.elapsed:.0f} s after the first one, although it has an event",
            feed=iteration.feed,
            partition=p.id,
        )
        try:
            pause = backoff.pause(error)
        except FeedError as final:
            self._planning.fail(p, final)
            return
        if backoff.failures == 1:
            pause = 0.0
        else:
            iteration.failure_log.warn(p.id, f"{error}; asked again in {pause:.1f} s")
        self._planning.ask(p, iteration.clock() + pause)
