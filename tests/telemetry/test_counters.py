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
from tests.consumer.helpers import read
from tests.telemetry.helpers import FEED, Exported, feed, nothing
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio
MESSAGES = metrics.MESSAGES.name


@pytest.fixture
def exported() -> Exported:
    return Exported()


async def test_nothing_is_measured_for_a_counter_until_it_is_collected(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[object] = []
    monkeypatch.setattr(Counter, "add", lambda *arguments: added.append(arguments))
    async with exported.observing(feed(3, partitions=2)) as (consumer, _):
        await consumer.run(nothing)
        assert not added
        assert exported.values(MESSAGES) == [3, 3]


async def test_a_counter_is_as_high_as_what_was_delivered_at_any_moment(exported: Exported) -> None:
    """A collection does not take the value away."""
    publisher, delivered = feed(20, page_size=4, checkpoint_every=2), 0
    async with exported.observing(publisher) as (consumer, _):
        assert exported.values(MESSAGES) == [0], "a series begins before its first event"
        async for batch in consumer.batches():
            delivered += len(batch.events)
            assert sum(exported.values(MESSAGES)) == delivered
            await batch.commit()
    assert delivered == 20
    assert exported.values(MESSAGES) == [20]


async def test_a_reader_that_asks_for_differences_gets_each_event_once(exported: Exported) -> None:
    delta = AggregationTemporality.DELTA
    exported.reader = InMemoryMetricReader({Counter: delta, ObservableCounter: delta})
    exported.meter = MeterProvider([exported.reader]).get_meter("test")
    publisher, found = feed(3), list[float]()
    async with exported.observing(publisher) as (consumer, _):
        await read(consumer)
        found += exported.values(MESSAGES)
        publisher.append(0, {"n": 3})
        await read(consumer)
        found += exported.values(MESSAGES)
    found += exported.values(MESSAGES)
    assert [value for value in found if value] == [3, 1]


async def test_consumers_with_the_same_attributes_have_one_series_with_the_events_of_both(
    exported: Exported,
) -> None:
    """As two instances that share a feed in one process have."""
    publisher = feed(5)
    async with exported.observing(publisher) as (first, _):
        async with exported.observing(publisher) as (second, _):
            await read(first)
            await read(second)
            assert exported.values(MESSAGES) == [10]
        assert exported.values(MESSAGES) == [10]
    assert exported.values(MESSAGES) == [10], "a counter never goes back"


async def test_a_consumer_that_is_entered_and_observed_again_goes_on_from_its_value(
    exported: Exported,
) -> None:
    publisher = feed(2)

    async def read_one_more() -> None:
        publisher.append(0, {"n": 2})
        async with consumer:
            await read(consumer)

    async with asgi_client(publisher) as http:
        consumer = FeedConsumer(FEED, http=http, follow=False)
        with observe(consumer, exported.meter):
            async with consumer:
                await read(consumer)
            await read_one_more()
            assert exported.values(MESSAGES) == [3]
        await read_one_more()
        assert exported.values(MESSAGES) == [3], "nobody observed it"
        with observe(consumer, exported.meter) as again:
            await read_one_more()
            assert exported.values(MESSAGES) == [4]
            again.close()
        assert exported.values(MESSAGES) == [4], "closing it twice adds nothing"


async def test_a_partition_has_a_series_whatever_the_errors_are(exported: Exported) -> None:
    """The first error of a kind would begin a series otherwise, and be no increase."""
    async with exported.observing(feed(1, partitions=2)) as (_, observed):
        for partition, error in ((0, LookupError("a")), (0, ValueError("c")), (1, ValueError("d"))):
            observed.told(HandlerFailed(partition, type(error).__name__), error)
    failures = metrics.HANDLER_FAILURES.name
    assert sorted(exported.values(failures)) == [1, 2]
    assert exported.values(failures, messaging__destination__partition__id="0") == [2]


@pytest.mark.usefixtures("short_waits")
async def test_counters_are_at_zero_before_anything_is_counted(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meters, "_FRESH_SECONDS", -1)
    publisher = feed(2, partitions=2)
    async with exported.observing(publisher) as (consumer, _):
        for metric in metrics.FROM_THE_START:
            assert exported.values(metric.name) == [0, 0], metric.name
        publisher.split(0)
        await read(consumer)
        assert len(exported.values(metrics.QUARANTINED.name)) >= 3, "of a new partition, too"


async def test_of_many_partitions_counters_go_on_in_one_series(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meters, "MAX_PARTITIONS", 3)
    async with exported.observing(feed(2, partitions=8)) as (consumer, _):
        assert exported.values(metrics.QUARANTINED.name) == [0]
        await consumer.run(nothing)
        found = exported.values(MESSAGES)
    assert len(found) <= 4
    assert sum(found) == 16


async def test_several_consumers_at_once_are_told_apart_while_another_thread_collects(
    exported: Exported,
) -> None:
    over, seen = threading.Event(), list[float]()

    def collect() -> None:
        while not over.is_set():
            seen.append(sum(exported.values(MESSAGES)))

    async def consume(name: str) -> None:
        async with exported.observing(publisher, name=name) as (consumer, _):
            await consumer.run(nothing)

    publisher = feed(100, partitions=4, page_size=20, checkpoint_every=5)
    thread = threading.Thread(target=collect)
    thread.start()
    try:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(consume, name)
    finally:
        over.set()
        thread.join()
    for name in "abc":
        assert exported.values(MESSAGES, messaging__consumer__group__name=name) == [100] * 4
    assert seen == sorted(seen), "no collection found less than one before it"


async def test_what_was_counted_before_the_application_set_its_provider_is_exported(
    exported: Exported,
) -> None:
    """A counter that is measured would have lost it."""
    meter, provided = Late(), exported.meter
    exported.meter = meter
    async with exported.observing(feed(3)) as (consumer, _):
        await read(consumer)
        meter.provide(provided)
        assert exported.values(MESSAGES) == [3]


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

    exported = Exported()
    exported.meter = Noting("noting")
    async with exported.observing(feed(1)):
        pass
    assert made == {
        metric.name: metric.kind.value for metric in METRICS if metric.kind is not Kind.GAUGE
    }
