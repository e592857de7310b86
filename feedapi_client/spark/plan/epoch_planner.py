"""`EpochPlanner`: the state of a streaming query on the driver. Imports no Spark.

The driver alternates two steps: `EpochPlanner.add_results` of the last epoch, then
`EpochPlanner.next_plan`. An `EpochPlan` holds the whole state as it was when the plan was made. A
query that starts again therefore continues from the plan and the results of its last epoch.

The lineage rules are those of `feedapi_client.lineage.planner`, as in `FeedConsumer`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

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
from feedapi_client.protocol.page import EndEvidence, FeedAnswers
from feedapi_client.runtime.discovery_timer import DiscoveryTimer
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import FetchResult, read_end
from feedapi_client.spark.plan.epoch import (
    EpochPlan,
    added_partitions,
    check_partitions,
    count_before,
    split_into_groups,
)
from feedapi_client.spark.plan.failing_partitions import FailingPartitions
from feedapi_client.spark.plan.polls import LateLooks, PatientCall, PollSchedule
from feedapi_client.spark.plan.probe import AvailableNow, Probe
from feedapi_client.spark.source_options import SourceOptions

_log = logging.getLogger(__name__)

_MAX_PROBES = 1024
"""Partitions that are asked for news before an epoch is planned. The others are next."""

_LEAST_SHARE = 100
"""Events of a partition in an epoch of ``maxEventsPerTrigger``: only whole batches are read."""
_LEAST_BYTES = 64 * 1024
"""The same for ``maxBytesPerTrigger``: a batch is what one chunk of a response brings."""
_PATIENCE = 2.0
"""Seconds that a trigger waits for a discovery or a poll, which then goes on in the background.
Spark asks the sources of a query one after the other, so that the others go on, and the progress of
the query says that these partitions can't be asked."""
_MANY = 1000
_KEPT_SECONDS = 1.0
"""How long the report on many partitions is kept: to count them takes some milliseconds."""
_COUNTED_STATES = {
    State.READING: "reading",
    State.CAUGHT_UP: "caughtUp",
    State.WAITING: "waiting",
    State.DRAINED: "drained",
}


