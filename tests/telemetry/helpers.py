"""What the tests of the telemetry share: a meter and a tracer in memory, and observed consumers."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from feedapi_client import Batch, FeedConsumer, Quarantine, Retry, Share
from feedapi_client.telemetry import Observation, observe
from feedapi_client.testing import Publisher
from tests.consumer.helpers import SAFETY_LIMIT, limits
from tests.testing.virtual_time import asgi_client

FEED = "http://feed/feed"
QUICK = Retry(attempts=2, base_delay=0.001, max_delay=0.002)


def feed(events: int, partitions: int = 1, **settings: Any) -> Publisher:
    publisher = Publisher(partitions, **settings)
    for partition in range(partitions):
        publisher.extend(partition, [{"n": n} for n in range(events)])
    return publisher


async def nothing(_: Batch) -> None:
    """Handle a batch."""


class Exported:
    """A meter and a tracer in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meter = MeterProvider([self.reader]).get_meter("test")
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = tracers.get_tracer("test")

    @asynccontextmanager
    async def observing(
        self, publisher: Publisher, url: str = FEED, **options: Any
    ) -> AsyncIterator[tuple[FeedConsumer, Observation]]:
        """An open consumer of a publisher, which is observed during the block."""
        async with (
            asgi_client(publisher) as http,
            FeedConsumer(url, **{"http": http, "follow": False, **options}) as consumer,
        ):
            with observe(consumer, self.meter, self.tracer) as observed:
                yield consumer, observed

    def _metrics(self) -> list[Any]:
        data = self.reader.get_metrics_data()
        return [
            metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]

    def points(self, name: str, **attributes: Any) -> list[Any]:
        """The points of a metric with these attributes, dots written as two underscores."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [
            point
            for metric in self._metrics()
            for point in metric.data.data_points
            if metric.name == name and wanted.items() <= dict(point.attributes or {}).items()
        ]

    def values(self, name: str, **attributes: Any) -> list[float]:
        return [point.value for point in self.points(name, **attributes)]

    def names(self) -> set[str]:
        return {metric.name for metric in self._metrics()}

    def spans(self, kind: str = "") -> list[ReadableSpan]:
        """The spans that have ended."""
        return [span for span in self._spans.get_finished_spans() if span.name.startswith(kind)]

    def kinds(self) -> collections.Counter[str]:
        return collections.Counter(kind_of(span) for span in self.spans())

    def text(self) -> str:
        """All that is exported."""
        return f"{self.reader.get_metrics_data()} {[span.to_json() for span in self.spans()]}"


def kind_of(span: ReadableSpan) -> str:
    return span.name.split(" ")[0]


async def eventful(meter: Meter, is_complete: Callable[[], bool]) -> None:
    """Consume a feed on which much happens, until what is exported of it is complete."""
    publisher = feed(4)
    publisher.fail(503)

    async def refuse_one(batch: Batch) -> None:
        if any(event.json()["n"] == 2 for event in batch.events):
            raise ValueError("not this one")

    policy = Retry(attempts=2, base_delay=0.001, max_delay=0.002, then=Quarantine())
    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, limits=limits(), share=Share()) as consumer,
        anyio.create_task_group() as tasks,
    ):
        with observe(consumer, meter), anyio.fail_after(SAFETY_LIMIT):
            tasks.start_soon(lambda: consumer.run(refuse_one, on_failure=policy))
            while not is_complete():  # noqa: ASYNC110 - any condition
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
