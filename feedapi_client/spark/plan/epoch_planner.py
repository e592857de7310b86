"""`EpochPlanner`: the state of a streaming query on the driver. Imports no Spark.

The driver alternates two steps: `EpochPlanner.add_results` of the last epoch, then
`EpochPlanner.next_plan`. What concerns one feed is in `FeedPlanner`. Here is what the feeds of a
query share: the size of an epoch, when it begins, and the end of a trigger that ends by itself.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from feedapi_client.errors import LineageError
from feedapi_client.model import public_url
from feedapi_client.spark.concurrency import InThreads
from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.plan.epoch import DEFAULT_TASKS, EpochPlan, FeedPlan
from feedapi_client.spark.plan.epoch_size import FeedPartition, Hold, Turns
from feedapi_client.spark.plan.feed_planner import FeedPlanner, key_of
from feedapi_client.spark.plan.probe import AvailableNow
from feedapi_client.spark.plan.query_progress import sum_up
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.spark.target import FetchResult

_log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds that a trigger waits for a discovery or a poll, which then goes on in the background. The
other feeds go on, and the progress of the query says that these partitions can't be asked."""


class EpochPlanner:
    """Lineage and progress of one streaming query. Not thread-safe.

    Arguments:
        options: of the source.
        connections: to each feed, in the order of the options.
        plan: the state to continue from; None for a new query.

    Raises:
        LineageError: the plan is of other feeds, or of another selection of events.
    """

    def __init__(
        self,
        options: SourceOptions,
        connections: Sequence[FeedConnection],
        plan: EpochPlan | None = None,
    ) -> None:
        self.options = options
        stored = [] if plan is None else plan.feeds
        numbers = match_feeds(connections, stored) if stored else []
        restored = dict(zip(numbers, stored, strict=True))
        self.feeds = [
            FeedPlanner(own, connection, restored.get(number), patience=_PATIENCE)
            for number, (own, connection) in enumerate(
                zip(options.of_feeds(), connections, strict=True)
            )
        ]
        """The feeds that the query reads."""
        self._kept = [
            _kept(options, left) for n, left in zip(numbers, stored, strict=True) if n is None
        ]
        self._hold = Hold(options.min_events_per_trigger, options.max_trigger_delay)
        self._turns = Turns(options.max_events_per_trigger, options.max_bytes_per_trigger)
        self._available_now: AvailableNow | None = None
        self._in_threads = InThreads("feedapi-plan")

    def __repr__(self) -> str:
        return f"<EpochPlanner: {', '.join(map(repr, self.feeds))}>"

    def set_available_now(self, trigger: AvailableNow | None) -> None:
        """Set the trigger that ends by itself; None for one that does not."""
        self._available_now = trigger
        for feed in self.feeds:
            feed.ends = None if trigger is None else trigger.of(feed.key)

    def add_results(self, results: Mapping[str, Collection[FetchResult]], *, fresh: bool) -> None:
        """Add the results of the planned epoch, by the key of the feed in its plan.

        Arguments:
            fresh: as in `FeedPlanner.add_results`.

        Raises:
            FeedError: the query can't continue.
        """
        for feed in (*self.feeds, *self._kept):
            feed.add_results(results.get(feed.planned_as, ()), fresh=fresh)

    def next_plan(self, limit: int | None) -> EpochPlan | None:
        """Return the plan of the next epoch, or None when there is nothing to read.

        Arguments:
            limit: maximum number of events of each partition.

        Raises:
            FeedError: the query can't continue.
        """
        self._discover_if_due()
        if self._available_now is not None:
            return self._next_available_now(limit, self._available_now)
        found = self._in_threads.map(FeedPlanner.partitions_with_news, self.feeds)
        news = _all(found)
        if news and not self._unsaved and not self._hold.over(self._event_counts(found)):
            for feed, partitions in zip(self.feeds, found, strict=True):
                feed.hold(partitions)
            return None
        return self._plan(news, limit) if news or self._unsaved else None

    def pause(self) -> float:
        """Return the seconds for which `next_plan` has nothing to do."""
        if any(feed.has_news for feed in self.feeds):
            return self._hold.wait()
        return min(feed.pause() for feed in self.feeds)

    def summary(self) -> dict[str, Any]:
        """Return what `StreamingQueryProgress` says of the source.

        For a query with option ``urls``, ``feeds`` has a `ProgressReport` for each feed.
        """
        found = [feed.summary() for feed in self.feeds]
        if not self.options.urls:
            return found[0]
        kept = [feed.connection.url for feed in self._kept]
        return sum_up(found) | ({"feedsNotRead": kept} if kept else {})

    @property
    def _unsaved(self) -> bool:
        return any(feed.unsaved for feed in self.feeds)

    def _discover_if_due(self) -> None:
        due = [feed for feed in self.feeds if feed.must_discover]
        self._in_threads.map(FeedPlanner.discover_if_due, due)

    def _event_counts(self, found: Sequence[Collection[int]]) -> Iterator[int]:
        for feed, partitions in zip(self.feeds, found, strict=True):
            yield from feed.event_counts(partitions)

    def _next_available_now(self, limit: int | None, trigger: AvailableNow) -> EpochPlan | None:
        """The same for partitions that were not caught up since the trigger began."""
        while time.monotonic() < trigger.deadline:
            found = self._in_threads.map(FeedPlanner.news_before_ends, self.feeds)
            news = _all([one.partitions for one in found])
            if news:
                return self._plan(news, limit)
            if all(one.done for one in found):
                return self._plan((), limit) if self._unsaved else None
            if any(one.wait for one in found):
                time.sleep(min(1.0, self.options.limits.poll_interval))
            self._discover_if_due()
        _log.warning(
            "feed %s: availableNowTimeout is over, the rest is left for the next run",
            ", ".join(feed.connection.url for feed in self.feeds),
        )
        return None

    def _plan(self, news: Collection[FeedPartition], limit: int | None) -> EpochPlan:
        turn = self._turns.next(news, limit)
        reading, waiting = _by_feed(turn.partitions), _by_feed(turn.waiting)
        plans = [
            feed.plan(
                reading[number],
                waiting[number],
                turn.limit,
                DEFAULT_TASKS * len(reading[number]) // max(1, len(turn.partitions)),
                max_bytes=turn.max_bytes,
            )
            for number, feed in enumerate(self.feeds)
        ]
        return EpochPlan(feeds=[*plans, *(feed.plan() for feed in self._kept)])


