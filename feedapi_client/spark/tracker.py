"""What a streaming query knows of its feed: the planner of the async consumer, fed with what the executors report. Imports no Spark.

The driver of a query alternates two steps: `absorb` what the epoch brought, then `next_plan`. A plan holds the whole state as it was when it was made, so
that a query that starts again goes on from the plan and the results of its last epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from feedapi_client.errors import CursorRejectedError, FeedError, FeedUnavailableError, LineageError
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
from feedapi_client.model import FIRST, FeedInfo, FeedKey, Position
from feedapi_client.spark.fetch import Feed, Outcome, PartitionReader, Target, read_end
from feedapi_client.spark.options import OptionError, SourceOptions

_log = logging.getLogger(__name__)

_DEFAULT_TASKS = 32
_PROBE_PATIENCE = 2.0
_REFUSALS = 2


class Plan(msgspec.Struct, kw_only=True):
    """What an epoch reads, and everything that was known when it was planned. `limit` bounds the events of each partition, None does not."""

    feed: str
    info: FeedInfo
    positions: dict[int, Position]
    sequences: dict[int, int]
    depths: dict[int, int]
    known: list[int]
    selected: list[int] | None
    groups: list[list[int]]
    limit: int | None

    def targets(self, group: int) -> list[Target]:
        """The partitions of a group, as an executor needs them."""
        targets = []
        for partition in self.groups[group]:
            listed, position = self.info.partitions[partition], self.positions.get(partition)
            targets.append(
                Target(
                    partition,
                    position.cursor if position else FIRST,
                    listed.closed,
                    listed.last_cursor,
                    self.sequences.get(partition, 0),
                    self.depths.get(partition, 0),
                )
            )
        return targets

    def slim_info(self, group: int) -> FeedInfo:
        """The discovery as far as the group's requests need it; dialect v1 sends the number of all partitions."""
        if self.info.dialect == "v1":
            return self.info
        return replace(
            self.info,
            partitions={
                partition: self.info.partitions[partition] for partition in self.groups[group]
            },
        )


@dataclass(slots=True)
class _Trouble:
    """A partition that fails, or refuses its cursor."""

    since: float
    until: float
    attempts: int
    text: str


@dataclass(slots=True)
class _AvailableNow:
    """The state of a trigger that ends: partitions caught up since it began, and when its time is over."""

    deadline: float
    caught_up: set[int] = field(default_factory=set)


