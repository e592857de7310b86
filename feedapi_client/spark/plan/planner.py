"""`EpochPlanner`: the state of a streaming query on the driver. Imports no Spark.

The driver alternates two steps: `EpochPlanner.add_results` of the last epoch, then
`EpochPlanner.next_plan`. A plan holds the whole state as it was when the plan was made. A query
that starts again therefore continues from the plan and the results of its last epoch.

The lineage rules are those of `feedapi_client.lineage.planner`, as in `FeedConsumer`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from feedapi_client.errors import FeedError, LineageError
from feedapi_client.lineage.graph import descendants
from feedapi_client.lineage.order import count_before
from feedapi_client.lineage.planner import (
    Action,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    State,
)
from feedapi_client.model import FeedInfo, FeedKey, Position
from feedapi_client.spark.connection import FeedConnection
from feedapi_client.spark.fetch import FetchResult, read_end
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.plan.epoch import EpochPlan, split_into_groups
from feedapi_client.spark.plan.failures import Failures
from feedapi_client.spark.plan.probe import Probe
from feedapi_client.spark.plan.selection import check_partitions

_log = logging.getLogger(__name__)

_COUNTED_STATES = {
    State.READING: "reading",
    State.CAUGHT_UP: "caughtUp",
    State.WAITING: "waiting",
    State.DRAINED: "drained",
}


@dataclass(slots=True)
class AvailableNow:
    """State of a trigger that ends by itself.

    `deadline` is on the monotonic clock. `caught_up` are the partitions that were caught up since
    the trigger began.
    """

    deadline: float
    caught_up: set[int] = field(default_factory=set)


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
        self,
        options: SourceOptions,
        connection: FeedConnection,
        plan: EpochPlan | None = None,
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
        self.available_now: AvailableNow | None = None
        self._sequences: dict[int, int] = {}
        self._depths: dict[int, int] = {}
        self._known: set[int] = set()  # every partition that was ever listed
        self._not_selected: dict[int, Position] = {}  # of an earlier query without a selection
        self._failures = Failures(connection.url, options.retry)
        self._probe = Probe(connection)
        self._more: set[int] = set()  # partitions that are known to have events
        self._info: FeedInfo | None = None
        self._unsaved = False  # a discovery changed positions, and no plan holds that yet
        self._discover_at = 0.0
        if plan is None:
            self.lineage.load({})
        else:
            self._restore(plan)

    def __repr__(self) -> str:
        return f"<EpochPlanner: {self.lineage!r}>"

    @property
    def key(self) -> str:
        """Key of the feed and of the selection of events, whose cursors these are."""
        return FeedKey(self.options.url, "spark", self.connection.fetch_options.selection()).id

    def _restore(self, plan: EpochPlan) -> None:
        if plan.feed != self.key:
            raise LineageError(
                "the checkpoint of this query belongs to another feed, or to another selection of "
                "events (filter.NAME, eventTypes, skipEventTypes), whose cursors are not valid "
                "here. Start a new query with a checkpoint location of its own",
                feed=self.connection.url,
            )
        self._sequences, self._depths = dict(plan.sequences), dict(plan.depths)
        self._known = set(plan.known)
        if plan.selected is None:
            check_partitions(self.options, plan.info)
        self.lineage.load(plan.positions)
        self._info = plan.info
        self._perform(self.lineage.discover(plan.info, earlier=True))
        self._set_depths()
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
        for result in results:
            self._add(result, fresh=fresh)

    def _add(self, result: FetchResult, *, fresh: bool = True) -> None:
        partition = result.partition
        self._sequences[partition] = self._sequences.get(partition, 0) + result.events
        self._note(result)
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
            if self.available_now is not None and fresh and caught_up:
                self.available_now.caught_up.add(partition)
        self._perform(actions)

    def _note(self, result: FetchResult) -> None:
        partition = result.partition
        (self._more.add if result.more else self._more.discard)(partition)
        if result.refused is not None:
            self._discover_at = 0.0
            self._failures.refused(partition, result.cursor)
        if result.failed is not None:
            self._failures.failed(partition, result.failed)
        elif result.refused is None:
            self._failures.succeeded(partition)
            if result.cursor != result.start:
                self._failures.accepted(partition, result.start)

    # ------------------------------------------------------------------ discovery

    def discover_if_due(self) -> None:
        """Discover when the interval is over, or a refusal asks for it.

        A running query keeps its last good topology when a discovery fails (R12).

        Raises:
            FeedError: the first discovery failed, or the partitions can't be read.
        """
        if time.monotonic() < self._discover_at:
            return
        self._discover_at = time.monotonic() + self.options.limits.discovery_interval
        try:
            info = self.connection.discover()
            self._select(info)
            unresolved = self.lineage.unresolved(info)
            ends = {partition: read_end(self.connection, partition) for partition in unresolved}
            actions = self.lineage.discover(info, ends=ends)
        except FeedError as error:
            if self._info is None:
                raise
            _log.warning("discovery failed, the last topology stays: %s", error)
            return
        first, self._info = self._info is None, info
        self._set_depths()
        self._failures.check_refusals(info, self.lineage.runnable())
        # At "first" the same positions would be found again: no need for an epoch without rows.
        if not (first and self.options.start == "first"):
            self._unsaved |= any(isinstance(action, Save) for action in actions)
        self._perform(actions)

    def _select(self, info: FeedInfo) -> None:
        """Select new partitions that descend from a selected one."""
        if self._info is None:
            check_partitions(self.options, info)
        elif self.lineage.selected is not None:
            new = info.partitions.keys() - self._known
            self.lineage.select(descendants(info.partitions, self.lineage.selected, new))
        self._known |= info.partitions.keys()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(partition=partition):
                    if self.available_now is not None:
                        self.available_now.caught_up.discard(partition)
                case Rediscover():
                    self._discover_at = 0.0
                case Report(partition=partition, text=text):
                    _log.warning("feed %s, partition %s: %s", self.connection.url, partition, text)
                case Fail(error=error):
                    raise error

    # ------------------------------------------------------------------ the next epoch

    def next_plan(self, limit: int | None) -> EpochPlan | None:
        """Return the plan of the next epoch, or None when there is nothing to read.

        Arguments:
            limit: maximum number of events of each partition.

        Raises:
            FeedError: the query can't continue.
        """
        self.discover_if_due()
        if self.available_now is not None:
            return self._next_available_now(limit, self.available_now)
        if not (self._more or self._unsaved) and not self._probe.due:
            return None
        due = self._due(self.lineage.runnable())
        if self._more.intersection(due) or (self._probe.due and self._has_news(due)):
            self._probe.reset()
            return self._plan(self._due(self.lineage.runnable()), limit)
        return self._plan([], limit) if self._unsaved else None

    def _next_available_now(self, limit: int | None, trigger: AvailableNow) -> EpochPlan | None:
        """The same for partitions that were not caught up since the trigger began."""
        while time.monotonic() < trigger.deadline:
            wanted = self._not_caught_up(trigger)
            if not wanted:
                return self._plan([], limit) if self._unsaved else None
            due = self._due(wanted)
            if self._more.intersection(due) or self._has_news(due):
                return self._plan(self._due(self._not_caught_up(trigger)), limit)
            if not due or self._failures.any_of(wanted):
                time.sleep(min(1.0, self.options.limits.poll_interval))
            self.discover_if_due()
        _log.warning(
            "feed %s: availableNowTimeout is over, the rest is left for the next run",
            self.connection.url,
        )
        return None

    def _not_caught_up(self, trigger: AvailableNow) -> list[int]:
        return [p for p in self.lineage.runnable() if p not in trigger.caught_up]

    def _due(self, partitions: Iterable[int]) -> list[int]:
        return [partition for partition in partitions if self._failures.may_ask(partition)]

    def _has_news(self, partitions: list[int]) -> bool:
        """Whether a probe found an event. It reads none: the executors will."""
        cursors = self.lineage.runnable()
        results = self._probe.ask({partition: cursors[partition] for partition in partitions})
        for result in results:
            if result.events:
                self._more.add(result.partition)
                self._failures.succeeded(result.partition)
            else:
                result.more = False
                self._add(result)
        return any(result.events for result in results)

    def _plan(self, partitions: list[int], limit: int | None) -> EpochPlan:
        self._unsaved = False
        selected = self.lineage.selected
        return EpochPlan(
            feed=self.key,
            info=self._info or self.connection.info,
            positions=self._positions(),
            sequences=dict(self._sequences),
            depths=dict(self._depths),
            known=sorted(self._known),
            selected=None if selected is None else sorted(selected),
            groups=split_into_groups(
                sorted(partitions, key=lambda p: p not in self._more),
                self.options.max_partitions_per_task,
            ),
            limit=limit,
        )

    def _positions(self) -> dict[int, Position]:
        entries = self.lineage.entries.values()
        positions = {entry.id: entry.position for entry in entries if entry.position is not None}
        return {**self._not_selected, **positions}

    def _set_depths(self) -> None:
        """Count the partitions before each one, as soon as it is listed.

        A partition that is gone later still counts, also one that was never read: what comes before
        it comes before its successors.
        """
        entries, before = self.lineage.entries, {}
        for id, listed in self.lineage.graph.partitions.items():
            if id not in self._depths:
                # An ancestor without an event takes no place of its own.
                ancestors = {p: min(1, self._sequences.get(p, 0)) for p in listed.cursor_from}
                first = {p: 1 for p in self.lineage.preceding(id) if p in entries}
                before[id] = ancestors | first
        count_before(before, self._depths)

    # ------------------------------------------------------------------ progress report

    def summary(self) -> dict[str, int]:
        """Return how many partitions are in which state."""
        counts = dict.fromkeys(["partitions", *_COUNTED_STATES.values()], 0)
        counts["failing"] = len(self._failures)
        for entry in self.lineage.entries.values():
            counts["partitions"] += entry.id in self.lineage.graph
            if entry.state in _COUNTED_STATES:
                counts[_COUNTED_STATES[entry.state]] += 1
        return counts


def _selected(options: SourceOptions, plan: EpochPlan | None) -> Collection[int] | None:
    """Return the partitions to read: the option's, and those that descend from them."""
    if options.partitions is None or plan is None or plan.selected is None:
        return options.partitions
    # One that waited and is no longer listed has no position: there is nothing to read.
    return [p for p in plan.selected if p in plan.info.partitions or p in plan.positions]
