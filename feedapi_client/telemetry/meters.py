"""What is measured of consumers: plain numbers, read when somebody exports them.

A measurement takes OpenTelemetry's SDK about 100,000 instructions (1.45, callgrind), adding to a
number almost none. Only histograms are measured with the SDK as well: it can't observe any.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Meter
from opentelemetry.metrics import Observation as Value

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.status import (
    ConsumerStatus,
    Health,
    PartitionState,
    PartitionStatus,
    ProblemName,
)
from feedapi_client.telemetry.metrics import Kind, Metric

SCOPE = "feedapi_client"
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 60.0, 300.0),
)
"""In seconds, as the conventions of messaging systems advise, and two more for slow handlers."""
MAX_PARTITIONS = 64
"""Partitions that gauges and counters tell apart: so many are 140 KB a scrape. Of more gauges only
export the worst one."""
_FRESH_SECONDS = 0.2
"""All gauges of one export are read from the same status."""
_ENDED = {
    PartitionState.DRAINED,
    PartitionState.SUPERSEDED,
    PartitionState.VANISHED,
    PartitionState.ELSEWHERE,
}
_OPERATION_TYPES = {"fetch": "receive", "commit": "settle"}

Attributes = tuple[tuple[str, str], ...]
Numbers = list[float]
"""The sum of a series; of a histogram then how many there were in each of its buckets."""
Key = tuple[str, int | None, str | None, str | None]
"""Name of the metric, partition, type of the error, operation."""


class Series:
    __slots__ = ("attributes", "metric", "numbers")

    def __init__(self, metric: Metric, attributes: dict[str, str]) -> None:
        self.metric = metric
        self.attributes = attributes
        self.numbers = [0.0] * (1 if metric.kind is Kind.COUNTER else len(BUCKETS) + 2)


Look = Callable[[], tuple[ConsumerStatus, Health]]


class Measured:
    """Added to in the consumer's event loop, read by any thread."""

    def __init__(
        self, common: dict[str, str], instance: Callable[[], str | None], look: Look, meters: Meters
    ) -> None:
        self.common = common
        self.instance = instance
        self.series: dict[Key, Series] = {}
        self._look = look
        self._looked_at = float("-inf")
        self._meters = meters
        self._partitions: set[int] = set()
        self.status: ConsumerStatus
        self.health: Health

    def add(
        self,
        metric: Metric,
        amount: float,
        *,
        partition: int | None = None,
        error: str | None = None,
        operation: str | None = None,
    ) -> None:
        if partition is not None:
            self._partitions.add(partition)
            if len(self._partitions) > MAX_PARTITIONS:
                partition = None
        key = metric.name, partition, error, operation
        series = self.series.get(key)
        if series is None:  # a thread that exports may be faster
            series = self.series.setdefault(key, Series(metric, self._attributes(*key[1:])))
        if amount:  # 0 may come from a thread that exports, which must not undo an addition
            series.numbers[0] += amount
        if metric.kind is Kind.HISTOGRAM:
            series.numbers[1 + bisect_left(BUCKETS, amount)] += 1
            self._meters.record(metric, amount, series.attributes)

    def _attributes(
        self, partition: int | None, error: str | None, operation: str | None
    ) -> dict[str, str]:
        own = {
            metrics.PARTITION: None if partition is None else str(partition),
            metrics.ERROR: error,
            metrics.OPERATION: operation,
            metrics.OPERATION_TYPE: _OPERATION_TYPES.get(operation or ""),
        }
        return self.common | {name: value for name, value in own.items() if value is not None}

    def refresh(self) -> None:
        """All partitions that may be read have their counters then."""
        if time.monotonic() - self._looked_at <= _FRESH_SECONDS:
            return
        self.status, self.health = self._look()
        self._looked_at = time.monotonic()
        statuses = self.status.partitions.values()
        read = [each.partition for each in statuses if each.state not in _ENDED]
        self._partitions.update(read)
        for metric in metrics.FROM_THE_START:
            operation = "process" if metric is metrics.MESSAGES else None
            for partition in read if len(self._partitions) <= MAX_PARTITIONS else (None,):
                self.add(metric, 0, partition=partition, operation=operation)

    def gauge(self, metric: Metric) -> Iterator[tuple[Attributes, Numbers]]:
        for own, value in _GAUGES[metric](self):
            yield tuple((self.common | own).items()), [float(value)]


_Gauge = Callable[[Measured], Iterable[tuple[dict[str, str], float]]]


def _one(value: Callable[[Measured], float | None]) -> _Gauge:
    return lambda of: [({}, found)] if (found := value(of)) is not None else []


def _by_name(
    attribute: str, names: Iterable[str], found: Callable[[Measured], Iterable[str]]
) -> _Gauge:
    def read(of: Measured) -> Iterator[tuple[dict[str, str], float]]:
        counts = Counter(found(of))
        for name in names:  # all of them: a series that ends keeps its last value for a while
            yield {attribute: str(name)}, counts[name]

    return read


