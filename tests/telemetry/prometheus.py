"""What Prometheus gets of a consumer: every metric, from OpenTelemetry's own exporter."""

from __future__ import annotations

import anyio
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from feedapi_client.telemetry import METRICS
from tests.telemetry.helpers import eventful


def exported() -> dict[str, set[str]]:
    """The names of the series of an eventful consumer, and the labels of each."""
    names = [metric.name.replace(".", "_") for metric in METRICS]
    provider = MeterProvider([PrometheusMetricReader(disable_target_info=True)])
    series: dict[str, set[str]] = {}

    def is_complete() -> bool:
        series.update(_series())
        return all(any(each.startswith(name) for each in series) for name in names)

    try:
        anyio.run(eventful, provider.get_meter("test"), is_complete)
    finally:
        provider.shutdown()
    return series


def _series() -> dict[str, set[str]]:
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        if family.name.startswith(("feedapi", "messaging")):
            for sample in family.samples:
                series.setdefault(sample.name, set()).update(sample.labels)
    return series
