"""The metrics of consumers in the formats of Prometheus.

They are those of `feedapi_client.telemetry`, with the names that OpenTelemetry's exporter for
Prometheus gives them, and those of the process.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.families import Families
from feedapi_client.telemetry import Observation


class Metrics:
    """Observes consumers, in a registry of its own: nothing of the process is shared with it."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        families = Families()
        self._registry.register(families)
        # Traces go where the application sends them, and not from here once more.
        self._observations = [Observation(each, families, NoOpTracer()) for each in consumers]

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
