"""What a monitor exports is what OpenTelemetry's SDK and its exporter for Prometheus export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from feedapi_client import Batch, FeedConsumer, Retry, Share
from feedapi_client.monitor import Monitor
from feedapi_client.monitor.exposition import Exposition
from feedapi_client.monitor.snapshots import take_snapshots
from feedapi_client.notifications import (
    BatchCommitted,
    BatchDelivered,
    BatchReleased,
    CommitFailed,
    DiscoveryEnded,
    EventQuarantined,
    EventsPassedOver,
    FetchEnded,
    FetchRetried,
    HandlerFailed,
    HandlerRetried,
)
from feedapi_client.telemetry import METRICS, observe
from feedapi_client.telemetry.meters import BUCKETS
from tests.consumer.helpers import read
from tests.telemetry.helpers import feed
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio
DURATIONS = (0, 0.004, *BUCKETS, 0.3, 299, 301, 1e6)


def families(text: bytes) -> dict[str, Any]:
    """All that Prometheus gets of each family. Ages go on from one look to the next."""
    return {
        family.name: (
            family.type,
            family.documentation,
            family.unit,
            sorted(
                (sample.name, sorted(sample.labels.items()), sample.value)
                for sample in family.samples
                if not family.name.endswith("age_seconds")
            ),
        )
        for family in text_string_to_metric_families(text.decode())
        if not family.name.startswith("process_")
    }


class Both:
    """Consumers that are observed by the monitor's way and by OpenTelemetry's SDK."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        self.consumers = consumers
        self._ours, self._theirs = Exposition(consumers), CollectorRegistry()
        reader = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._theirs
        )
        meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
        self._observed = [observe(each, meter) for each in consumers]

    def exposed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        ours = self._ours.render("", take_snapshots(self.consumers))
        return families(ours), families(generate_latest(self._theirs))

    def told(self, happened: Any, cause: BaseException | None = None) -> None:
        for consumer in self.consumers:
            consumer._listeners.tell(happened, cause)

    def close(self) -> None:
        for observation in (self._ours, *self._observed):
            observation.close()


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "a"]])
async def test_names_labels_units_buckets_and_values_are_those_of_the_sdk(names: list[str]) -> None:
    async with asgi_client(feed(1)) as http:
        consumers = [
            FeedConsumer("http://feed/feed", name=name, http=http, share=Share()) for name in names
        ]
        both = Both(consumers)
        async with consumers[0]:
            for partition in (0, 1):
                for n, seconds in enumerate(DURATIONS):
                    error = LookupError() if n % 3 == 0 else None
                    both.told(BatchReleased(partition, seconds), error)
                    both.told(FetchEnded(partition, seconds, None), error)
                    committed = CommitFailed if error else BatchCommitted
                    both.told(committed(partition, seconds), error)
                    both.told(DiscoveryEnded(seconds, None), error)
                both.told(HandlerFailed(partition, "ValueError"), ValueError())
                both.told(HandlerRetried(partition), ValueError())
                both.told(FetchRetried(partition), LookupError())
                both.told(EventQuarantined(partition, "KeyError"))
                both.told(EventsPassedOver(partition, 3))
            both.told(BatchDelivered(0, 2))
            ours, theirs = both.exposed()
            assert ours == theirs
            # Ages of partitions need an iteration; everything else is there.
            assert len(ours) >= len(METRICS) - 4
        both.close()
        closed, _ = both.exposed()
        counters = {name: each for name, each in closed.items() if each[0] != "gauge"}
        assert counters == {name: each for name, each in ours.items() if each[0] != "gauge"}
        assert len(closed) == len(counters), "gauges end with the observation"


async def test_a_consumer_that_has_read_its_feed_shows_the_same_in_both() -> None:
    async with (
        asgi_client(feed(7, partitions=3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        both = Both([consumer])
        await read(consumer)
        ours, theirs = both.exposed()
        both.close()
    assert ours.keys() == theirs.keys()
    for name, (kind, *rest) in ours.items():
        assert (kind, *rest[:-1]) == theirs[name][:-1]
        assert series(rest[-1]) == series(theirs[name][-1])
        if not name.endswith("_duration_seconds"):  # each observer is told of a time of its own
            assert (kind, *rest) == theirs[name]
        for samples in (rest[-1], theirs[name][-1]):
            times = ("_count", "_duration_seconds_total")
            counts = [value for sample, _, value in samples if sample.endswith(times)]
            assert all(counts)


def series(samples: list[tuple[str, list[tuple[str, str]], float]]) -> list[object]:
    return [(name, labels) for name, labels, _ in samples]


async def test_a_monitor_measures_nothing_with_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost is counted, not timed."""
    recorded: list[object] = []
    monkeypatch.setattr(Histogram, "record", lambda *arguments: recorded.append(arguments))
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        monitor = Monitor(consumer)
        await read(consumer)
        text = monitor._exposition.render("", take_snapshots([consumer]))
        monitor.close()
        assert not consumer._listeners
    assert b"messaging_process_duration_seconds_count{" in text
    assert not recorded


@pytest.mark.parametrize("partitions", [64, 300])
async def test_a_scrape_of_many_partitions_is_smaller_than_200_kilobytes(partitions: int) -> None:
    async def handle(batch: Batch) -> None:
        if batch.partition == 0:
            raise LookupError("refused")

    async with (
        asgi_client(feed(2, partitions=partitions)) as http,
        FeedConsumer("https://service.example.test/feed", http=http, follow=False) as consumer,
    ):
        exporter = Exposition([consumer])
        retry = Retry(attempts=2, base_delay=0.001, max_delay=0.002)
        with pytest.raises(LookupError):
            await consumer.run(handle, on_failure=retry)
        size = len(exporter.render("", take_snapshots([consumer])))
        exporter.close()
    assert size < 200_000
