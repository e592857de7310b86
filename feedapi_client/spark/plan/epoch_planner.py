"""`EpochPlanner`: the state of a streaming query on the driver. Imports no Spark.

The driver alternates two steps: `EpochPlanner.add_results` of the last epoch, then
`EpochPlanner.next_plan`. What concerns the feed is in `FeedPlanner`. Here is the size of an epoch,
and the end of a trigger that ends by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.plan.epoch import EpochPlan
from feedapi_client.spark.plan.epoch_size import Turns
from feedapi_client.spark.plan.feed_planner import FeedPlanner
from feedapi_client.spark.plan.probe import AvailableNow
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.spark.target import FetchResult

_log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds that a trigger waits for a discovery or a poll, which then goes on in the background.
Spark asks the sources of a query one after the other, so that the others go on, and the progress of
the query says that these partitions can't be asked."""


class EpochPlanner:
    """Lineage and progress of one streaming query. Not thread-safe.

    Arguments:
        options: of the source.
        connection: to the feed.
        plan: the state to continue from; None for a new query.

    Raises:
        LineageError: the plan is of another feed, or of another selection of events.
    """

    def __init__(
        self, options: SourceOptions, connection: FeedConnection, plan: EpochPlan | None = None
    ) -> None:
        self.options = options
        self.feed = FeedPlanner(options, connection, plan, patience=_PATIENCE)
        self._turns = Turns(options.max_events_per_trigger, options.max_bytes_per_trigger)
        self._available_now: AvailableNow | None = None

    def __repr__(self) -> str:
        return f"<EpochPlanner: {self.feed!r}>"

    def set_available_now(self, trigger: AvailableNow | None) -> None:
        """Set the trigger that ends by itself; None for one that does not."""
        self._available_now = self.feed.ends = trigger

    def add_results(self, results: Collection[FetchResult], *, fresh: bool) -> None:
        """Add the results of the planned epoch: see `FeedPlanner.add_results`."""
        self.feed.add_results(results, fresh=fresh)

    def next_plan(self, limit: int | None) -> EpochPlan | None:
        """Return the plan of the next epoch, or None when there is nothing to read.

        Arguments:
            limit: maximum number of events of each partition.

        Raises:
            FeedError: the query can't continue.
        """
        self.feed.discover_if_due()
        if self._available_now is not None:
            return self._next_available_now(limit, self._available_now)
        news = self.feed.partitions_with_news()
        return self._plan(news, limit) if news or self.feed.unsaved else None

    def pause(self) -> float:
        """Return the seconds for which `next_plan` has nothing to do."""
        return self.feed.pause()

    def summary(self) -> dict[str, Any]:
        """Return what `StreamingQueryProgress` says of the source."""
        return self.feed.summary()

    def _next_available_now(self, limit: int | None, trigger: AvailableNow) -> EpochPlan | None:
        """The same for partitions that were not caught up since the trigger began."""
        while time.monotonic() < trigger.deadline:
            found = self.feed.news_before_ends()
            if found.partitions:
                return self._plan(found.partitions, limit)
            if found.done:
                return self._plan((), limit) if self.feed.unsaved else None
            if found.wait:
                time.sleep(min(1.0, self.options.limits.poll_interval))
            self.feed.discover_if_due()
        _log.warning(
            "feed %s: availableNowTimeout is over, the rest is left for the next run",
            self.feed.connection.url,
        )
        return None

    def _plan(self, news: Collection[int], limit: int | None) -> EpochPlan:
        turn = self._turns.next(news, limit)
        return self.feed.plan(turn.partitions, turn.waiting, turn.limit, max_bytes=turn.max_bytes)
