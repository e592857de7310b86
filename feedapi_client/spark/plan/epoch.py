"""`EpochPlan`: what one epoch reads. Imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from feedapi_client.model import FIRST, FeedInfo, Position
from feedapi_client.options import FetchOptions
from feedapi_client.spark.plan.selection import only
from feedapi_client.spark.target import Target

DEFAULT_TASKS = 32
PLAN_VERSION = 2
"""Is raised when an older version of this package could read a plan or staged object wrongly."""
PLAN_VERSION_OF_SEVERAL = 3
"""Of a plan that holds several feeds. That of one feed is stored as before there were several."""


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
    feed: str = ""
    """URL of the feed, without secrets."""
    source: int | None = 0
    """Number of the feed among those of the options; None where the query no longer names it."""


class FeedPlan(msgspec.Struct, kw_only=True):
    """What an epoch reads of one feed, and everything that was known when it was planned."""

    feed: str
    """Key of the feed and of the selection of events."""
    name: str = ""
    """URL of the feed, without secrets. Empty in plans of earlier versions of this package."""
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
    chosen: list[int] | None = None
    """What option ``partitions`` named when the plan was made."""
    version: int = PLAN_VERSION
    """Of the format of plans and staged objects."""
    ends: dict[int, str] = {}
    """Where partitions end that are read to a fixed end."""
    seeking: list[int] = []
    """The partitions whose events are dropped up to the start time."""

    def task(
        self,
        epoch: int,
        group: int,
        fetch: FetchOptions,
        *,
        number: int | None = None,
        feed: str = "",
        source: int | None = 0,
    ) -> FetchTask:
        """Return what the task of a group fetches.

        Arguments:
            number: of the task in the epoch; by default that of the group.
            fetch, feed, source: as in `FetchTask`. A name in the plan comes before `feed`.
        """
        return FetchTask(
            epoch,
            group if number is None else number,
            self._targets(group),
            self._task_info(group),
            fetch,
            self.limit,
            self.name or feed,
            source,
        )

    def _targets(self, group: int) -> list[Target]:
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
                    self.ends.get(partition),
                    resumable=True,
                    seek=partition in self.seeking,
                )
            )
        return targets

    def _task_info(self, group: int) -> FeedInfo:
        """The discovery as far as the task needs it. Dialect v1 sends the number of partitions."""
        return self.info if self.info.dialect == "v1" else only(self.info, self.groups[group])


class EpochPlan(msgspec.Struct, kw_only=True):
    """What an epoch reads: a plan for each feed."""

    feeds: list[FeedPlan]
    """Those that the query names, and those that it named once and no longer reads."""
    version: int = PLAN_VERSION_OF_SEVERAL

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (number of the feed in `feeds`, number of the group in its plan) of each task."""
        for number, plan in enumerate(self.feeds):
            for group in range(len(plan.groups)):
                yield number, group


def split_into_groups(
    partitions: list[int], size: int | None, tasks: int = DEFAULT_TASKS
) -> list[list[int]]:
    """Spread the partitions evenly over tasks of at most `size`; without a size over `tasks`."""
    if not partitions:
        return []
    tasks = -(-len(partitions) // size) if size else min(len(partitions), max(1, tasks))
    return [partitions[task::tasks] for task in range(tasks)]
