"""`FeedPlanner`: the state of one feed of a streaming query, on the driver. Imports no Spark.

A `FeedPlan` holds the whole state as it was when the plan was made. A query that starts again
therefore continues from the plan and the results of its last epoch.

The lineage rules are those of `feedapi_client.lineage.planner`, as in `FeedConsumer`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from feedapi_client.errors import CursorRejectedError, FeedError, LineageError
from feedapi_client.lineage.graph import descendants
from feedapi_client.lineage.planner import (
    Action,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import FIRST, FeedInfo, FeedKey, Position
from feedapi_client.spark.connection import FeedConnection
from feedapi_client.spark.fetch import read_end
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.plan.available_now import FixedEnds
from feedapi_client.spark.plan.discovery import PatientDiscovery
from feedapi_client.spark.plan.discovery_timer import DiscoveryTimer
from feedapi_client.spark.plan.epoch import DEFAULT_TASKS, FeedPlan, split_into_groups
from feedapi_client.spark.plan.failures import Failures
from feedapi_client.spark.plan.listed_ends import ListedEnds
from feedapi_client.spark.plan.polls import PollSchedule
from feedapi_client.spark.plan.probe import Probe
from feedapi_client.spark.plan.progress import ProgressReport
from feedapi_client.spark.plan.row_numbers import RowNumbers
from feedapi_client.spark.plan.seeking import Seeking
from feedapi_client.spark.plan.selection import added_partitions, check_partitions
from feedapi_client.spark.target import FetchResult

_log = logging.getLogger(__name__)

_MAX_PROBES = 1024
"""Partitions that are asked for news before an epoch is planned. The others are next."""


class News(NamedTuple):
    """The partitions of a feed that have events, and whether to wait for others.

    `done` says that a trigger that ends by itself is over in this feed; `wait`, that a partition
    which fails is not due yet.
    """

    partitions: set[int]
    done: bool
    wait: bool


class FeedPlanner:
    """Lineage and progress of one feed of a streaming query. Not thread-safe.

    Arguments:
        options: of the feed.
        connection: to the feed.
        plan: the state to continue from; None for a new feed.
        kept: the query no longer reads the feed: its state is kept, and nothing is asked.
        patience: seconds that a discovery may take in the foreground, where there was one before.
            None for any time.

    Raises:
        LineageError: the plan is of another feed, or of another selection of events.
    """

    def __init__(
        self,
        options: SourceOptions,
        connection: FeedConnection,
        plan: FeedPlan | None = None,
        *,
        kept: bool = False,
        patience: float | None = None,
    ) -> None:
        self.options = options
        self.connection = connection
        self.lineage = Planner(
            feed=connection.url,
            start=options.start,
            ordered=options.ordered,
            partitions=_selected(options, plan),
            lineage=options.lineage,
            selects_events=bool(connection.fetch_options.selection()),
        )
        self.ends: FixedEnds | None = None  # of a trigger that ends by itself
        self._numbers = RowNumbers() if plan is None else RowNumbers(plan.sequences, plan.depths)
        self._known: set[int] = set()  # every partition that was ever listed
        self._added_partitions: frozenset[int] = frozenset()  # to the selection of the last plan
        self._not_selected: dict[int, Position] = {}  # of an earlier query without a selection
        self._failures = Failures(connection.url, options.retry)
        self._probe = Probe(connection)
        self._polls = PollSchedule(options.limits, bounded=options.bounded_polls)
        self._planned: set[int] = set()  # what the last plan reads
        self._listed_ends = ListedEnds()
        self._progress = ProgressReport()
        self._seeking = Seeking(plan.seeking if plan is not None else ())
        self._more: set[int] = set()  # partitions that are known to have events
        self._info: FeedInfo | None = None
        self.unsaved = False
        """Whether a discovery changed positions, and no plan holds that yet."""
        self._timer = DiscoveryTimer(options.limits.discovery_interval)
        self._discovery = PatientDiscovery(connection, patience)
        self.key = plan.feed if kept and plan is not None else key_of(connection)
        """Key of the feed and of the selection of events, whose cursors these are."""
        self.planned_as = self.key if plan is None else plan.feed
        """The key in the last plan."""
        if plan is None:
            self.lineage.load({})
        else:
            self._restore(plan)

    def __repr__(self) -> str:
        return f"<FeedPlanner: {self.lineage!r}>"

    def _restore(self, plan: FeedPlan) -> None:
        self.unsaved = plan.feed != self.key  # the feed moved
        if self.unsaved and plan.feed != key_of(self.connection, self.options.previous_url):
            raise LineageError(
                "the checkpoint of this query belongs to another feed, or to another selection of "
                "events (filter.NAME, eventTypes, skipEventTypes), whose cursors are not valid "
                "here. If the feed moved, name its old URL with option previousUrl. Otherwise "
                "start a new query with a checkpoint location of its own",
                feed=self.connection.url,
            )
        self._known = set(plan.known)
        self._added_partitions = added_partitions(self.options, plan.chosen)
        if plan.selected is None:
            check_partitions(self.options, plan.info)
        self.lineage.load(plan.positions)
        self._info = plan.info
        self._perform(self.lineage.discover(plan.info, earlier=True))
        self._numbers.set_depths(self.lineage)
        entries = self.lineage.entries
        self._not_selected = {p: at for p, at in plan.positions.items() if p not in entries}

    # ------------------------------------------------------------------ results of an epoch

    def add_results(self, results: Iterable[FetchResult], *, fresh: bool) -> None:
        """Add the results of the planned epoch. Partitions without one keep their cursors.

        Arguments:
            fresh: False when the results may be older than the trigger. A partition that was
                caught up then need not be caught up now.

        Raises:
            FeedError: the query can't continue.
        """
        self._progress.next_epoch()
        unread = self._planned
        self._planned = set()
        for result in results:
            unread.discard(result.partition)
            self._add(result, fresh=fresh)
        for partition in unread - self._more:
            self._polls.now(partition)

    def _add(self, result: FetchResult, *, fresh: bool = True) -> None:
        partition = result.partition
        self._numbers.add(result)
        self._note(result)
        self.unsaved |= self._seeking.add(result)
        actions: list[Action] = []
        if result.cursor != result.start:
            self.lineage.progressed(partition)
            checkpoint = self.lineage.checkpoint(partition, result.cursor)
            actions += self.lineage.released(partition, checkpoint)
        if result.ended:
            actions += self.lineage.ended(
                partition, result.cursor, asked_closed=result.asked_closed
            )
            # Still reading: it was closed meanwhile, and one more request says if this is the end.
            caught_up = self.lineage.entries[partition].state is not State.READING
            if self.ends is not None and fresh and caught_up:
                self.ends.caught_up.add(partition)
        elif result.reached and self.ends is not None and fresh:
            self.ends.caught_up.add(partition)
        self._perform(actions)
        self._schedule(result, fresh=fresh)
        caught_up = self.lineage.entries[partition].state is State.CAUGHT_UP
        self._progress.add(result, caught_up=caught_up and fresh)

    def _schedule(self, result: FetchResult, *, fresh: bool) -> None:
        """Set the next poll of the partition (R15). What has events is read without one."""
        partition = result.partition
        entry = self.lineage.entries[partition]
        if not entry.running or partition in self._more:
            return
        if result.failed is not None:
            self._polls.later(partition, self._failures.pause(partition))
        elif entry.state is State.CAUGHT_UP and result.ended and fresh:
            self._polls.caught_up(partition, moved=result.cursor != result.start)
        else:
            self._polls.now(partition)

    def _discover_if_changed(self, result: FetchResult) -> None:
        """Discover soon where a read says that the partitions have changed, or may have (R10)."""
        if result.conflict or result.refused is not None:
            self._timer.soon()
        elif result.unknown_commands:
            self._timer.perhaps()

    def _note(self, result: FetchResult) -> None:
        partition = result.partition
        self._discover_if_changed(result)
        (self._more.add if result.more else self._more.discard)(partition)
        if result.refused is not None:
            self._failures.refused(partition, result.cursor)
        if result.failed is not None:
            self._failures.failed(partition, result.failed)
        elif result.refused is None:
            self._failures.succeeded(partition)
            if result.cursor != result.start:
                self._failures.accepted(partition, result.start)

    # ------------------------------------------------------------------ discovery

    @property
    def must_discover(self) -> bool:
        """Whether `discover_if_due` has anything to do."""
        return self._discovery.running or self._timer.wait() == 0.0

    def discover_if_due(self) -> None:
        """Discover when the interval is over, or a refusal asks for it.

        A running query keeps its last good topology when a discovery fails (R12).

        Raises:
            FeedError: the first discovery failed, or the partitions can't be read.
        """
        if not self.must_discover:
            return
        if not self._discovery.running:
            self._timer.begun()
        try:
            info = self._discovery.next(wait=self._info is None)
            if info is None:
                return
            self._select(info)
            unresolved = self.lineage.unresolved(info)
            ends = {partition: read_end(self.connection, partition) for partition in unresolved}
            actions = self.lineage.discover(info, ends=ends)
        except FeedError as error:
            if self._info is None:
                raise
            _log.warning("discovery failed, the last topology stays: %s", error)
            return
        self._take(info, actions)

    def _take(self, info: FeedInfo, actions: Iterable[Action]) -> None:
        first, self._info = self._info is None, info
        if first and self.options.start_time is not None:
            self._seeking.begin(self.lineage.entries)
        self._numbers.set_depths(self.lineage)
        if not self.connection.fetch_options.selection():
            for partition in self._listed_ends.moved(info, self.lineage):
                self._polls.later(partition, 0.0)
        self._check_refusals(info)
        # At "first" the same positions would be found again: no need for an epoch without rows.
        if not (first and self.options.start == "first"):
            self.unsaved |= any(isinstance(action, Save) for action in actions)
        self._perform(actions)
        if first and self.options.start != "last":
            for partition in self.lineage.runnable():
                self._polls.expect(partition)

    def _check_refusals(self, info: FeedInfo) -> None:
        """Check refused cursors. With ``failOnDataLoss=false`` such a partition begins anew."""
        while True:
            try:
                self._failures.check_refusals(info, self.lineage.runnable())
            except CursorRejectedError as error:
                partition = error.partition
                if self.options.fail_on_data_loss or partition is None:
                    raise
                if self.lineage.entries[partition].cursor == FIRST:
                    raise
                _log.warning("%s. It is read from the first event that is left on", error)
                self.lineage.released(partition, self.lineage.checkpoint(partition, FIRST))
                self._polls.now(partition)
                self.unsaved = True
            else:
                return

    def _select(self, info: FeedInfo) -> None:
        """Select new partitions that descend from a selected one."""
        if self._info is None:
            check_partitions(self.options, info)
        elif self.lineage.selected is not None:
            if self._added_partitions:
                check_partitions(self.options, info, self._added_partitions)
                self.lineage.select(self._added_partitions)
                self._added_partitions = frozenset()
            new = info.partitions.keys() - self._known
            self.lineage.select(descendants(info.partitions, self.lineage.selected, new))
        new = info.partitions.keys() - self._known
        self._seeking.inherit([info.partitions[id] for id in new], self._known)
        self._known |= info.partitions.keys()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(partition=partition):
                    self._polls.now(partition)
                    if self.ends is not None:
                        self.ends.caught_up.discard(partition)
                case Stop(partition=partition):
                    self._polls.forget(partition)
                    self._more.discard(partition)
                case Rediscover():
                    self._timer.soon()
                case Report(partition=partition, text=text):
                    _log.warning("feed %s, partition %s: %s", self.connection.url, partition, text)
                case Fail(error=error):
                    raise error

    # ------------------------------------------------------------------ the next epoch

    @property
    def has_news(self) -> bool:
        """Whether a partition is known to have events, or a plan has to be saved."""
        return bool(self._more) or self.unsaved

    def pause(self) -> float:
        """Return the seconds for which a feed without news has nothing to do."""
        return min(self._polls.wait(), self._timer.wait())

    def partitions_with_news(self) -> set[int]:
        """Poll the partitions that are due. Return those that have events.

        Raises:
            FeedError: the query can't continue.
        """
        entries = self.lineage.entries
        due = [p for p in self._polls.take_due() if entries[p].running and p not in self._more]
        news = self._known_news()
        expected = [p for p in due if self._polls.expects(p)]
        others = [p for p in due if not self._polls.expects(p)]
        for partition in others[_MAX_PROBES:]:
            self._polls.later(partition, 0.0)
        news |= self._ask(others[:_MAX_PROBES])
        # Where others have news, to ask an expected one first would only be one request more.
        return news.union(expected) if news else self._ask(expected, until_found=True)

    def hold(self, partitions: Collection[int]) -> None:
        """Leave the events of the partitions for a later epoch."""
        self._more.update(partitions)

    def event_counts(self, partitions: Collection[int]) -> Iterator[int]:
        """Yield the number of events of each partition, up to ``minEventsPerTrigger``."""
        cursors = {partition: self.lineage.entries[partition].cursor for partition in partitions}
        yield from self._probe.counts(cursors, self.options.min_events_per_trigger or 1)

    def _known_news(self) -> set[int]:
        return {p for p in self._more if self._failures.may_ask(p)}

    def _ask(self, partitions: list[int], *, until_found: bool = False) -> set[int]:
        """Return those of the partitions that have an event. It is left to the executors.

        With `until_found` the first ones that have one are enough, and all that were not asked yet
        are returned with them.
        """
        found: set[int] = set()
        unasked = {partition: self.lineage.entries[partition].cursor for partition in partitions}
        if not unasked:
            return found
        for results in self._probe.ask(dict(unasked)):
            for result in results:
                unasked.pop(result.partition)
                if result.events:
                    self._discover_if_changed(result)
                    self._progress.add(result, caught_up=False)
                    found.add(result.partition)
                    self._more.add(result.partition)
                    self._failures.succeeded(result.partition)
                else:
                    result.more = False
                    self._add(result)
            if until_found and found:
                break
        return found.union(unasked)

    def news_before_ends(self) -> News:
        """Return what of the feed a trigger that ends by itself has not read.

        Raises:
            FeedError: the query can't continue.
        """
        ends = self.ends
        assert ends is not None
        ends.fix_ends(self.lineage, self._probe)
        wanted = ends.left(self.lineage.runnable())
        due = [p for p in wanted if self._failures.may_ask(p)]
        news = self._known_news().intersection(due)
        news |= self._ask([p for p in due if p not in news])
        wait = bool(wanted) and (not due or self._failures.any_of(wanted))
        return News(news, not wanted, wait)

    def plan(
        self,
        partitions: Collection[int] = (),
        waiting: Collection[int] = (),
        limit: int | None = None,
        tasks: int = DEFAULT_TASKS,
    ) -> FeedPlan:
        """Return the state, with the partitions to read.

        Arguments:
            waiting: partitions with events that wait for the next epoch.
            limit: maximum number of events of each partition.
            tasks: about how many tasks read the partitions.
        """
        self.unsaved = False
        for partition in waiting:
            self._polls.later(partition, 0.0)
        self._planned = set(partitions)
        self.planned_as = self.key
        selected = self.lineage.selected
        ends = self.ends.ends if self.ends is not None else {}
        return FeedPlan(
            feed=self.key,
            name=self.connection.url,
            info=self._info or self.connection.info,
            positions=self._positions(),
            sequences=dict(self._numbers.sequences),
            depths=dict(self._numbers.depths),
            known=sorted(self._known),
            selected=None if selected is None else sorted(selected),
            groups=split_into_groups(
                sorted(partitions, key=lambda p: (p not in self._more, p)),
                self.options.max_partitions_per_task,
                tasks,
            ),
            limit=limit,
            chosen=None if self.options.partitions is None else sorted(self.options.partitions),
            ends={p: end for p in partitions if (end := ends.get(p)) is not None},
            seeking=sorted(self._seeking),
        )

    def _positions(self) -> dict[int, Position]:
        entries = self.lineage.entries.values()
        positions = {entry.id: entry.position for entry in entries if entry.position is not None}
        return {**self._not_selected, **positions}

    # ------------------------------------------------------------------ progress report

    def summary(self) -> dict[str, Any]:
        """Return what `StreamingQueryProgress` says of the source: see `ProgressReport`."""
        found = {
            "feed": self.connection.url,
            **self._progress.of(self.lineage, len(self._failures)),
        }
        if self.options.start_time is not None:
            found["seekingPartitions"] = sum(p in self.lineage.graph for p in self._seeking)
        return found


def key_of(connection: FeedConnection, url: str | None = None) -> str:
    """Return the key of the feed and of the selection of events.

    Arguments:
        url: another address of the feed.
    """
    selection = connection.fetch_options.selection()
    return FeedKey(url or connection.options.url, "spark", selection).id


def _selected(options: SourceOptions, plan: FeedPlan | None) -> Collection[int] | None:
    """Return the partitions to read: the option's, and those that descend from them."""
    if options.partitions is None or plan is None or plan.selected is None:
        return options.partitions
    # One that waited and is no longer listed has no position: there is nothing to read.
    return [p for p in plan.selected if p in plan.info.partitions or p in plan.positions]