class Tracker:
    """The lineage and the progress of one run. Not thread-safe."""

    def __init__(self, options: SourceOptions, feed: Feed) -> None:
        self.options = options
        self.feed = feed
        self.planner = Planner(feed=feed.url, start=options.start, ordered=options.ordered)
        self.sequences: dict[int, int] = {}
        self.depths: dict[int, int] = {}
        self.known: set[int] = set()
        self.selected: set[int] | None = None
        self.available_now: _AvailableNow | None = None
        self._more: set[int] = set()
        self._trouble: dict[int, _Trouble] = {}
        self._refusals: dict[tuple[int, str], int] = {}
        self._info: FeedInfo | None = None
        self._unsaved = False  # a discovery changed positions, and no plan holds that yet
        self._discover_at = 0.0
        self._probe_at = 0.0
        self._probe_pause = options.limits.poll_interval

    def __repr__(self) -> str:
        return f"<Tracker: {self.planner!r}>"

    @property
    def key(self) -> str:
        """Whose cursors these are: feed and selection of events."""
        return FeedKey(self.options.url, "spark", self.feed.fetch_options.selection()).id

    # ------------------------------------------------------------------ birth and return

    @classmethod
    def born(cls, options: SourceOptions, feed: Feed) -> Tracker:
        """The tracker of a new run. Raises `FeedError`, `OptionError`."""
        tracker = cls(options, feed)
        tracker.planner.load({})
        return tracker

    @classmethod
    def restored(cls, options: SourceOptions, feed: Feed, plan: Plan) -> Tracker:
        """The tracker as it was when the plan was made. Raises `LineageError` when the plan is of another feed."""
        tracker = cls(options, feed)
        if plan.feed != tracker.key:
            raise LineageError(
                "the checkpoint of this query belongs to another feed, or to another selection of events (filter.NAME, eventTypes, skipEventTypes), "
                "whose cursors are not valid here. Start a new query with a checkpoint location of its own",
                feed=feed.url,
            )
        tracker.sequences, tracker.depths = dict(plan.sequences), dict(plan.depths)
        tracker.known = set(plan.known)
        tracker.selected = None if plan.selected is None else set(plan.selected)
        tracker.planner.load(plan.positions)
        tracker._info = plan.info
        tracker._perform(tracker.planner.discover(tracker._chosen(plan.info)))
        return tracker

    # ------------------------------------------------------------------ what the executors report

    def absorb(self, outcomes: Iterable[Outcome], *, fresh: bool) -> None:
        """The results of the planned epoch; partitions without one keep their cursors. Not `fresh`: they may be from before the trigger began, and what
        was caught up then need not be now. Raises `FeedError`."""
        for outcome in outcomes:
            self._absorb(outcome, fresh=fresh)

    def _absorb(self, outcome: Outcome, *, fresh: bool = True) -> None:
        partition = outcome.partition
        self.sequences[partition] = self.sequences.get(partition, 0) + outcome.events
        self._note(outcome)
        actions: list[Action] = []
        if outcome.cursor != outcome.start:
            self.planner.progressed(partition)
            actions += self.planner.released(
                partition, self.planner.checkpoint(partition, outcome.cursor)
            )
        if outcome.ended:
            actions += self.planner.ended(
                partition, outcome.cursor, asked_closed=outcome.asked_closed
            )
            still_asked = (
                self.planner.entries[partition].state is State.READING
            )  # closed in the meantime: one more request tells whether that was the end
            if self.available_now is not None and fresh and not still_asked:
                self.available_now.caught_up.add(partition)
        self._perform(actions)

    def _note(self, outcome: Outcome) -> None:
        partition = outcome.partition
        (self._more.add if outcome.more else self._more.discard)(partition)
        if outcome.refused is not None:
            self._discover_at = 0.0
            asked = (partition, outcome.cursor)
            self._refusals[asked] = self._refusals.get(asked, 0) + 1
        if outcome.failed is not None:
            self._failed(partition, outcome.failed)
        elif outcome.refused is None:
            self._trouble.pop(partition, None)
            if outcome.cursor != outcome.start:
                self._refusals.pop((partition, outcome.start), None)

    def _failed(self, partition: int, text: str) -> None:
        """Ask this partition later, the others go on (R14); raise when it never comes back."""
        now, policy = time.monotonic(), self.options.retry
        known = self._trouble.get(partition)
        since, attempts = (known.since, known.attempts + 1) if known else (now, 1)
        if policy.give_up_after is not None and now - since > policy.give_up_after:
            raise FeedUnavailableError(
                f"failed for {now - since:.0f} s, the last time with {text}",
                feed=self.feed.url,
                partition=partition,
            )
        self._trouble[partition] = _Trouble(
            since,
            now + min(policy.max_delay, policy.base_delay * 2 ** min(attempts, 20)),
            attempts,
            text,
        )
        _log.warning(
            "feed %s, partition %d: %s; the other partitions go on", self.feed.url, partition, text
        )

    # ------------------------------------------------------------------ discovery

    def refresh(self, *, force: bool = False) -> None:
        """Discover when it is time. A running query keeps its last good topology when that fails (R12). Raises `FeedError` at birth."""
        if not force and time.monotonic() < self._discover_at:
            return
        self._discover_at = time.monotonic() + self.options.limits.discovery_interval
        try:
            info = self.feed.discover()
            chosen = self._chosen(info)
            ends = {
                partition: read_end(self.feed, partition)
                for partition in self.planner.unresolved(chosen)
            }
            actions = self.planner.discover(chosen, ends=ends)
        except FeedError as error:
            if self._info is None:
                raise
            _log.warning("discovery failed, the last topology stays: %s", error)
            return
        self._info = info
        self._check_refusals(info)
        self._unsaved = self._unsaved or any(isinstance(action, Save) for action in actions)
        self._perform(actions)

    def _chosen(self, info: FeedInfo) -> FeedInfo:
        """The discovery without the partitions that option ``partitions`` leaves out; those that descend from a chosen one are chosen."""
        if self.options.partitions is None:
            self.known |= info.partitions.keys()
            return info
        if self.selected is None:
            check_partitions(self.options, info)
            self.selected = set(self.options.partitions)
        else:
            fresh = [p for p in info.partitions.values() if p.id not in self.known]
            for _ in fresh:  # a child may be listed before its parent
                heirs = {
                    p.id
                    for p in fresh
                    if p.starts_after in self.selected or self.selected.intersection(p.cursor_from)
                }
                if heirs <= self.selected:
                    break
                self.selected |= heirs
        self.known |= info.partitions.keys()
        return replace(
            info, partitions={p.id: p for p in info.partitions.values() if p.id in self.selected}
        )

    def _check_refusals(self, info: FeedInfo) -> None:
        runnable = self.planner.runnable()
        for (partition, cursor), count in list(self._refusals.items()):
            if partition not in info.partitions or runnable.get(partition) != cursor:
                del self._refusals[partition, cursor]
            elif count >= _REFUSALS:
                raise CursorRejectedError(
                    f"is listed, and refuses the cursor {cursor!r} again and again",
                    feed=self.feed.url,
                    partition=partition,
                )

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(partition=partition):
                    if self.available_now is not None:
                        self.available_now.caught_up.discard(partition)
                case Rediscover():
                    self._discover_at = 0.0
                case Report(partition=partition, text=text):
                    _log.warning("feed %s, partition %s: %s", self.feed.url, partition, text)
                case Fail(error=error):
                    raise error

    # ------------------------------------------------------------------ the next epoch

    def next_plan(self, limit: int | None) -> Plan | None:
        """The next epoch; None when there is nothing to read. Raises `FeedError`."""
        if self.available_now is not None:
            return self._next_available_now(limit, self.available_now)
        self._refresh_or_be_born()
        if not (self._more or self._unsaved) and time.monotonic() < self._probe_at:
            return None
        wanted = self._due()
        if self._more.intersection(wanted) or (
            time.monotonic() >= self._probe_at and self._probe(wanted)
        ):
            self._probe_pause, self._probe_at = self.options.limits.poll_interval, 0.0
            return self._plan(self._due(), limit)
        return self._plan([], limit) if self._unsaved else None

    def _next_available_now(self, limit: int | None, trigger: _AvailableNow) -> Plan | None:
        """As above, but only what is not caught up since the trigger began, and None at the end."""
        self._refresh_or_be_born()
        while time.monotonic() < trigger.deadline:
            wanted = [p for p in self.planner.runnable() if p not in trigger.caught_up]
            if not wanted:
                return self._plan([], limit) if self._unsaved else None
            due = self._due(wanted)
            if self._more.intersection(due) or self._probe(due):
                return self._plan(
                    [p for p in self._due(self.planner.runnable()) if p not in trigger.caught_up],
                    limit,
                )
            if not due or self._trouble.keys() & set(wanted):
                time.sleep(min(1.0, self.options.limits.poll_interval))
            self.refresh()
        _log.warning(
            "feed %s: availableNowTimeout is over, the rest is left for the next run", self.feed.url
        )
        return None

    def _refresh_or_be_born(self) -> None:
        newborn = self._info is None
        self.refresh()
        if newborn and self.options.start == "first":
            self._unsaved = (
                False  # it would be born the same way again: no need for an epoch without rows
            )

    def _due(self, among: Iterable[int] | None = None) -> list[int]:
        now = time.monotonic()
        return [
            p
            for p in (self.planner.runnable() if among is None else among)
            if p not in self._trouble or self._trouble[p].until <= now
        ]

    def _plan(self, wanted: list[int], limit: int | None) -> Plan:
        self._unsaved = False
        for partition in wanted:
            self._set_depth(partition)
        return Plan(
            feed=self.key,
            info=self._info or self.feed.info,
            positions=self._positions(),
            sequences=dict(self.sequences),
            depths=dict(self.depths),
            known=sorted(self.known),
            selected=None if self.selected is None else sorted(self.selected),
            groups=group(
                sorted(wanted, key=lambda p: p not in self._more),
                self.options.max_partitions_per_task,
            ),
            limit=limit,
        )

    def _positions(self) -> dict[int, Position]:
        return {
            entry.id: entry.position
            for entry in self.planner.entries.values()
            if entry.position is not None
        }

    def _set_depth(self, partition: int) -> int:
        """How many partitions come before it, counted once: an ancestor that is gone later still counts."""
        if partition not in self.depths:
            listed = self.planner.graph.partitions.get(partition)
            before: list[int] = []
            if listed is not None and listed.starts_after is not None:
                before = (
                    [listed.starts_after] if listed.starts_after in self.planner.entries else []
                )
            elif listed is not None:
                before = [a for a in listed.cursor_from if self.sequences.get(a)]
            self.depths[partition] = 1 + max(map(self._set_depth, before)) if before else 0
        return self.depths[partition]

    # ------------------------------------------------------------------ is there news

    def _probe(self, partitions: list[int]) -> bool:
        """Ask the partitions one after the other, a few at once, until one has an event. Empty pages move the cursors on."""
        if not partitions:
            return False
        news, cursors = False, self.planner.runnable()
        workers = min(self.options.limits.max_concurrent_fetches, _DEFAULT_TASKS, len(partitions))
        with ThreadPoolExecutor(workers, thread_name_prefix="feedapi-probe") as pool:
            for at in range(0, len(partitions), workers):
                targets = [
                    Target(partition, cursors[partition])
                    for partition in partitions[at : at + workers]
                ]
                outcomes = list(pool.map(self._ask, targets))
                news = any(outcome.events for outcome in outcomes)
                for outcome in outcomes:
                    self._absorb_probe(outcome)
                if news:
                    break
        if not news:
            limits = self.options.limits
            self._probe_at = time.monotonic() + self._probe_pause
            self._probe_pause = min(limits.max_poll_interval, self._probe_pause * 2)
        return news

    def _ask(self, target: Target) -> Outcome:
        return PartitionReader(
            self.feed, target, limit=1, full=lambda: True, patience=_PROBE_PATIENCE, probe=True
        ).read()

    def _absorb_probe(self, outcome: Outcome) -> None:
        """A probe reads no events: where it found some, the executors will."""
        if outcome.events:
            self._more.add(outcome.partition)
            self._trouble.pop(outcome.partition, None)
        else:
            outcome.more = False
            self._absorb(outcome)

    # ------------------------------------------------------------------ for people

    def summary(self) -> dict[str, int]:
        """How many partitions are in which state."""
        counts = {
            "partitions": 0,
            "reading": 0,
            "caughtUp": 0,
            "waiting": 0,
            "drained": 0,
            "failing": len(self._trouble),
        }
        names = {
            State.READING: "reading",
            State.CAUGHT_UP: "caughtUp",
            State.WAITING: "waiting",
            State.DRAINED: "drained",
        }
        for entry in self.planner.entries.values():
            counts["partitions"] += entry.id in self.planner.graph
            if entry.state in names:
                counts[names[entry.state]] += 1
        return counts


def group(partitions: list[int], size: int | None) -> list[list[int]]:
    """The partitions spread evenly over tasks of at most `size`; without one over a few tasks."""
    if not partitions:
        return []
    tasks = -(-len(partitions) // size) if size else min(len(partitions), _DEFAULT_TASKS)
    return [partitions[task::tasks] for task in range(tasks)]


def check_partitions(options: SourceOptions, info: FeedInfo) -> None:
    """Raise `OptionError` when option ``partitions`` names one that the feed does not list."""
    missing = sorted((options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option partitions names {', '.join(map(str, missing[:8]))}, which the feed does not list"
        )
