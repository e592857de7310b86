"""`observe`: what is exported of any number of consumers, and until when."""

from __future__ import annotations

import collections
import logging
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import Counter, Histogram
from opentelemetry.trace import StatusCode

from feedapi_client import Batch, FeedConsumer, Share
from feedapi_client.notifications import BatchCommitted, CommitFailed, FetchEnded
from feedapi_client.telemetry import METRICS, observe
from tests.consumer.helpers import SAFETY_LIMIT, read
from tests.telemetry.helpers import FEED, QUICK, Exported, eventful, feed, kind_of, nothing
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio


@pytest.fixture
def exported() -> Exported:
    return Exported()


async def test_metrics_follow_the_conventions_and_show_no_secret(exported: Exported) -> None:
    url = "http://u:p4ss@feed/feed?key=s3cret"
    common = {
        "messaging__system": "feedapi",
        "messaging__destination__name": FEED,
        "messaging__consumer__group__name": "default",
    }
    async with exported.observing(feed(3), url) as (consumer, _):
        await consumer.run(nothing)
        one = common | {"messaging__destination__partition__id": "0"}
        assert exported.values("messaging.client.consumed.messages", **one) == [3]
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
        assert sum(exported.values("feedapi.consumer.partitions", **common)) == 1
        assert exported.values("feedapi.consumer.live", **common) == [1]
        assert "s3cret" not in exported.text()
        assert "p4ss" not in exported.text()


async def test_every_metric_of_the_table_is_exported_and_no_other(exported: Exported) -> None:
    table = {metric.name for metric in METRICS}
    await eventful(exported.meter, lambda: exported.names() == table)


async def test_the_leases_of_an_instance_are_counted(exported: Exported) -> None:
    options = {"share": Share(rebalance_seconds=0.05), "follow": True}
    async with exported.observing(feed(1, partitions=2), **options) as (consumer, _):
        assert exported.values("feedapi.consumer.leases") == [0]
        async for _event in consumer:
            break
        with anyio.fail_after(SAFETY_LIMIT):
            while exported.values("feedapi.consumer.leases") != [2]:  # noqa: ASYNC110
                await anyio.sleep(0.05)


async def test_any_number_of_consumers_share_a_meter_and_each_has_an_end(
    exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def events(name: str) -> list[float]:
        of_it = {"messaging__consumer__group__name": name}
        return exported.values("messaging.client.consumed.messages", **of_it)

    def gauges() -> list[int]:
        of = "messaging__consumer__group__name"
        return [len(exported.points("feedapi.consumer.buffered", **{of: name})) for name in "ab"]

    async with asgi_client(feed(5)) as http:
        options: dict[str, Any] = {"http": http, "follow": False}
        async with (
            FeedConsumer(FEED, name="a", **options) as first,
            FeedConsumer(FEED, name="b", **options) as second,
        ):
            with observe(first, exported.meter):
                with observe(second, exported.meter):
                    await read(first)
                    await read(second)
                    assert (events("a"), events("b")) == ([5], [5])
                    assert gauges() == [1, 1]
                assert gauges() == [1, 0]
            assert gauges() == [0, 0]
            assert not first._listeners
            assert (events("a"), events("b")) == ([5], [5]), "a counter never goes back"
    assert [each for each in caplog.records if each.name.startswith("opentelemetry")] == []


async def test_a_failing_handler_shows_in_metrics_and_spans(exported: Exported) -> None:
    secret = "Ragnhild"

    async def fail(_: Batch) -> None:
        raise LookupError(secret)

    async with exported.observing(feed(1), follow=True) as (consumer, _):
        with pytest.raises(LookupError):
            await consumer.run(fail, on_failure=QUICK)
        failed = {"error__type": "LookupError"}
        (process,) = exported.points("messaging.process.duration", **failed)
        assert process.count == 1
        for name, value in (("handler.failures", 2), ("handler.retries", 1), ("live", 0)):
            assert exported.values(f"feedapi.consumer.{name}") == [value]
        assert exported.values("feedapi.consumer.problems", feedapi__problem="failed") == [1]
        assert secret not in exported.text()
    (span,) = exported.spans("process")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "LookupError"
    assert secret not in exported.text()


# ---------------------------------------------------------------------- spans


async def test_each_batch_has_a_span_with_fetch_and_commit_below_it(exported: Exported) -> None:
    async def handle(_: Batch) -> None:
        with exported.tracer.start_as_current_span("application"):
            assert trace.get_current_span() is not None

    async with exported.observing(feed(3, partitions=2)) as (consumer, _):
        await consumer.run(handle)
    for process in exported.spans(f"process {FEED}"):
        assert process.context is not None
        below = collections.Counter(
            kind_of(span)
            for span in exported.spans()
            if span.parent is not None and span.parent.span_id == process.context.span_id
        )
        assert below == {"fetch": 1, "commit": 1, "application": 1}
        assert process.kind is trace.SpanKind.CONSUMER
        for name in ("messaging.batch.message_count", "messaging.destination.partition.id"):
            assert name in (process.attributes or {})
    assert exported.kinds().keys() == {"process", "fetch", "commit", "application"}


async def test_a_loop_over_events_has_spans_too(exported: Exported) -> None:
    async with exported.observing(feed(3)) as (consumer, _):
        await read(consumer)
    kinds = exported.kinds()
    assert kinds["process"] == kinds["fetch"] == kinds["commit"] >= 1


async def test_without_a_provider_of_traces_no_span_is_begun(exported: Exported) -> None:
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer(FEED, http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter) as observed:
            async for _ in consumer.batches():
                assert not observed._spans._open
    assert exported.points("messaging.client.consumed.messages")


async def test_two_observations_of_a_consumer_both_have_spans_around_its_handler(
    exported: Exported,
) -> None:
    second = Exported()
    current: list[trace.Span] = []

    async def handle(_: Batch) -> None:
        current.append(trace.get_current_span())

    async with exported.observing(feed(3)) as (consumer, _):
        with observe(consumer, second.meter, second.tracer):
            await consumer.run(handle)
    assert exported.kinds()["process"] == second.kinds()["process"] == len(current) > 0
    assert all(span.get_span_context().is_valid for span in current)


async def test_a_span_that_nobody_finished_ends_with_the_observation(exported: Exported) -> None:
    async with exported.observing(feed(3), follow=True) as (consumer, _):
        async for _batch in consumer.batches():
            break
        assert not exported.spans("process")
    assert exported.spans("process")


# ---------------------------------------------------------------------- durations


async def test_durations_do_not_tell_partitions_apart(exported: Exported) -> None:
    """Each series of a histogram has some twenty numbers."""
    async with exported.observing(feed(1, partitions=8)) as (consumer, _):
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
        publisher = feed(events, page_size=10_000, checkpoint_every=10_000)

        async def handle(_: Batch) -> None:
            nonlocal batches
            batches += 1

        async with Exported().observing(publisher) as (consumer, _):
            await consumer.run(handle)
        fetches = [request for request in publisher.requests if request.kind == "fetch"]
        return dict(made), batches, len(fetches)

    few, many = await measurements(10), await measurements(1000)
    assert few == many
    found, batches, fetches = many
    assert found == {"process": batches, "commit": batches, "fetch": fetches}
    assert 0 < sum(found.values()) <= 16


async def test_the_time_of_fetches_and_of_commits_is_the_sum_of_their_histogram(
    exported: Exported,
) -> None:
    """It is known of each partition also where the histogram no longer tells them apart."""
    async with exported.observing(feed(3)) as (consumer, observed):
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
            errors = [(time.attributes or {}).get("error.type") for time in times]
            assert errors == [None, "LookupError"]
