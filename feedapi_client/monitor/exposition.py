"""What `feedapi_client.telemetry` measures of consumers as text of Prometheus.

It is the same as with OpenTelemetry's SDK and its exporter: names, labels, units, buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.snapshots import Snapshot
from feedapi_client.status import ConsumerStatus, Health
from feedapi_client.telemetry import METRICS, Metric, Observation
from feedapi_client.telemetry.meters import BUCKETS, Attributes, Meters, Numbers
from feedapi_client.telemetry.metrics import Kind

_UNITS = {"s": "seconds", "By": "bytes"}
"""Those that become a part of the name. Others are no units: ``{event}``, ``1``."""
_BOUNDS = [*map(str, BUCKETS), "+Inf"]
_FAMILIES: dict[Kind, type[CounterMetricFamily | GaugeMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
}


class Exposition(Meters, Collector):
    """Observes consumers, in a registry of its own: nothing of the process is shared with it."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        super().__init__()
        self._snapshots: Sequence[Snapshot] = []
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        # Traces go where the application sends them, and not from here once more.
        self._observations = [
            Observation(consumer, self, NoOpTracer(), partial(self._look, number))
            for number, consumer in enumerate(consumers)
        ]

    def render(self, accept: str, snapshots: Sequence[Snapshot]) -> bytes:
        self._snapshots = snapshots
        encode, _ = choose_encoder(accept)
        return encode(self._registry)

    def close(self) -> None:
        for observation in self._observations:
            observation.close()

    def describe(self) -> list[Family]:
        return []  # so that registering reads no consumer

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if found := self.read(metric):
                yield _family(metric, found)

    def _look(self, number: int) -> tuple[ConsumerStatus, Health]:
        return self._snapshots[number].status, self._snapshots[number].health


def _family(metric: Metric, found: dict[Attributes, Numbers]) -> Family:
    # The attributes that any series has. Those that one does not have are empty there.
    names = sorted({name for attributes in found for name, _ in attributes})
    described = _name(metric.name), metric.description
    labels, unit = [_name(name) for name in names], _UNITS.get(metric.unit, "")
    if metric.kind is Kind.HISTOGRAM:
        durations = HistogramMetricFamily(*described, labels=labels, unit=unit)
        for attributes, (total, *counts) in found.items():
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            durations.add_metric(_values(attributes, names), buckets, total)
        return durations
    family = _FAMILIES[metric.kind](*described, labels=labels, unit=unit)
    for attributes, numbers in found.items():
        family.add_metric(_values(attributes, names), numbers[0])
    return family


def _name(attribute: str) -> str:
    return attribute.replace(".", "_")


def _values(attributes: Attributes, names: Sequence[str]) -> list[str]:
    given = dict(attributes)
    return [given.get(name, "") for name in names]
