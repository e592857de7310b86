"""`observe`: what is exported of any number of consumers, and until when."""

from __future__ import annotations

import collections
import logging
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from feedapi_client import Batch, FeedConsumer, Quarantine, Retry, Share
from feedapi_client.notifications import BatchCommitted, CommitFailed, FetchEnded
from feedapi_client.telemetry import METRICS, observe
from feedapi_client.testing import Publisher
from tests.consumer.helpers import limits, read
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio
QUICK = Retry(attempts=2, base_delay=0.001, max_delay=0.002)


class Exported:
    """A meter and a tracer in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self._meters = MeterProvider([self.reader])
        self.meter = self._meters.get_meter("test")
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = tracers.get_tracer("test")

    def points(self, name: str, **attributes: Any) -> list[Any]:
        """The points of a metric with these attributes, dots written as two underscores."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if metric.name == name and wanted.items() <= dict(point.attributes or {}).items()
        ]

    def names(self) -> set[str]:
        data = self.reader.get_metrics_data()
        return {
            metric.name
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())


def feed(events: int, partitions: int = 1) -> Publisher:
    publisher = Publisher(partitions)
    for partition in range(partitions):
        publisher.extend(partition, [{"n": n} for n in range(events)])
    return publisher


async def nothing(_: Batch) -> None:
    """Handle a batch."""


async def test_metrics_follow_the_conventions_and_show_no_secret() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://u:p4ss@feed/feed?key=s3cret", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter, exported.tracer):
            await consumer.run(nothing)
            common = {
                "messaging__system": "feedapi",
                "messaging__destination__name": "http://feed/feed",
                "messaging__consumer__group__name": "default",
            }
            one = common | {"messaging__destination__partition__id": "0"}
            (messages,) = exported.points("messaging.client.consumed.messages", **one)
            assert messages.value == 3
            (process,) = exported.points("messaging.process.duration", **common)
            assert process.count >= 1
            for name, kind in (("fetch", "receive"), ("commit", "settle")):
                operation = {
                    "messaging__operation__name": name,
                    "messaging__operation__type": kind,
                }
                (duration,) = exported.points(
                    "messaging.client.operation.duration", **common, **operation
                )
                assert duration.count >= 1
            states = exported.points("feedapi.consumer.partitions", **common)
            assert sum(point.value for point in states) == 1
            assert exported.points("feedapi.consumer.live", **common)[0].value == 1
            shown = str(exported.reader.get_metrics_data()) + str(
                [span.to_json() for span in exported.spans()]
            )
            assert "s3cret" not in shown
            assert "p4ss" not in shown


async def test_every_metric_of_the_table_is_exported_and_no_other() -> None:
    exported = Exported()
    publisher = feed(4)
    publisher.fail(503)
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

        with observe(consumer, exported.meter):
            tasks.start_soon(consume)
            with anyio.fail_after(60):
                while exported.names() != {metric.name for metric in METRICS}:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


async def test_the_leases_of_an_instance_are_counted() -> None:
    exported = Exported()
    share = Share(rebalance_seconds=0.05)
    async with (
        asgi_client(feed(1, partitions=2)) as http,
        FeedConsumer("http://feed/feed", http=http, share=share) as consumer,
    ):
        with observe(consumer, exported.meter):
            assert [point.value for point in exported.points("feedapi.consumer.leases")] == [0]
            async for _ in consumer:
                break
            with anyio.fail_after(60):
                while exported.points("feedapi.consumer.leases")[0].value != 2:  # noqa: ASYNC110
                    await anyio.sleep(0.05)


