"""`EpochPlan`: what one epoch reads. Imports no Spark."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from feedapi_client.model import FIRST, FeedInfo, Position
from feedapi_client.options import FetchOptions
from feedapi_client.spark.plan.selection import only
from feedapi_client.spark.target import Target

DEFAULT_TASKS = 32
PLAN_VERSION = 2
"""Is raised when an older version of this package could read a plan or staged object wrongly."""


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


class EpochPlan(msgspec.Struct, kw_only=True):
    """What an epoch reads, and everything that was known when it was planned."""

    feed: str
    """Key of the feed and of the selection of events."""
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

    def task(self, epoch: int, number: int, fetch: FetchOptions) -> FetchTask:
        """Return what the task of group `number` fetches."""
        return FetchTask(
            epoch, number, self._targets(number), self._task_info(number), fetch, self.limit
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


def split_into_groups(partitions: list[int], size: int | None) -> list[list[int]]:
    """Spread the partitions evenly over tasks of at most `size`; without a size over a few."""
    if not partitions:
        return []
    tasks = -(-len(partitions) // size) if size else min(len(partitions), DEFAULT_TASKS)
    return [partitions[task::tasks] for task in range(tasks)]
