"""Counters are plain integers until somebody collects them: they say what happened, once."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import Counter, MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader

from feedapi_client import ConsumerStatus, FeedConsumer, Health
from feedapi_client.notifications import HandlerFailed
from feedapi_client.telemetry import METRICS, meters, metrics, observe
from feedapi_client.telemetry.meters import Measured, Meters
from feedapi_client.telemetry.metrics import Kind
from feedapi_client.testing import Publisher
from tests.consumer.helpers import read
from tests.telemetry.test_observe import Exported, feed, nothing
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio
MESSAGES = metrics.MESSAGES.name


def values(exported: Exported, name: str = MESSAGES, **attributes: Any) -> list[float]:
    return [point.value for point in exported.points(name, **attributes)]


async def test_nothing_is_measured_for_a_counter_until_it_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = Exported()
    added: list[object] = []
    monkeypatch.setattr(Counter, "add", lambda *arguments: added.append(arguments))
    async with (
        asgi_client(feed(3, partitions=2)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            await consumer.run(nothing)
            assert not added
            assert values(exported) == [3, 3]


async def test_a_counter_is_as_high_as_what_was_delivered_at_any_moment() -> None:
    exported = Exported()
    publisher = Publisher(1, page_size=4, checkpoint_every=2)
    publisher.extend(0, [{"n": n} for n in range(20)])
    async with (
        asgi_client(publisher) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            assert values(exported) == [0], "a series begins before its first event"
            delivered = 0
            async for batch in consumer.batches():
                delivered += len(batch.events)
                assert sum(values(exported)) == delivered
                await batch.commit()
    assert delivered == 20
    assert values(exported) == [20]


async def test_a_collection_does_not_take_the_value_away() -> None:
    exported = Exported()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            await read(consumer)
            assert [values(exported) for _ in range(3)] == [[3]] * 3


async def test_a_reader_that_asks_for_differences_gets_each_event_once() -> None:
    delta = AggregationTemporality.DELTA
    reader = InMemoryMetricReader({Counter: delta, ObservableCounter: delta})
    meter = MeterProvider([reader]).get_meter("test")
    found: list[float] = []

    def collect() -> None:
        data = reader.get_metrics_data()
        for resource in data.resource_metrics if data else []:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == MESSAGES:
                        found.extend([vars(point)["value"] for point in metric.data.data_points])

    publisher = feed(3)
    async with (
        asgi_client(publisher) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, meter):
            await read(consumer)
            collect()
            publisher.append(0, {"n": 3})
            await read(consumer)
            collect()
        collect()
    assert [value for value in found if value] == [3, 1]


async def test_consumers_with_the_same_attributes_have_one_series_with_the_events_of_both() -> None:
    """As two instances that share a feed in one process have."""
    exported = Exported()
    async with asgi_client(feed(5)) as http:
        options: dict[str, Any] = {"http": http, "follow": False}
        async with (
            FeedConsumer("http://feed/feed", **options) as first,
            FeedConsumer("http://feed/feed", **options) as second,
        ):
            with observe(first, exported.meter):
                with observe(second, exported.meter):
                    await read(first)
                    await read(second)
                    assert values(exported) == [10]
                assert values(exported) == [10]
            assert values(exported) == [10], "a counter never goes back"


async def test_a_consumer_that_is_entered_and_observed_again_goes_on_from_its_value() -> None:
    exported = Exported()
    publisher = feed(2)
    async with asgi_client(publisher) as http:
        consumer = FeedConsumer("http://feed/feed", http=http, follow=False)
        with observe(consumer, exported.meter):
            async with consumer:
                await read(consumer)
            publisher.append(0, {"n": 2})
            async with consumer:
                await read(consumer)
            assert values(exported) == [3]
        publisher.append(0, {"n": 3})
        async with consumer:
            await read(consumer)
        assert values(exported) == [3], "nobody observed it"
        publisher.append(0, {"n": 4})
        with observe(consumer, exported.meter) as again:
            async with consumer:
                await read(consumer)
            assert values(exported) == [4]
            again.close()
        assert values(exported) == [4], "closing it twice adds nothing"


async def test_a_partition_has_a_series_whatever_the_errors_are() -> None:
    """The first error of a kind would begin a series otherwise, and be no increase."""
    exported = Exported()
    async with (
        asgi_client(feed(1, partitions=2)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter) as observed:
            for error in (LookupError("a"), ValueError("c")):
                observed.told(HandlerFailed(0, type(error).__name__), error)
            observed.told(HandlerFailed(1, "ValueError"), ValueError("d"))
    failures = metrics.HANDLER_FAILURES.name
    assert sorted(values(exported, failures)) == [1, 2]
    assert values(exported, failures, messaging__destination__partition__id="0") == [2]


@pytest.mark.usefixtures("short_waits")
async def test_counters_are_at_zero_before_anything_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meters, "_FRESH_SECONDS", -1)
    exported = Exported()
    publisher = feed(2, partitions=2)
    async with (
        asgi_client(publisher) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            for metric in metrics.FROM_THE_START:
                assert values(exported, metric.name) == [0, 0], metric.name
            publisher.split(0)
            await read(consumer)
            assert len(values(exported, metrics.QUARANTINED.name)) >= 3, "of a new partition, too"


async def test_a_split_partition_of_many_has_no_series_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meters, "MAX_PARTITIONS", 3)
    exported = Exported()
    async with (
        asgi_client(feed(1, partitions=4)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            assert values(exported, metrics.QUARANTINED.name) == [0]


async def test_of_many_partitions_counters_go_on_in_one_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meters, "MAX_PARTITIONS", 3)
    exported = Exported()
    async with (
        asgi_client(feed(2, partitions=8)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, exported.meter):
            await consumer.run(nothing)
            found = values(exported)
    assert len(found) <= 4
    assert sum(found) == 16


async def test_several_consumers_at_once_are_told_apart_while_another_thread_collects() -> None:
    exported = Exported()
    over = threading.Event()
    seen: list[float] = []

    def collect() -> None:
        while not over.is_set():
            seen.append(sum(values(exported)))

    publisher = Publisher(4, page_size=20, checkpoint_every=5)
    for partition in range(4):
        publisher.extend(partition, [{"n": n} for n in range(100)])
    thread = threading.Thread(target=collect)
    thread.start()
    try:
        async with asgi_client(publisher) as http, anyio.create_task_group() as tasks:

            async def consume(name: str) -> None:
                consumer = FeedConsumer("http://feed/feed", name=name, http=http, follow=False)
                async with consumer:
                    with observe(consumer, exported.meter):
                        await consumer.run(nothing)

            for name in "abc":
                tasks.start_soon(consume, name)
    finally:
        over.set()
        thread.join()
    for name in "abc":
        assert values(exported, messaging__consumer__group__name=name) == [100] * 4
    assert seen == sorted(seen), "no collection found less than one before it"


async def test_what_was_counted_before_the_application_set_its_provider_is_exported() -> None:
    """A counter that is measured would have lost it."""
    exported = Exported()
    meter = Late()
    async with (
        asgi_client(feed(3)) as http,
        FeedConsumer("http://feed/feed", http=http, follow=False) as consumer,
    ):
        with observe(consumer, meter):
            await read(consumer)
            meter.provide(exported.meter)
            assert values(exported) == [3]


class Late(api.NoOpMeter):
    """Like that of the global provider before the application has set one."""

    def __init__(self) -> None:
        super().__init__("late")
        self._asked: list[tuple[Any, dict[str, Any]]] = []

    def create_observable_counter(self, *arguments: Any, **options: Any) -> Any:
        self._asked.append((arguments, options))
        return super().create_observable_counter(*arguments, **options)

    def provide(self, meter: api.Meter) -> None:
        for arguments, options in self._asked:
            meter.create_observable_counter(*arguments, **options)


async def test_no_count_is_lost_or_doubled_while_observations_end_and_are_collected() -> None:
    """The sum is the same before, during and after the end, in whichever thread it is taken."""
    total, over = Meters(), threading.Event()
    status = ConsumerStatus("http://feed/feed"), Health(live=True, ready=True)
    opened = [Measured({"a": "b"}, lambda: None, lambda: status, total) for _ in range(200)]
    for measured in opened:
        total.attach(measured)
        measured.add(metrics.MESSAGES, 1, partition=0)
    wrong: list[list[float]] = []

    def collect() -> None:
        while not over.is_set():
            if (found := list(total.read(metrics.MESSAGES).values())) != [[200]]:
                wrong.extend(found)

    thread = threading.Thread(target=collect)
    thread.start()
    for measured in opened:
        total.detach(measured)
    over.set()
    thread.join()
    assert not wrong
    assert list(total.read(metrics.MESSAGES).values()) == [[200]]


async def test_all_counters_are_observable_and_histograms_are_not() -> None:
    """What each is exported as does not change: a sum that only grows."""
    made: dict[str, str] = {}

    class Noting(api.NoOpMeter):
        def create_observable_counter(self, name: str, *rest: Any, **options: Any) -> Any:
            made[name] = "counter"
            return super().create_observable_counter(name, *rest, **options)

        def create_histogram(self, name: str, *rest: Any, **options: Any) -> Any:
            made[name] = "histogram"
            return super().create_histogram(name, *rest, **options)

    async with asgi_client(feed(1)) as http:
        with observe(FeedConsumer("http://feed/feed", http=http), Noting("noting")):
            pass
    assert made == {
        metric.name: metric.kind.value for metric in METRICS if metric.kind is not Kind.GAUGE
    }
