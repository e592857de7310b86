"""What `feedapi_client.telemetry` observes."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from feedapi_client import FeedConsumer
from feedapi_client.telemetry import observe
from feedapi_client.testing import Publisher

pytestmark = pytest.mark.anyio


def readings(reader: InMemoryMetricReader) -> dict[str, list[tuple[dict[str, Any], Any]]]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {
        metric.name: [
            (dict(point.attributes or {}), point.value) for point in metric.data.data_points
        ]
        for metric in metrics
    }  # type: ignore[union-attr]


async def test_metrics_show_the_status_and_no_secret() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    publisher = Publisher(1)
    publisher.extend(0, [{"n": n} for n in range(3)])
    publisher.split(0, 1)
    async with (
        publisher.serve() as url,
        FeedConsumer(f"{url}?key=s3cret", follow=False) as consumer,
    ):
        observe(consumer, provider.get_meter("test"))
        async for _ in consumer:
            pass
        seen = readings(reader)
        common = {"feedapi.feed": url, "feedapi.consumer.name": "default"}
        assert (common | {"feedapi.partition": 0}, 3) in seen["feedapi.consumer.events"]
        assert (common | {"feedapi.partition.state": "drained"}, 1) in seen[
            "feedapi.consumer.partitions"
        ]
        assert (common | {"feedapi.partition": 1}, 1) in seen["feedapi.consumer.caught_up"]
        assert seen["feedapi.consumer.buffered"] == [(common, 0)]
        assert "s3cret" not in str(seen)
    provider.shutdown()
