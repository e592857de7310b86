"""`State` and `EpochPlan`: what a query knows, what an epoch reads, and how that is stored.

Imports no Spark.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import msgspec

from feedapi_client.model import FIRST, FeedInfo, Partition, Position
from feedapi_client.options import FetchOptions
from feedapi_client.spark.fetch import FetchResult, Target
from feedapi_client.spark.source_options import OptionError, SourceOptions
from feedapi_client.spark.staging import StagingError, inflate, newer_format, whole

_TASKS = 32
PLAN_VERSION = 4
"""Is raised when an older version of this package could read a plan wrongly."""


@dataclass(frozen=True, slots=True)
class FetchTask:
    """What one task of an epoch fetches. `fetch` and `info` are as the driver resolved them."""

    epoch: int
    number: int
    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions
    limit: int | None
    """Maximum number of events of each partition."""
    max_bytes: int | None = None
    """Bytes of each partition after which no further batch is read."""


class EpochPlan(msgspec.Struct, kw_only=True):
    """What an epoch reads, and everything that was known when it was planned."""

    feed: str
    """Key of the feed and of the selection of events."""
    name: str
    """URL of the feed, without secrets."""
    info: FeedInfo
    positions: dict[int, Position]
    sequences: dict[int, int]
    """Events of each partition before this epoch."""
    depths: dict[int, int]
    known: list[int]
    selected: list[int] | None
    """The partitions that are read; None for all."""
    groups: list[list[int]]
    """The partitions to read, one list a task."""
    limit: int | None
    """Maximum number of events of each partition."""
    max_bytes: int | msgspec.UnsetType = msgspec.UNSET
    """Bytes of each partition after which no further batch is read."""
    late: dict[int, float] | msgspec.UnsetType = msgspec.UNSET
    """The drained partitions that are asked again, until when: seconds since 1970."""
    chosen: list[int] | None = None
    """What option ``partitions`` named when the plan was made."""
    version: int = PLAN_VERSION
    """Of the format of plans."""
    ends: dict[int, str] = {}
    """Where partitions end that are read to a fixed end."""
    driver: int = 0
    """The place of the run that made it (`Fence`)."""

    def task(self, epoch: int, group: int, fetch: FetchOptions) -> FetchTask:
        """Return what the task of a group fetches; `fetch` as in `FetchTask`."""
        partitions = self.groups[group]
        return FetchTask(
            epoch,
            group,
            [self._target(self.info.partitions[partition]) for partition in partitions],
            only(self.info, partitions),
            fetch,
            self.limit,
            self.max_bytes or None,
        )

    def _target(self, listed: Partition) -> Target:
        position = self.positions.get(listed.id)
        return Target(
            listed.id,
            position.cursor if position else FIRST,
            listed.closed,
            listed.last_cursor,
            self.sequences.get(listed.id, 0),
            self.depths.get(listed.id, 0),
            self.ends.get(listed.id),
        )


@dataclass
class State:
    """What a query knows of its feed between two epochs.

    Attributes:
        info: the last discovery.
        positions: of every partition that has one, also of those that are not selected.
        known: every partition that was ever listed.
        selected: the partitions that are read; None for all.
        added: those of them that option ``partitions`` names since this run.
        sequences: how many events of each partition were read.
        depths: how many partitions come before each, one after the other.
        late: the drained partitions that are asked again, until when: seconds since 1970.
    """

    info: FeedInfo
    positions: dict[int, Position] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    selected: frozenset[int] | None = None
    added: frozenset[int] = frozenset()
    sequences: dict[int, int] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)

    def add(self, results: Iterable[FetchResult]) -> None:
        """Add the results of an epoch."""
        for result in results:
            id, events = result.partition, result.events
            self.sequences[id] = self.sequences.get(id, 0) + events
            known = self.positions.get(id)
            if known is None or known.cursor != result.cursor:
                self.positions[id] = Position.after(known, result.cursor)

    @classmethod
    def before(cls, plan: EpochPlan, options: SourceOptions) -> State:
        """Return the state that a plan was made in. Raises as `added_partitions`."""
        added, selected = added_partitions(options, plan.chosen), options.partitions
        if plan.selected is None:
            check_partitions(options, plan.info)
        elif selected is not None:
            selected = frozenset(plan.selected) | added
        return cls(
            plan.info,
            dict(plan.positions),
            set(plan.known),
            selected,
            added,
            dict(plan.sequences),
            dict(plan.depths),
            dict(plan.late or {}),
        )

    def is_unsaved(self, planned: Mapping[int, Position]) -> bool:
        """Whether a planned position was transferred, or begins anew, and no plan says so."""
        for id, then in planned.items():
            now = self.positions.get(id, then)
            if now.status == "superseded" != then.status or now.cursor == FIRST != then.cursor:
                return True
        return False


def split_into_groups(partitions: list[int], size: int | None) -> list[list[int]]:
    """Spread the partitions evenly over tasks of at most `size`; without one over some tasks."""
    tasks = -(-len(partitions) // size) if size else min(len(partitions), _TASKS)
    return [partitions[task::tasks] for task in range(tasks)]


def count_before(before: Mapping[int, Mapping[int, int]], depths: dict[int, int]) -> None:
    """Add the depth of each partition to `depths`: how many come before it, one after the other.

    Arguments:
        before: for each partition those directly before it, and how many places each takes (0 or
            1). One that is neither here nor in `depths` is at depth 0.
        depths: is changed.
    """
    begun: set[int] = set()
    for partition in before:
        waiting = [partition]  # a chain of partitions may be longer than Python's stack
        while waiting:
            current = waiting[-1]
            first = [p for p in before[current] if p in before and p not in depths]
            first = [p for p in first if p not in begun]
            begun.add(current)
            if current not in depths and first:
                waiting += first
                continue
            waiting.pop()
            if current not in depths:
                places = before[current].items()
                depths[current] = max((depths.get(p, 0) + n for p, n in places), default=0)


# ---------------------------------------------------------------------- storage


def encode(plan: EpochPlan) -> bytes:
    """Return the object to stage."""
    content = msgspec.to_builtins(plan)
    for position in content["positions"].values():
        del position["replaces"]  # which is not stored
    return zlib.compress(msgspec.json.encode(content), 1)


def decode(content: bytes, key: str) -> EpochPlan:
    """Return the plan in a staged object. Raises `StagingError`: torn, or of a newer version."""
    text = inflate(content, key)
    with whole(key):
        version = msgspec.convert(msgspec.json.decode(text)["version"], int)
        if version > PLAN_VERSION:
            raise StagingError(newer_format(f"the plan {key}", version, PLAN_VERSION))
        return msgspec.json.decode(text, type=EpochPlan)


# ---------------------------------------------------------------------- option partitions


def check_partitions(
    options: SourceOptions,
    info: FeedInfo,
    named: AbstractSet[int] | None = None,
    option: str = "partitions",
) -> None:
    """Raise `OptionError` when an option names a partition that the feed does not list.

    `named` are those of them to check; by default all of option ``partitions``.
    """
    missing = sorted((named or options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option {option} names {', '.join(map(str, missing[:8]))}, which "
            "the feed does not list"
        )


def added_partitions(options: SourceOptions, chosen: Collection[int] | None) -> frozenset[int]:
    """Return the partitions that option ``partitions`` names now, and did not name before.

    Arguments:
        options: of the query that starts again.
        chosen: what the option named when the last plan was made.

    Raises:
        OptionError: the option no longer names one that it named. Its descendants can't be told
            from those of others.
    """
    if options.partitions is None or chosen is None:
        return frozenset()
    removed = sorted(set(chosen) - options.partitions)
    if removed:
        raise OptionError(
            f"feedapi source: option partitions no longer names {', '.join(map(str, removed[:8]))}."
            " A query can get more partitions when it starts again, not fewer: name them too, or "
            "start a new query with a checkpoint location of its own"
        )
    return options.partitions - set(chosen)


def only(info: FeedInfo, partitions: Collection[int]) -> FeedInfo:
    """Return the discovery as far as a task needs it that reads these partitions.

    Dialect v1 sends the number of all partitions.
    """
    if info.dialect == "v1":
        return info
    return replace(info, partitions={id: info.partitions[id] for id in partitions})