async def test_any_number_of_consumers_share_a_meter_and_each_has_an_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    exported = Exported()

    def events(name: str) -> list[int]:
        attributes = {"messaging__consumer__group__name": name}
        points = exported.points("messaging.client.consumed.messages", **attributes)
        return [point.value for point in points]

    def gauges(name: str) -> int:
        attributes = {"messaging__consumer__group__name": name}
        return len(exported.points("feedapi.consumer.buffered", **attributes))

    async with asgi_client(feed(5)) as http:
        options: dict[str, Any] = {"http": http, "follow": False}
        async with (
            FeedConsumer("http://feed/feed", name="a", **options) as first,
            FeedConsumer("http://feed/feed", name="b", **options) as second,
        ):
            with observe(first, exported.meter):
                with observe(second, exported.meter):
                    await read(first)
                    await read(second)
                    assert (events("a"), events("b")) == ([5], [5])
                    assert (gauges("a"), gauges("b")) == (1, 1)
                assert (gauges("a"), gauges("b")) == (1, 0)
            assert (gauges("a"), gauges("b")) == (0, 0)
            assert not first._listeners
            assert (events("a"), events("b")) == ([5], [5]), "a counter never goes back"
    assert [each for each in caplog.records if each.name.startswith("opentelemetry")] == []


async def test_counters_go_on_over_iterations() -> None:
    exported = Exported()
    publisher = feed(2)
    async with (
        asgi_client(publisher) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            await consumer.run(nothing)
            publisher.append(0, {"n": 2})
            await consumer.run(nothing)
            (point,) = exported.points("messaging.client.consumed.messages")
            assert point.value == 3


async def test_a_failing_handler_shows_in_metrics_and_spans() -> None:
    exported = Exported()
    secret = "Ragnhild"
    async with (
        asgi_client(feed(1)) as http,
        FeedConsumer("http://feed/feed", http=http) as consumer,
    ):

        async def fail(_: Batch) -> None:
            raise LookupError(secret)

        with observe(consumer, exported.meter, exported.tracer):
            with pytest.raises(LookupError):
                await consumer.run(fail, on_failure=QUICK)
            failed = {"error__type": "LookupError"}
            (failures,) = exported.points("feedapi.consumer.handler.failures")
            (retries,) = exported.points("feedapi.consumer.handler.retries")
            (process,) = exported.points("messaging.process.duration", **failed)
            assert (failures.value, retries.value, process.count) == (2, 1, 1)
            (problem,) = exported.points("feedapi.consumer.problems", feedapi__problem="failed")
            assert problem.value == 1
            assert exported.points("feedapi.consumer.live")[0].value == 0
            assert secret not in str(exported.reader.get_metrics_data())
    (span,) = [span for span in exported.spans() if span.name.startswith("process")]
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "LookupError"
    assert secret not in str([span.to_json() for span in exported.spans()])


async def test_each_batch_has_a_span_with_fetch_and_commit_below_it() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3, partitions=2)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):

        async def handle(batch: Batch) -> None:
            with exported.tracer.start_as_current_span("application"):
                assert trace.get_current_span() is not None

        with observe(consumer, exported.meter, exported.tracer):
            await consumer.run(handle)
    spans = exported.spans()
    for process in [span for span in spans if span.name == "process http://feed/feed"]:
        assert process.context is not None
        below = collections.Counter(
            span.name.split(" ")[0]
            for span in spans
            if span.parent is not None and span.parent.span_id == process.context.span_id
        )
        assert below == {"fetch": 1, "commit": 1, "application": 1}
        assert process.kind is trace.SpanKind.CONSUMER
        for name in ("messaging.batch.message_count", "messaging.destination.partition.id"):
            assert name in (process.attributes or {})
    assert {span.name.split(" ")[0] for span in spans} == {
        "process",
        "fetch",
        "commit",
        "application",
    }


async def test_a_loop_over_events_has_spans_too() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter, exported.tracer):
            await read(consumer)
    kinds = collections.Counter(span.name.split(" ")[0] for span in exported.spans())
    assert kinds["process"] == kinds["fetch"] == kinds["commit"] >= 1


async def test_without_a_provider_of_traces_no_span_is_begun() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter) as observed:
            async for _ in consumer.batches():
                assert not observed._spans._open
    assert exported.points("messaging.client.consumed.messages")