def _each(
    value: Callable[[Measured, PartitionStatus], float | None], worst: Callable[..., float] = max
) -> _Gauge:
    def read(of: Measured) -> Iterator[tuple[dict[str, str], float]]:
        found = [
            (each.partition, seen)
            for each in of.status.partitions.values()
            if each.state not in _ENDED
            and each.state is not PartitionState.WAITING
            and (seen := value(of, each)) is not None
        ]
        if len(of.status.partitions) <= MAX_PARTITIONS:
            yield from (({metrics.PARTITION: str(id)}, seen) for id, seen in found)
        elif found:
            yield {}, worst(seen for _, seen in found)

    return read


def _leases(of: Measured) -> int | None:
    instance, statuses = of.instance(), of.status.partitions.values()
    return None if instance is None else sum(each.owner == instance for each in statuses)


def _caught_up_seconds(of: Measured, each: PartitionStatus) -> float | None:
    if each.behind_seconds is not None or (began := of.status.began) is None:
        return each.behind_seconds
    return max(0.0, (datetime.now(began.tzinfo) - began).total_seconds())


_GAUGES: dict[Metric, _Gauge] = {
    metrics.BUFFERED: _one(lambda of: of.status.buffered_bytes),
    metrics.PARTITIONS: _by_name(
        metrics.STATE,
        PartitionState,
        lambda of: (each.state for each in of.status.partitions.values()),
    ),
    metrics.CAUGHT_UP: _each(lambda _, each: each.caught_up is True, min),
    metrics.CAUGHT_UP_AGE: _each(_caught_up_seconds),
    metrics.IN_FLIGHT_AGE: _each(lambda _, each: each.in_flight_seconds or 0.0),
    metrics.COMMIT_AGE: _each(lambda _, each: each.commit_age_seconds),
    metrics.LEASES: _one(_leases),
    metrics.LIVE: _one(lambda of: of.health.live),
    metrics.READY: _one(lambda of: of.health.ready),
    metrics.PROBLEMS: _by_name(
        metrics.PROBLEM, ProblemName, lambda of: (each.name for each in of.health.problems)
    ),
}


class Meters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[Measured, ...] = ()
        self._ended: dict[Metric, dict[Attributes, Numbers]] = {}

    def attach(self, measured: Measured) -> None:
        with self._lock:
            self._open = (*self._open, measured)

    def detach(self, measured: Measured) -> None:
        with self._lock:
            if measured in self._open:
                self._open = tuple(each for each in self._open if each is not measured)
                for series in measured.series.values():
                    _add(self._ended.setdefault(series.metric, {}), series)

    def read(self, metric: Metric) -> dict[Attributes, Numbers]:
        """To be called by any thread. Consumers with the same attributes have one series."""
        for each in self._open:
            each.refresh()
        with self._lock:
            if metric.kind is Kind.GAUGE:
                return dict(value for each in self._open for value in each.gauge(metric))
            found = dict(self._ended.get(metric, {}))
            for each in self._open:
                for series in each.series.copy().values():  # the event loop may add one meanwhile
                    if series.metric is metric:
                        _add(found, series)
            return found

    def record(self, metric: Metric, seconds: float, attributes: dict[str, str]) -> None: ...


def _add(to: dict[Attributes, Numbers], series: Series) -> None:
    attributes, numbers = tuple(series.attributes.items()), series.numbers
    before = to.get(attributes)
    to[attributes] = [a + b for a, b in zip(before, numbers, strict=True)] if before else [*numbers]


class Instruments(Meters):
    """The instruments of a meter of OpenTelemetry, which all observed consumers share.

    OpenTelemetry keeps the callbacks of the first instrument of a name, and ignores those of a
    second one. So there is one set of instruments for each meter, and consumers come and go.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._histograms: dict[Metric, api.Histogram] = {}
        for metric in metrics.METRICS:
            named: Any = {"unit": metric.unit, "description": metric.description}
            if metric.kind is Kind.HISTOGRAM:
                self._histograms[metric] = meter.create_histogram(
                    metric.name, **named, explicit_bucket_boundaries_advisory=BUCKETS
                )
            elif metric.kind is Kind.COUNTER:
                observed = [partial(self._values, metric)]
                meter.create_observable_counter(metric.name, observed, **named)
            else:
                observed = [partial(self._values, metric)]
                meter.create_observable_gauge(metric.name, observed, **named)

    def record(self, metric: Metric, seconds: float, attributes: dict[str, str]) -> None:
        self._histograms[metric].record(seconds, attributes)

    def _values(self, metric: Metric, _: CallbackOptions) -> Iterator[Value]:
        for attributes, numbers in self.read(metric).items():
            yield Value(numbers[0], dict(attributes))


_all: WeakKeyDictionary[Meter, Instruments] = WeakKeyDictionary()


def instruments_of(meter: Meter | None) -> Instruments:
    meter = _global_meter() if meter is None else meter
    if meter not in _all:
        _all[meter] = Instruments(meter)
    return _all[meter]


@cache
def _global_meter() -> Meter:
    # Always the same one. Before an application has set its provider, each call returns another
    # proxy, whose instruments would be the second ones of their names.
    return api.get_meter(SCOPE)
