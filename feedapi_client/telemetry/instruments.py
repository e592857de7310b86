"""The instruments of one meter, which all observed consumers share.

OpenTelemetry keeps the callbacks of the first instrument of a name, and ignores those of a second
one. So there is one set of instruments for each meter, and consumers come and go.

Counters are plain numbers, which are read when they are exported. A measurement takes
OpenTelemetry's SDK about 100,000 instructions (1.45, callgrind): 60,000 with one attribute, and
9,000 for each further one. Adding to a number takes none of them, and counters are added to with
every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Meter
from opentelemetry.metrics import Observation as Value

from feedapi_client.telemetry.gauges import READS, Gauges, read_all
from feedapi_client.telemetry.metrics import METRICS, Kind, Metric

SCOPE = "feedapi_client"
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 60.0, 300.0),
)
"""In seconds, as the conventions of messaging systems advise, and two more for slow handlers."""
_Labels = frozenset[tuple[str, Any]]
Key = tuple[str, int | None, str | None]
"""Name of the metric, partition and type of the error."""
_all: WeakKeyDictionary[Meter, Instruments] = WeakKeyDictionary()


class Count:
    """One series of a counter.

    Attributes:
        attributes: those of the series.
        value: only ever increased, in the event loop of its consumer.
    """

    __slots__ = ("attributes", "metric", "value")

    def __init__(self, metric: Metric, attributes: dict[str, Any]) -> None:
        self.metric = metric
        self.attributes = attributes
        self.value: float = 0


Counts = dict[Key, Count]
"""The counters of one consumer."""


class Totals:
    """The counters of any number of consumers, of those too that are observed no more.

    Concurrency: `read` may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Counts] = []
        self._ended: dict[Metric, dict[_Labels, float]] = {}

    def open(self) -> Counts:
        """Return the counters of one more consumer, all at 0."""
        counts: Counts = {}
        with self._lock:
            self._open.append(counts)
        return counts

    def close(self, counts: Counts) -> None:
        """Keep the values of counters to which nothing is added any more. May be called again."""
        with self._lock:
            before = len(self._open)
            self._open = [each for each in self._open if each is not counts]
            if len(self._open) < before:
                for count in counts.values():
                    _add(self._ended.setdefault(count.metric, {}), count)

    def read(self, metric: Metric) -> Iterator[Value]:
        """The values of one counter. Two consumers with the same attributes have one series."""
        with self._lock:
            totals = dict(self._ended.get(metric, ()))
            for counts in self._open:
                for count in list(counts.values()):  # a copy: the event loop may add one meanwhile
                    if count.metric is metric:
                        _add(totals, count)
        for labels, value in totals.items():
            yield Value(value, dict(labels))


def _add(totals: dict[_Labels, float], count: Count) -> None:
    labels = frozenset(count.attributes.items())
    totals[labels] = totals.get(labels, 0) + count.value


class HistogramLike(Protocol):
    """What durations are recorded with: an instrument of a meter, or something cheaper."""

    def record(self, amount: float, attributes: dict[str, Any], /) -> None:
        """Add a duration in seconds. The same series always comes with the same dictionary."""
        ...


class Sink:
    """What observations write to: one for each way to export.

    Attributes:
        gauges: the consumers whose gauges are read, by the observation.
        totals: the counters of the consumers.
    """

    def __init__(self) -> None:
        self.gauges: dict[int, Gauges] = {}
        self.totals = Totals()

    def read(self, metric: Metric) -> Iterator[Value]:
        """Return the values of a counter or gauge."""
        if metric.kind is Kind.COUNTER:
            for each in list(self.gauges.values()):
                each.refresh()  # counters of partitions that are new begin at 0
            return self.totals.read(metric)
        return read_all(READS[metric], self.gauges.values())

    def __getitem__(self, metric: Metric) -> HistogramLike:
        """Return what records a histogram."""
        raise NotImplementedError


class Instruments(Sink):
    """The instruments of a meter, and the consumers that they read."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._made = {metric: self._make(meter, metric) for metric in METRICS}

    def _make(self, meter: Meter, metric: Metric) -> Any:
        named = {"unit": metric.unit, "description": metric.description}
        if metric.kind is Kind.HISTOGRAM:
            return meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=BUCKETS,
            )
        callback = partial(self._read, metric)
        if metric.kind is Kind.COUNTER:
            return meter.create_observable_counter(metric.name, [callback], **named)
        return meter.create_observable_gauge(metric.name, [callback], **named)

    def _read(self, metric: Metric, _: CallbackOptions) -> Iterator[Value]:
        return self.read(metric)

    def __getitem__(self, metric: Metric) -> HistogramLike:
        made: HistogramLike = self._made[metric]
        return made


def instruments_of(meter: Meter | None) -> Instruments:
    """Return the instruments of a meter; of the global provider's without one."""
    meter = _global_meter() if meter is None else meter
    if meter not in _all:
        _all[meter] = Instruments(meter)
    return _all[meter]


@cache
def _global_meter() -> Meter:
    # Always the same one. Before an application has set its provider, each call returns another
    # proxy, whose instruments would be the second ones of their names.
    return api.get_meter(SCOPE)
