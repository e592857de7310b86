"""The feed that ``feedapi serve`` serves: events about made-up orders, and splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from feedapi_client.model import Partition
    from feedapi_client.testing import Publisher

_MAX_OPEN_PARTITIONS = 64
_TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")

SplitMethod = Literal["starts-after", "cursor-from"]


class ExampleFeed:
    """Publishes events and splits partitions. At most `max_events` are published in all."""

    def __init__(self, publisher: Publisher, *, entities: int, max_events: int) -> None:
        self.publisher = publisher
        self.entities = entities
        self.max_events = max_events
        self.published = 0
        self.splits = 0

    @property
    def full(self) -> bool:
        """Whether no more events may be published."""
        return self.published >= self.max_events

    def publish(self, count: int) -> None:
        """Publish `count` more events, or as many as are still allowed."""
        headers = {"content-type": "application/json"} if self.publisher.dialect == "v1" else None
        end = min(self.published + count, self.max_events)
        for number in range(self.published, end):
            entity = f"order-{number % self.entities}"
            n = number // self.entities + 1
            event = {"entity": entity, "n": n, "type": _TYPES[(n - 1) % len(_TYPES)]}
            self.publisher.publish(entity, event, headers=headers)
        self.published = max(self.published, end)

    def split(self) -> str | None:
        """Split a partition, by the two methods alternately, and return what was done.

        Returns None when there are so many open partitions that no more are split.
        """
        open_partitions = [p for p in self.publisher.partitions.values() if not p.closed]
        if len(open_partitions) >= _MAX_OPEN_PARTITIONS:
            return None
        partition, method = self._choose_split(open_partitions)
        self.splits += 1
        children = self.publisher.split(partition.id, method=method)
        names = ", ".join(map(str, children))
        return f"partition {partition.id} was split into {names} ({method})"

    def _choose_split(self, partitions: list[Partition]) -> tuple[Partition, SplitMethod]:
        """Choose the first partition that the method whose turn it is can split."""
        if self.splits % 2 == 0:
            return partitions[0], "starts-after"
        # A partition that starts after another one can't be split by cursor transfer: discovery
        # has no way to tell both its parent and the successors that take its cursor.
        for partition in partitions:
            if partition.starts_after is None:
                return partition, "cursor-from"
        return partitions[0], "starts-after"
