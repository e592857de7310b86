"""A consumer of chosen partitions, for ``feedapi cat --partition``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import LineageError
from feedapi_client.lineage.planner import Action, Planner, StartAt
from feedapi_client.model import FeedInfo, Partition, Position


class NarrowPlanner(Planner):
    """A planner for the chosen partitions only.

    Order among them is kept: a partition that starts after another chosen one waits for it. It does
    not wait for other partitions. A cursor is not transferred from an ancestor: the transfer would
    supersede the ancestor's cursor also for the successors that are not chosen.
    """

    def __init__(self, chosen: frozenset[int], *, feed: str, start: StartAt, ordered: bool) -> None:
        super().__init__(feed=feed, start=start, ordered=ordered)
        self._chosen = chosen
        self._stored: Mapping[int, Position] = {}

    def load(self, positions: Mapping[int, Position]) -> None:
        """The stored positions; see `Planner.load`."""
        self._stored = positions
        super().load(
            {
                partition: position
                for partition, position in positions.items()
                if partition in self._chosen
            }
        )

    def unresolved(self, info: FeedInfo) -> list[int]:
        """See `Planner.unresolved`."""
        return super().unresolved(self._narrowed(info))

    def discover(self, info: FeedInfo, *, ends: Mapping[int, str] | None = None) -> list[Action]:
        """See `Planner.discover`.

        Raises `LineageError` for a partition that the feed never listed.
        """
        for partition in self._chosen - info.partitions.keys() - self.entries.keys():
            raise LineageError(
                f"the feed does not list this partition, only {_ids(info)}",
                feed=self.feed,
                partition=partition,
            )
        return super().discover(self._narrowed(info), ends=ends)

    def _narrowed(self, info: FeedInfo) -> FeedInfo:
        return replace(
            info,
            partitions={
                id: self._alone(p) for id, p in info.partitions.items() if id in self._chosen
            },
        )

    def _alone(self, partition: Partition) -> Partition:
        if partition.id not in self._stored:
            for ancestor in partition.cursor_from:
                if ancestor in self._stored and self._stored[ancestor].status != "superseded":
                    raise LineageError(
                        f"is to take over the cursor that is stored for partition {ancestor}: "
                        "run once without --partition, or set its cursor",
                        feed=self.feed,
                        partition=partition.id,
                    )
        after = partition.starts_after if partition.starts_after in self._chosen else None
        return replace(partition, starts_after=after, cursor_from=())


def _ids(info: FeedInfo) -> str:
    ids = sorted(info.partitions)
    return f"{', '.join(map(str, ids[:20]))}{' …' if len(ids) > 20 else ''}"


class NarrowConsumer(FeedConsumer):
    """A `FeedConsumer` of the partitions `chosen`."""

    def __init__(self, url: str, *, chosen: frozenset[int], **settings: Any) -> None:
        super().__init__(url, **settings)
        self._chosen = chosen

    def _new_planner(self) -> Planner:
        return NarrowPlanner(
            self._chosen, feed=self.feed, start=self._settings.start, ordered=self._settings.ordered
        )