def _all(found: Sequence[Collection[int]]) -> set[FeedPartition]:
    return {(number, id) for number, partitions in enumerate(found) for id in partitions}


def _by_feed(partitions: Collection[FeedPartition]) -> defaultdict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, partition in partitions:
        found[number].append(partition)
    return found


def _kept(options: SourceOptions, plan: FeedPlan) -> FeedPlanner:
    """Return the state of a feed that the query no longer names, so that it may come back."""
    _log.warning(
        "feed %s: the checkpoint holds it, and the options don't name it any more. It is not read; "
        "when they name it again, it goes on where it was",
        plan.name,
    )
    own = replace(options, url=plan.name, urls=(), partitions=None, lineage={}, previous_url=None)
    # It is never asked. That there is a selection is all that matters of it.
    fetch = replace(own.fetch, filters=own.filters)
    with FeedConnection(own, fetch, plan.info) as connection:
        return FeedPlanner(own, connection, plan, kept=True)


def match_feeds(
    connections: Sequence[FeedConnection], plans: Sequence[FeedPlan]
) -> list[int | None]:
    """Return the number of each plan's connection; None where the query no longer names the feed.

    Where there are several, each connection goes on from the discovery in its plan: the others need
    not wait for a feed that can't be reached now.

    Whether the cursors are valid there (the query of the URL, the selection of events) is for
    `FeedPlanner` to check.

    Raises:
        LineageError: the query names none of the feeds.
        FeedError: the plan is of an earlier version, which stored no names, and a feed that has to
            be asked for the name of a filter does not answer.
    """
    if len(connections) == len(plans) == 1:
        return [0]
    names = {_plain(connection.url): number for number, connection in enumerate(connections)}
    previous = connections[0].options.previous_url
    if previous is not None:
        names.setdefault(_plain(public_url(previous)), 0)
    found = [
        names.get(_plain(plan.name)) if plan.name else _by_key(connections, plan) for plan in plans
    ]
    if all(number is None for number in found):
        raise LineageError(
            "the checkpoint of this query belongs to other feeds, or to another selection of "
            "events (filter.NAME, eventTypes, skipEventTypes): a query goes on only with a feed "
            "of its checkpoint among those that it reads. Name one, or start a new query with a "
            "checkpoint location of its own",
            feed=connections[0].url,
        )
    for number, plan in zip(found, plans, strict=True):
        if number is not None and len(connections) > 1:
            connections[number].restore(plan.info)
    return found


def _plain(name: str) -> str:
    return name.rstrip("/")


def _by_key(connections: Sequence[FeedConnection], plan: FeedPlan) -> int | None:
    for number, connection in enumerate(connections):
        if key_of(connection) == plan.feed:
            return number
    return None
