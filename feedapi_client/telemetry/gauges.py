"""The values that are read when they are exported: from the status and the health of a consumer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import Observation as Value

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.status import (
    ConsumerStatus,
    Health,
    PartitionState,
    PartitionStatus,
    ProblemName,
)
from feedapi_client.telemetry.metrics import Metric

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer

MAX_PARTITIONS = 64
"""Partitions that gauges and counters tell apart: so many are 140 KB a scrape. Of more gauges only
export the worst one."""
_FRESH_SECONDS = 0.2
"""All gauges of one export are read from the same snapshot."""
_ENDED = (
    PartitionState.DRAINED,
    PartitionState.SUPERSEDED,
    PartitionState.VANISHED,
    PartitionState.ELSEWHERE,
    PartitionState.WAITING,
)
Read = Callable[["Gauges"], Iterator[Value]]


class Gauges:
    """What one consumer is like. Also read by threads of a metric reader.

    Arguments:
        refreshed: called with each status that is read.
    """

    def __init__(
        self,
        consumer: FeedConsumer,
        common: dict[str, Any],
        refreshed: Callable[[ConsumerStatus], object],
    ) -> None:
        self._consumer = consumer
        self._refreshed = refreshed
        self.common = common
        self._read_at = float("-inf")
        self.status = ConsumerStatus(consumer.feed)
        self.health = Health(live=True, ready=False)

    def refresh(self) -> None:
        """Read status and health again, unless that was done just now."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            self.status, self.health = self._consumer.status(), self._consumer.health()
            self._read_at = time.monotonic()
            self._refreshed(self.status)

    @property
    def leases(self) -> int | None:
        """The partitions whose lease this instance holds; None without `share`."""
        instance = self._consumer.instance
        if instance is None:
            return None
        return sum(1 for each in self.status.partitions.values() if each.owner == instance)

    def of_each(
        self, value: Callable[[PartitionStatus], float | None], worst: Callable[..., float] = max
    ) -> Iterator[Value]:
        """A value of each partition that is being read; of many the worst one."""
        found = [
            (each.partition, of_one)
            for each in self.status.partitions.values()
            if each.state not in _ENDED and (of_one := value(each)) is not None
        ]
        if len(self.status.partitions) <= MAX_PARTITIONS:
            for id, of_one in found:
                yield Value(of_one, self.common | {metrics.PARTITION: str(id)})
        elif found:
            yield Value(worst(of_one for _, of_one in found), self.common)


def _buffered(of: Gauges) -> Iterator[Value]:
    yield Value(of.status.buffered_bytes, of.common)


def _partitions(of: Gauges) -> Iterator[Value]:
    counts = Counter(each.state for each in of.status.partitions.values())
    for state in PartitionState:  # all of them: a series that ends keeps its last value for a while
        yield Value(counts[state], of.common | {metrics.STATE: state.value})


def _caught_up(of: Gauges) -> Iterator[Value]:
    yield from of.of_each(lambda each: float(each.caught_up is True), min)


def _caught_up_age(of: Gauges) -> Iterator[Value]:
    began = of.status.began
    yield from of.of_each(lambda each: _caught_up_seconds(each, began))


def _caught_up_seconds(each: PartitionStatus, began: datetime | None) -> float | None:
    if each.behind_seconds is not None or began is None:
        return each.behind_seconds
    return max(0.0, (datetime.now(began.tzinfo) - began).total_seconds())


def _in_flight_age(of: Gauges) -> Iterator[Value]:
    yield from of.of_each(lambda each: each.in_flight_seconds or 0.0)


def _commit_age(of: Gauges) -> Iterator[Value]:
    yield from of.of_each(lambda each: each.commit_age_seconds)


def _leases(of: Gauges) -> Iterator[Value]:
    if of.leases is not None:
        yield Value(of.leases, of.common)


def _live(of: Gauges) -> Iterator[Value]:
    yield Value(int(of.health.live), of.common)


def _ready(of: Gauges) -> Iterator[Value]:
    yield Value(int(of.health.ready), of.common)


def _problems(of: Gauges) -> Iterator[Value]:
    counts = Counter(problem.name for problem in of.health.problems)
    for name in ProblemName:
        yield Value(counts[name], of.common | {metrics.PROBLEM: name.value})


READS: dict[Metric, Read] = {
    metrics.BUFFERED: _buffered,
    metrics.PARTITIONS: _partitions,
    metrics.CAUGHT_UP: _caught_up,
    metrics.CAUGHT_UP_AGE: _caught_up_age,
    metrics.IN_FLIGHT_AGE: _in_flight_age,
    metrics.COMMIT_AGE: _commit_age,
    metrics.LEASES: _leases,
    metrics.LIVE: _live,
    metrics.READY: _ready,
    metrics.PROBLEMS: _problems,
}


def read_all(read: Read, gauges: Iterable[Gauges]) -> Iterator[Value]:
    """The values of all consumers."""
    for each in list(gauges):
        each.refresh()
        yield from read(each)