async def test_two_observations_of_a_consumer_both_have_spans_around_its_handler() -> None:
    first, second = Exported(), Exported()
    current: list[trace.Span] = []

    async def handle(_: Batch) -> None:
        current.append(trace.get_current_span())

    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with (
            observe(consumer, first.meter, first.tracer),
            observe(consumer, second.meter, second.tracer),
        ):
            await consumer.run(handle)
    names = [[span.name.split(" ")[0] for span in each.spans()] for each in (first, second)]
    assert names[0].count("process") == names[1].count("process") == len(current) > 0
    assert all(span.get_span_context().is_valid for span in current)


async def test_a_span_that_nobody_finished_ends_with_the_observation() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http) as consumer,
    ):
        with observe(consumer, exported.meter, exported.tracer):
            async for _ in consumer.batches():
                break
            assert not [span for span in exported.spans() if span.name.startswith("process")]
    assert [span for span in exported.spans() if span.name.startswith("process")]


async def test_durations_do_not_tell_partitions_apart() -> None:
    """Each series of a histogram has some twenty numbers."""
    exported = Exported()
    async with (
        asgi_client(feed(1, partitions=8)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            await consumer.run(nothing)
            for name in ("messaging.process", "feedapi.consumer.fetch", "feedapi.consumer.commit"):
                (point,) = exported.points(f"{name}.duration")
                assert "messaging.destination.partition.id" not in (point.attributes or {})
            assert len(exported.points("messaging.client.operation.duration")) == 2
            assert len(exported.points("messaging.client.consumed.messages")) == 8


async def test_observing_costs_a_few_calls_for_a_batch_and_none_for_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost is counted, not timed: 10 events and 1,000 make the same number of measurements."""
    made: collections.Counter[str] = collections.Counter()

    def counting(_: object, __: float, attributes: dict[str, str]) -> None:
        made[attributes["messaging.operation.name"]] += 1

    monkeypatch.setattr(Histogram, "record", counting)
    monkeypatch.setattr(Counter, "add", counting)

    async def measurements(events: int) -> tuple[dict[str, int], int, int]:
        made.clear()
        batches = 0
        exported = Exported()
        publisher = Publisher(1, page_size=10_000, checkpoint_every=10_000)
        publisher.extend(0, [{"n": n} for n in range(events)])

        async def handle(_: Batch) -> None:
            nonlocal batches
            batches += 1

        async with (
            asgi_client(publisher) as http,
            FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
        ):
            with observe(consumer, exported.meter):
                await consumer.run(handle)
        fetches = [request for request in publisher.requests if request.kind == "fetch"]
        return dict(made), batches, len(fetches)

    few, many = await measurements(10), await measurements(1000)
    assert few == many
    found, batches, fetches = many
    assert found == {"process": batches, "commit": batches, "fetch": fetches}
    assert 0 < sum(found.values()) <= 16


async def test_the_time_of_fetches_and_of_commits_is_the_sum_of_their_histogram() -> None:
    """It is known of each partition also where the histogram no longer tells them apart."""
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter) as observed:
            await consumer.run(nothing)
            observed.told(FetchEnded(0, 0.25, None), None)
            observed.told(FetchEnded(0, 4.0, "LookupError"), LookupError())
            observed.told(BatchCommitted(0, 0.5), None)
            observed.told(CommitFailed(0, 2.0), LookupError())
            for operation in ("fetch", "commit"):
                times = exported.points(f"feedapi.consumer.{operation}.duration")
                histograms = exported.points(
                    "messaging.client.operation.duration", messaging__operation__name=operation
                )
                assert [time.value for time in times] == [each.sum for each in histograms]
                assert [each.count > 1 for each in histograms] == [True, False]
                assert [(time.attributes or {}).get("error.type") for time in times] == [
                    None,
                    "LookupError",
                ]
