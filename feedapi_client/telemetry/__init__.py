"""Metrics and traces by OpenTelemetry (extra ``telemetry``): ``with observe(consumer):``.

Names and attributes follow OpenTelemetry's conventions for messaging systems where these have a
name, and begin with ``feedapi.consumer.`` elsewhere. `METRICS` lists all metrics. No attribute
holds a cursor, a payload, a credential or a query.
"""

from __future__ import annotations

try:
    import opentelemetry.metrics  # noqa: F401
except ImportError as error:
    raise ImportError(
        "feedapi_client.telemetry needs an extra: pip install 'feedapi-client[telemetry]'"
    ) from error

from feedapi_client.telemetry.metrics import METRICS, Metric
from feedapi_client.telemetry.observation import Observation, observe

__all__ = ["METRICS", "Metric", "Observation", "observe"]