class EpochPlanner:
    """Lineage and progress of one streaming query. Not thread-safe.

    Arguments:
        plan: the state to continue from; None for a new query.

    Raises:
        LineageError: the plan is of another feed, or of another selection of events.
    """

    def __init__(
        self, options: SourceOptions, connection: FeedConnection, plan: EpochPlan | None = None
    ) -> None:
        self.options = options
        self.connection = connection
        self.lineage = Planner(
            feed=connection.url,
            start=options.starting_cursors,
            ordered=options.ordered,
            partitions=_selected(options, plan),
            lineage=options.lineage,
            selects_events=bool(connection.fetch_options.selection()),
        )
        self.available_now: AvailableNow | None = None
        """The trigger that ends by itself; None for one that does not."""
        self._sequences: dict[int, int] = {} if plan is None else dict(plan.sequences)
        self._depths: dict[int, int] = {} if plan is None else dict(plan.depths)
        self._known: set[int] = set()  # every partition that was ever listed
        self._added_partitions: frozenset[int] = frozenset()  # to the selection of the last plan
        self._not_selected: dict[int, Position] = {}  # of an earlier query without a selection
        self._failures = FailingPartitions(connection.url, options.retry)
        self._probe = Probe(connection)
        self._polls = PollSchedule(options.limits, bounded=options.max_poll_interval is None)
        self._planned: set[int] = set()  # what the last plan reads
        self._epochs = 0  # of this process
        self._read_in: dict[int, int] = {}  # the last epoch that read each partition
        self._listed_ends: dict[int, str] = {}  # of open partitions, in the last discovery
        self._progress = ProgressReport()
        self._evidence: dict[int, EndEvidence] = {}
        self._closed_since: dict[int, float] = {}  # of this process
        self._failed_at = -math.inf  # when a discovery failed last
        self._answers = FeedAnswers(options.limits.settle_time)
        self._settling: dict[int, float] = {}  # when an end is asked for again
        self._late = LateLooks({} if plan is None else plan.late or {}, options.limits.settle_time)
        self._silent: set[int] = set()  # open ones whose last response held no line
        self._more: set[int] = set()  # partitions that are known to have events
        self._info: FeedInfo | None = None
        self._unsaved = False  # whether a discovery changed positions that no plan holds yet
        # No gap: a trigger discovers at once what it needs, and the next one comes much later.
        interval = options.limits.discovery_interval
        self._timer = DiscoveryTimer(interval, clock=time.monotonic, gap=0.0)
        self._discovery: PatientCall[FeedInfo] = PatientCall("feedapi-discovery", _PATIENCE)
        self._poll: PatientCall[list[FetchResult]] = PatientCall("feedapi-poll", _PATIENCE)
        self._polled: Mapping[int, str] = {}  # cursors of the poll that is running
        self._key = key_of(connection)
        if plan is None:
            self.lineage.load({})
        else:
            self._restore(plan)

    def __repr__(self) -> str:
        return f"<EpochPlanner: {self.lineage!r}>"

    def _restore(self, plan: EpochPlan) -> None:
        self._unsaved = plan.feed != self._key  # it got a name since
        if self._unsaved and plan.feed != key_of(self.connection, named=False):
            raise LineageError(
                "the checkpoint of this query belongs to another feed, or to another selection of "
                "events (filter.NAME, eventTypes, skipEventTypes), whose cursors are not valid "
                "here. A feed that moves goes on if option feedName named it before. Start a new "
                "query with a checkpoint location of its own",
                feed=self.connection.url,
            )
        self._known = set(plan.known)
        self._added_partitions = added_partitions(self.options, plan.chosen)
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

        Raises `FeedError` where the query can't continue.
        """
        self._progress.next_epoch()
        unread = self._planned
        self._planned = set()
        for result in results:
            unread.discard(result.partition)
            self._count(result)
            self._add(result, fresh=fresh)
        for partition in unread - self._more:
            self._polls.now(partition)

    def _count(self, result: FetchResult) -> None:
        self._answers.add(time.monotonic(), failed=result.failed is not None)

    def _add(self, result: FetchResult, *, fresh: bool = True) -> None:
        partition = result.partition
        self._sequences[partition] = self._sequences.get(partition, 0) + result.events
        if partition in self._not_selected:
            self._not_selected[partition] = self._not_selected[partition].advance(result.cursor)
            return
        self._note(result)
        self._settling.pop(partition, None)
        actions: list[Action] = []
        if result.cursor != result.start:
            self.lineage.progressed(partition)
            if partition in self._evidence:
                self._doubt(partition)  # what came behind empty responses shows that they may lag
            checkpoint = self.lineage.checkpoint(partition, result.cursor)
            actions += self.lineage.released(partition, checkpoint)
        if result.ended and not self._settles(result, fresh=fresh):
            actions += self.lineage.ended(
                partition, result.cursor, asked_closed=result.asked_closed
            )
            # Still reading: it was closed meanwhile, and one more request says if this is the end.
            caught_up = self.lineage.entries[partition].state is not State.READING
            if self.lineage.entries[partition].state is State.DRAINED and result.unproven:
                self._late.drained(partition)
            if self.available_now is not None and fresh and caught_up:
                self.available_now.caught_up.add(partition)
        elif not result.ended and result.reached and self.available_now is not None and fresh:
            self.available_now.caught_up.add(partition)
        self._perform(actions)
        self._schedule(result, fresh=fresh)
        caught_up = self.lineage.entries[partition].state is State.CAUGHT_UP
        self._progress.add(result, caught_up=caught_up and fresh)

    def _settles(self, result: FetchResult, *, fresh: bool) -> bool:
        """Whether an end that only an empty response shows has to be asked for again (R6)."""
        partition, limits = result.partition, self.options.limits
        if not result.unproven:
            again = (
                result.silent and self.available_now is not None and partition not in self._silent
            )
            (self._silent.add if again else self._silent.discard)(partition)
            if again:
                self._settling[partition] = time.monotonic() + limits.silent_pause
            return again
        if not fresh:
            self._evidence.pop(partition, None)
        evidence = self._evidence.setdefault(
            partition, EndEvidence(limits.settle_time, limits.poll_interval)
        )
        now = time.monotonic()
        since = max(
            self._closed_since.get(partition, now), self._failed_at, self._answers.failed_at
        )
        pause = evidence.add(self._info, now=now, since=since)
        if pause is None:
            del self._evidence[partition]
            return False
        if evidence.lacks_discovery(self._info):
            self._timer.soon()
        self._settling[partition] = now + pause
        return True

    def _doubt(self, partition: int) -> None:
        """Let the empty responses of a partition that fails count anew."""
        self._silent.discard(partition)
        self._evidence.pop(partition, None)
        if partition in self._closed_since:
            self._closed_since[partition] = time.monotonic()

    def _schedule(self, result: FetchResult, *, fresh: bool) -> None:
        """Set the next poll of the partition (R15). What has events is read without one."""
        partition = result.partition
        entry = self.lineage.entries[partition]
        if not entry.running or partition in self._more:
            return
        if result.failed is not None or result.refused is not None:
            self._polls.later(partition, self._failures.pause(partition))
        elif partition in self._settling:
            self._polls.later(partition, self._settling[partition] - time.monotonic())
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
            self._failures.refused(result)
        if result.failed is not None or result.refused is not None or result.retries:
            self._doubt(partition)
        if result.failed is not None:
            self._failures.failed(partition, result.failed)
        elif result.refused is None:
            self._failures.succeeded(partition)

    # ------------------------------------------------------------------ discovery

    def _discover_if_due(self) -> None:
        """Discover when the interval is over, or a refusal asks for it.

        A running query keeps its last good topology when a discovery fails (R12).

        Raises:
            FeedError: the first discovery failed, or the partitions can't be read.
        """
        if not self._discovery.running:
            if self._until_discovery() > 0.0:
                return
            self._timer.begun()
        try:
            discover = self.connection.discover
            info = discover() if self._info is None else self._discovery.next(discover)
            if info is None:
                return
            self._select(info)
            unresolved = self.lineage.unresolved(info)
            ends = {partition: read_end(self.connection, partition) for partition in unresolved}
            actions = self.lineage.discover(info, ends=ends)
        except FeedError as error:
            if self._info is None:
                raise
            cursors = self.lineage.runnable()
            for refusal in self._failures.final_refusals(self._info, cursors, discovered=False):
                raise refusal from error
            self._failed_at = time.monotonic()
            self._timer.succeeded()  # it was retried: the next one is due as after any other
            _log.warning("discovery failed, the last topology stays: %s", error)
            return
        self._timer.succeeded()
        self._take(info, actions)

    def _until_discovery(self) -> float:
        """Return the seconds until the next discovery is due; 0 when it is."""
        return max(0.0, self._timer.next - time.monotonic())

    def _take(self, info: FeedInfo, actions: Iterable[Action]) -> None:
        first, self._info = self._info is None, info
        now, before = time.monotonic(), self._closed_since
        self._closed_since = {
            p: before.get(p, now) for p in info.partitions if info.partitions[p].closed
        }
        if self.lineage.starts_first:
            self._timer.perhaps()  # a publisher that starts lists none for a moment (R7)
        self._set_depths()
        self._poll_moved_ends(info)
        self._check_refusals(info)
        # At "first" the same positions would be found again: no need for an epoch without rows.
        if not (first and self.options.starting_cursors == "first"):
            self._unsaved |= any(isinstance(action, Save) for action in actions)
        self._perform(actions)
        if first and self.options.starting_cursors != "last":
            for partition in self.lineage.runnable():
                self._polls.expect(partition)

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

    def _poll_moved_ends(self, info: FeedInfo) -> None:
        """Poll caught up partitions whose listed end moved on to another cursor.

        `lastCursor` is an end only of a read without a selection of events.
        """
        if self.connection.fetch_options.selection():
            return
        before, self._listed_ends = (
            self._listed_ends,
            {
                listed.id: listed.last_cursor
                for listed in info.partitions.values()
                if not listed.closed and listed.last_cursor is not None
            },
        )
        for partition, end in self._listed_ends.items():
            entry = self.lineage.entries.get(partition)
            if entry is None or entry.state is not State.CAUGHT_UP:
                continue
            if end not in (entry.cursor, before.get(partition)):
                self._polls.later(partition, 0.0)

    def _check_refusals(self, info: FeedInfo) -> None:
        """Check refused cursors. With ``failOnDataLoss=false`` such a partition begins anew."""
        for error in self._failures.final_refusals(info, self.lineage.runnable()):
            partition = error.partition
            if (
                self.options.fail_on_data_loss
                or not isinstance(error, CursorRejectedError)
                or partition is None
                or self.lineage.entries[partition].cursor == FIRST
            ):
                raise error
            _log.warning("%s. It is read from the first event that is left on", error)
            self.lineage.released(partition, self.lineage.checkpoint(partition, FIRST))
            self._polls.now(partition)
            self._unsaved = True

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
        self._known |= info.partitions.keys()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(partition=partition):
                    self._polls.now(partition)
                    if self.available_now is not None:
                        self.available_now.caught_up.discard(partition)
                case Stop(partition=partition):
                    self._polls.forget(partition)
                    self._more.discard(partition)
                    self._settling.pop(partition, None)
                case Rediscover():
                    self._timer.soon()
                case Report(partition=partition, text=text):
                    _log.warning("feed %s, partition %s: %s", self.connection.url, partition, text)
                case Fail(error=error):
                    raise error

    # ------------------------------------------------------------------ the next epoch

    def pause(self) -> float:
        """Return the seconds for which `next_plan` has nothing to do."""
        if self._more or self._unsaved:
            return 0.0
        return min(self._polls.wait(), self._until_discovery())

    def next_plan(self, limit: int | None) -> EpochPlan | None:
        """Return a plan of up to `limit` events a partition, None when there is nothing to read.

        Raises `FeedError` where the query can't continue.
        """
        self._discover_if_due()
        if self.available_now is not None:
            return self._next_available_now(limit, self.available_now)
        news = self._partitions_with_news()
        return self._plan(news, limit) if news or self._unsaved else None

    def _next_available_now(self, limit: int | None, trigger: AvailableNow) -> EpochPlan | None:
        """The same for partitions that were not caught up since the trigger began."""
        while time.monotonic() < trigger.deadline:
            trigger.fix_ends(self.lineage, self._probe)
            now = time.monotonic()
            due = [
                p
                for p in trigger.left(self.lineage.runnable())
                if self._failures.may_ask(p) and self._settling.get(p, now) <= now
            ]
            news = self._known_news().intersection(due)
            news |= self._ask([*self._due_late(), *(p for p in due if p not in news)])
            if news:
                return self._plan(news, limit)
            left = trigger.left(self.lineage.runnable())
            if not left:
                return self._plan((), limit) if self._unsaved else None
            failing = not self._failures.partitions().isdisjoint(left)
            if not due or self._poll.running or failing:
                time.sleep(min(1.0, self.options.limits.poll_interval))
            self._discover_if_due()
        _log.warning(
            "feed %s: availableNowTimeout is over, the rest is left for the next run",
            self.connection.url,
        )
        return None

    def _partitions_with_news(self) -> set[int]:
        """Poll the partitions that are due. Return those that have events."""
        if self._poll.running:
            return self._known_news() | self._ask(())
        entries = self.lineage.entries
        due = [p for p in self._polls.take_due() if entries[p].running and p not in self._more]
        news = self._known_news()
        expected = [p for p in due if self._polls.expects(p)]
        others = self._due_late() + [p for p in due if not self._polls.expects(p)]
        for partition in others[_MAX_PROBES:]:
            if entries[partition].running:
                self._polls.later(partition, 0.0)
        news |= self._ask(others[:_MAX_PROBES])
        if self._polled:  # still
            for partition in expected:
                self._polls.later(partition, 0.0)
            return news
        # Where others have news, to ask an expected one first would only be one request more.
        return news.union(expected) if news else self._ask(expected, until_found=True)

    def _due_late(self) -> list[int]:
        """Return the drained partitions that are asked again: late is better than lost (R6)."""
        if not self._late:
            return []
        entries, info = self.lineage.entries, self._info
        closed = set() if info is None else {p for p, one in info.partitions.items() if one.closed}
        drained = {p for p in closed if p in entries and entries[p].state is State.DRAINED}
        return self._late.due(drained)

    def _take_late(self, result: FetchResult) -> bool:
        """Take the answer of a drained partition. Return whether it has events."""
        partition = result.partition
        self._late.asked(partition, failed=result.failed or result.refused)
        if not result.events or self.lineage.entries[partition].state is not State.DRAINED:
            return False
        self._late.pop(partition, None)
        self._closed_since[partition] = time.monotonic()  # what answers may lag, and for long
        _log.warning(
            "feed %s, partition %d: an event came behind the end that its empty answers had shown: "
            "it is read late, perhaps after events of its children. The publisher should list "
            "lastCursor",
            self.connection.url,
            partition,
        )
        self._perform(self.lineage.reopened(partition))
        return True

    def _known_news(self) -> set[int]:
        return {p for p in self._more if self._failures.may_ask(p)}

    def _ask(self, partitions: Collection[int], *, until_found: bool = False) -> set[int]:
        """Return those of the partitions that have an event. It is left to the executors.

        With `until_found` the first ones that have one are enough, and all that were not asked yet
        are returned with them. A poll that takes long goes on in the background: a later call
        returns what it found, whatever that call asks for.
        """
        if not self._poll.running:
            if not partitions:
                return set()
            self._polled = {id: self.lineage.entries[id].cursor for id in partitions}
        cursors = self._polled

        def ask() -> list[FetchResult]:
            found: list[FetchResult] = []
            for results in self._probe.ask(cursors):
                found += results
                if until_found and any(result.events for result in results):
                    break
            return found

        results = self._poll.next(ask)
        return set() if results is None else self._take_polled(results)

    def _take_polled(self, results: Iterable[FetchResult]) -> set[int]:
        found: set[int] = set()
        unasked = set(self._polled)
        self._polled = {}
        entries = self.lineage.entries
        for result in results:
            partition = result.partition
            self._count(result)
            unasked.discard(partition)
            if partition in self._late and not self._take_late(result):
                continue
            if not entries[partition].running or entries[partition].cursor != result.start:
                continue  # it changed while the poll was running
            if result.events:
                self._discover_if_changed(result)
                self._progress.add(result, caught_up=False)
                found.add(partition)
                self._more.add(partition)
                self._failures.succeeded(partition)
            else:
                result.more = False
                self._add(result)
        return found.union(p for p in unasked if entries[p].running)

    def _plan(self, news: Collection[int], limit: int | None) -> EpochPlan:
        """Return the state, with the partitions to read: as many as the trigger's limits allow."""
        partitions, waiting = self._in_turn(news)
        most = _share(self.options.max_events_per_trigger, partitions)
        bounds = [bound for bound in (most, limit) if bound is not None]
        self._unsaved = False
        for partition in waiting:
            self._polls.later(partition, 0.0)
        self._planned = set(partitions)
        selected = self.lineage.selected
        ends = {} if self.available_now is None else self.available_now.ends
        return EpochPlan(
            feed=self._key,
            name=self.connection.url,
            info=self._info or self.connection.info,
            positions=self._positions(),
            sequences=dict(self._sequences),
            depths=dict(self._depths),
            known=sorted(self._known),
            selected=None if selected is None else sorted(selected),
            groups=split_into_groups(
                sorted(partitions, key=lambda p: (p not in self._more, p)),
                self.options.max_partitions_per_task,
            ),
            late=self._late.stored() or msgspec.UNSET,
            limit=min(bounds, default=None),
            max_bytes=_share(self.options.max_bytes_per_trigger, partitions) or msgspec.UNSET,
            chosen=None if self.options.partitions is None else sorted(self.options.partitions),
            ends={p: end for p in partitions if (end := ends.get(p)) is not None},
        )

    def _in_turn(self, news: Collection[int]) -> tuple[Collection[int], Collection[int]]:
        """Return the partitions of the next epoch, read the longest ago, and those that wait."""
        limits = (
            (self.options.max_events_per_trigger, _LEAST_SHARE),
            (self.options.max_bytes_per_trigger, _LEAST_BYTES),
        )
        counts = [max(1, most // least) for most, least in limits if most is not None]
        if not counts or not news:
            return news, ()
        self._epochs += 1
        in_turn = sorted(news, key=lambda p: (self._read_in.get(p, 0), p))
        count = min(counts)
        self._read_in |= dict.fromkeys(in_turn[:count], self._epochs)
        return in_turn[:count], in_turn[count:]

    def _positions(self) -> dict[int, Position]:
        entries = self.lineage.entries.values()
        positions = {entry.id: entry.position for entry in entries if entry.position is not None}
        return {**self._not_selected, **positions}

    def summary(self) -> dict[str, Any]:
        """Return what `StreamingQueryProgress` says of the source: see `ProgressReport`."""
        # Partitions that wait for an answer, or for their turn while others do.
        asked = self._polled.keys() | self._polls.overdue() if self._poll.running else ()
        report = self._progress.of(self.lineage, self._failures.partitions(), asked)
        return {"feed": self.connection.url, **report}


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


def key_of(connection: FeedConnection, *, named: bool = True) -> str:
    """Return the key of the feed, by its name if it has one, and of the selection of events."""
    options, selection = connection.options, connection.fetch_options.selection()
    if named and options.feed_name is not None:
        return FeedKey.named(options.feed_name, "spark", selection).id
    return FeedKey(options.url, "spark", selection).id


def _share(most: int | None, partitions: Collection[int]) -> int | None:
    """Return how much of a limit on the epoch is for each of its partitions."""
    return max(1, most // len(partitions)) if most is not None and partitions else None


def _selected(options: SourceOptions, plan: EpochPlan | None) -> Collection[int] | None:
    """Return the partitions to read: the option's, and those that descend from them."""
    if options.partitions is None or plan is None or plan.selected is None:
        return options.partitions
    # One that waited and is no longer listed has no position: there is nothing to read.
    return [p for p in plan.selected if p in plan.info.partitions or p in plan.positions]
