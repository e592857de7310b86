"""The metrics of `feedapi_client.telemetry` as families of Prometheus, without OpenTelemetry's SDK.

Recording a duration takes the SDK 90,000 to 100,000 instructions (1.45, callgrind), three times a
batch; here it takes a hundredth of that. What is exported is the same as with the SDK and its
exporter for Prometheus: names, labels, units, buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from feedapi_client.telemetry.instruments import BUCKETS, Sink
from feedapi_client.telemetry.metrics import METRICS, Kind, Metric

_BOUNDS = (*map(str, BUCKETS), "+Inf")
_UNITS = {"s": "seconds", "By": "bytes"}
"""Those that become a part of the name. Others are no units: ``{event}``, ``1``."""
_FAMILIES: dict[Kind, type[CounterMetricFamily | GaugeMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
}
_Labels = frozenset[tuple[str, str]]


class _Series:
    """The durations of one set of attributes."""

    __slots__ = ("attributes", "counts", "sum")

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes
        self.counts = [0] * len(_BOUNDS)
        self.sum = 0.0

    def add(self, other: _Series) -> None:
        """Add the durations of another series."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum += other.sum


class Histogram:
    """A histogram of durations. A series that comes from two consumers is exported as one."""

    def __init__(self) -> None:
        # By the identity of the attributes, which an observation builds once for each series.
        self._series: dict[int, _Series] = {}

    def record(self, amount: float, attributes: dict[str, Any], /) -> None:
        """See `feedapi_client.telemetry.instruments.HistogramLike`."""
        series = self._series.get(id(attributes))
        if series is None:
            series = self._series[id(attributes)] = _Series(attributes)
        series.counts[bisect_left(BUCKETS, amount)] += 1
        series.sum += amount

    def read(self) -> list[_Series]:
        """Return the series, each set of attributes once."""
        merged: dict[_Labels, _Series] = {}
        for series in self._series.values():
            labels = frozenset(series.attributes.items())
            merged.setdefault(labels, _Series(series.attributes)).add(series)
        return list(merged.values())


class Families(Sink, Collector):
    """Takes what is measured of consumers, and gives it to a registry of Prometheus.

    Concurrency: to be read in the event loop of the consumers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._histograms = {
            metric: Histogram() for metric in METRICS if metric.kind is Kind.HISTOGRAM
        }

    def __getitem__(self, metric: Metric) -> Histogram:
        return self._histograms[metric]

    def describe(self) -> list[Family]:
        """Nothing, so that registering reads no consumer."""
        return []

    def collect(self) -> Iterator[Family]:
        """Return the families of all metrics that have a value."""
        for metric in METRICS:
            family = self._family(metric)
            if family.samples:
                yield family

    def _family(self, metric: Metric) -> Family:
        name, unit = metric.name.replace(".", "_"), _UNITS.get(metric.unit, "")
        if metric.kind is Kind.HISTOGRAM:
            series = self._histograms[metric].read()
            labels = _labels([each.attributes for each in series])
            durations = HistogramMetricFamily(
                name, metric.description, labels=[_name(label) for label in labels], unit=unit
            )
            for each in series:
                buckets = list(zip(_BOUNDS, accumulate(each.counts), strict=True))
                durations.add_metric(_values(each.attributes, labels), buckets, each.sum)
            return durations
        # Two consumers with the same attributes have one series. Prometheus refuses two of them.
        values = {
            frozenset((each.attributes or {}).items()): each.value for each in self.read(metric)
        }
        labels = _labels([dict(attributes) for attributes in values])
        family = _FAMILIES[metric.kind](
            name, metric.description, labels=[_name(label) for label in labels], unit=unit
        )
        for attributes, value in values.items():
            family.add_metric(_values(dict(attributes), labels), value)
        return family


def _labels(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the attributes that any series has. Those that one does not have are empty there."""
    return sorted({name for attributes in series for name in attributes})


def _name(attribute: str) -> str:
    return attribute.replace(".", "_")


def _values(attributes: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    return [str(attributes.get(label, "")) for label in labels]
