"""What Prometheus gets of a consumer: every metric, from OpenTelemetry's own exporter."""

from __future__ import annotations

import anyio
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from feedapi_client import Batch, FeedConsumer, Quarantine, Retry, Share
from feedapi_client.telemetry import METRICS, observe
from feedapi_client.testing import Publisher
from tests.consumer.helpers import limits
from tests.testing.virtual_time import asgi_client


def exported() -> dict[str, set[str]]:
    """The names of the series of an eventful consumer, and the labels of each."""
    return anyio.run(_exported)


async def _exported() -> dict[str, set[str]]:
    publisher = Publisher(1)
    publisher.extend(0, [{"n": n} for n in range(4)])
    publisher.fail(503)
    reader = PrometheusMetricReader(disable_target_info=True)
    provider = MeterProvider([reader])
    try:
        async with (
            asgi_client(publisher) as http,
            FeedConsumer("http://feed/feed", http=http, limits=limits(), share=Share()) as consumer,
            anyio.create_task_group() as tasks,
        ):

            async def refuse_one(batch: Batch) -> None:
                if any(event.json()["n"] == 2 for event in batch.events):
                    raise ValueError("not this one")

            async def consume() -> None:
                policy = Retry(attempts=2, base_delay=0.001, max_delay=0.002, then=Quarantine())
                await consumer.run(refuse_one, on_failure=policy)

            with observe(consumer, provider.get_meter("test")), anyio.fail_after(60):
                tasks.start_soon(consume)
                names = [metric.name.replace(".", "_") for metric in METRICS]
                while True:
                    found = _families()
                    if all(any(each.startswith(name) for each in found) for name in names):
                        break
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
    finally:
        provider.shutdown()
    return found


def _families() -> dict[str, set[str]]:
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        if not family.name.startswith(("feedapi", "messaging")):
            continue
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series
