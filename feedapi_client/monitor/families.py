"""The metrics of `feedapi_client.telemetry` as families of Prometheus, without OpenTelemetry's SDK.

Recording a duration takes the SDK about 100,000 instructions (1.45, callgrind), twice a batch;
prometheus_client takes a tenth of that. What is exported is the same as with the SDK and its
exporter for Prometheus: names, labels, units, buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from feedapi_client.consumer import FeedConsumer
from feedapi_client.telemetry import Observation
from feedapi_client.telemetry.instruments import BUCKETS, Sink
from feedapi_client.telemetry.metrics import (
    DESTINATION,
    ERROR,
    GROUP,
    METRICS,
    OPERATION,
    OPERATION_TYPE,
    SYSTEM,
    Kind,
    Metric,
)

_LABELS = (SYSTEM, DESTINATION, GROUP, ERROR, OPERATION, OPERATION_TYPE)
_UNITS = {"s": "seconds", "By": "bytes"}
"""Those that become a part of the name. Others are no units: ``{event}``, ``1``."""
_FAMILIES: dict[Kind, type[CounterMetricFamily | GaugeMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
}


class Durations:
    """A histogram that finds the series of a set of attributes by its identity."""

    def __init__(self, metric: Metric) -> None:
        names = [_name(label) for label in _LABELS]
        self._histogram = Histogram(
            *(_name(metric.name), metric.description, names),
            unit=_UNITS.get(metric.unit, ""),
            registry=None,
            buckets=BUCKETS,
        )
        # An observation builds the attributes once for each series. They are kept, so that no
        # others get their identity.
        self._series: dict[int, tuple[dict[str, Any], Histogram]] = {}

    def record(self, amount: float, attributes: dict[str, Any], /) -> None:
        """See `feedapi_client.telemetry.instruments.HistogramLike`."""
        found = self._series.get(id(attributes))
        if found is None:
            series = self._histogram.labels(*_values(attributes, _LABELS))
            found = self._series[id(attributes)] = attributes, series
        found[1].observe(amount)

    def family(self) -> Family:
        """Return what is exported, with the labels that any series has."""
        (family,) = self._histogram.collect()
        samples = [each for each in family.samples if not each.name.endswith("_created")]
        used = {name for each in samples for name, value in each.labels.items() if value}
        family.samples = [
            each._replace(labels={name: each.labels[name] for name in each.labels if name in used})
            for each in samples
        ]
        return family


class Families(Sink, Collector):
    """Takes what is measured of consumers, and gives it to a registry of Prometheus.

    Concurrency: to be read in the event loop of the consumers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._histograms = {
            metric: Durations(metric) for metric in METRICS if metric.kind is Kind.HISTOGRAM
        }

    def __getitem__(self, metric: Metric) -> Durations:
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
        if metric.kind is Kind.HISTOGRAM:
            return self._histograms[metric].family()
        # Two consumers with the same attributes have one series. Prometheus refuses two of them.
        values = {
            frozenset((each.attributes or {}).items()): each.value for each in self.read(metric)
        }
        labels = _labels([dict(attributes) for attributes in values])
        family = _FAMILIES[metric.kind](
            _name(metric.name),
            metric.description,
            labels=[_name(label) for label in labels],
            unit=_UNITS.get(metric.unit, ""),
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


class Metrics:
    """Observes consumers, in a registry of its own: nothing of the process is shared with it."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        families = Families()
        self._registry.register(families)
        # Traces go where the application sends them, and not from here once more.
        self._observations = [Observation(each, families, NoOpTracer()) for each in consumers]

    def media_type(self, accept: str) -> str:
        """Return the media type that an ``Accept`` header wishes: one of a few."""
        return choose_encoder(accept)[1]

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their media type, as an ``Accept`` header wishes.

        To be called in the event loop of the consumers.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def close(self) -> None:
        """Stop observing."""
        for observation in self._observations:
            observation.close()
