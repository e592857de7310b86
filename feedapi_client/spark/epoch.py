"""`State` and `EpochPlan`: what a query knows, what an epoch reads, and how that is stored.

Imports no Spark.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace

import msgspec

from feedapi_client.model import FIRST, FeedInfo, Position
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
    """The same in bytes: no further batch is read after so many."""


class State(msgspec.Struct, kw_only=True):
    """What a query knows of its feed between two epochs. `known`: what was ever listed."""

    info: FeedInfo
    positions: dict[int, Position] = {}
    known: set[int] = set()
    selected: frozenset[int] | None = None
    """The partitions that are read; None for all."""
    sequences: dict[int, int] = {}
    depths: dict[int, int] = {}
    late: dict[int, float] = {}
    """The drained partitions that are asked again, until when: seconds since 1970."""

    def add(self, results: Iterable[FetchResult]) -> None:
        for result in results:
            id, events = result.partition, result.events
            self.sequences[id] = self.sequences.get(id, 0) + events
            known = self.positions.get(id)
            if known is None or known.cursor != result.cursor:
                self.positions[id] = Position.after(known, result.cursor)

    def is_unsaved(self, planned: Mapping[int, Position]) -> bool:
        """Whether a position is over, or a planned one begins anew, and no plan says so."""
        for id, now in self.positions.items():
            then = planned.get(id)
            if now.status != "open" and (then is None or then.status != now.status):
                return True
            if then is not None and now.cursor == FIRST != then.cursor:
                return True
        return False


class EpochPlan(State, kw_only=True):
    feed: str
    """Key of the feed and of the selection of events."""
    name: str
    """URL of the feed, without secrets."""
    groups: list[list[int]]
    limit: int | None
    max_bytes: int | None = None
    chosen: frozenset[int] | None = None
    """What option ``partitions`` named when the plan was made."""
    version: int = PLAN_VERSION
    ends: dict[int, str] = {}
    driver: int = 0
    """The place of the run that made it (`Fence`)."""

    def task(self, epoch: int, group: int, fetch: FetchOptions) -> FetchTask:
        partitions = self.groups[group]
        return FetchTask(
            epoch,
            group,
            [self._target(partition) for partition in partitions],
            only(self.info, partitions),
            fetch,
            self.limit,
            self.max_bytes,
        )

    def _target(self, id: int) -> Target:
        position = self.positions.get(id)
        return Target(
            id,
            position.cursor if position else FIRST,
            self.sequences.get(id, 0),
            self.depths.get(id, 0),
            self.ends.get(id),
        )

    def state(self, options: SourceOptions) -> State:
        """Return what was known when it was made. Raises `OptionError` for another selection."""
        if options.partitions != self.chosen:
            raise OptionError(
                "feedapi source: option partitions is not as it was when the query began, and its "
                "descendants can't be told from those of others. Name the same partitions, or "
                "start a new query with a checkpoint location of its own"
            )
        return State(**{name: copy(getattr(self, name)) for name in State.__struct_fields__})


def split_into_groups(partitions: list[int], size: int | None) -> list[list[int]]:
    tasks = -(-len(partitions) // size) if size else min(len(partitions), _TASKS)
    return [partitions[task::tasks] for task in range(tasks)]


def count_before(before: Mapping[int, Mapping[int, int]], depths: dict[int, int]) -> None:
    """Add to `depths` how many places are before each partition, by those directly before it."""
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
    content = msgspec.to_builtins(plan, order="deterministic")
    for position in content["positions"].values():
        del position["replaces"]  # which is not stored
    if plan.max_bytes is None:
        del content["max_bytes"]  # 1.0.0 takes no null here
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
    """Raise `OptionError` when an option names a partition that the feed does not list."""
    missing = sorted((named or options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option {option} names {', '.join(map(str, missing[:8]))}, which "
            "the feed does not list"
        )


def only(info: FeedInfo, partitions: Collection[int]) -> FeedInfo:
    """Return what a task needs of a discovery. Dialect v1 sends the number of all partitions."""
    if info.dialect == "v1":
        return info
    return replace(info, partitions={id: info.partitions[id] for id in partitions})
