"""`subscribe`: what happens is told once, without payloads, and listeners can't harm."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, Event, MemoryCursorStore, Quarantine, Share, notifications
from feedapi_client.notifications import (
    BatchCommitted,
    BatchDelivered,
    DiscoveryEnded,
    EventQuarantined,
    FetchEnded,
    HandlerFailed,
    IterationEnded,
    PartitionAssigned,
    PartitionDrained,
    PartitionReleased,
    PartitionStarted,
    PartitionSuperseded,
    PartitionVanished,
    ProblemFound,
    ProblemGone,
)
from feedapi_client.status import ProblemName
from feedapi_client.testing import Publisher
from tests.consumer.helpers import BROKEN, consume, numbers, read_n, take, wait_until

pytestmark = pytest.mark.anyio


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, notification: Any) -> None:
        self.all.append(notification)

    def of(self, kind: type[Any], partition: int | None = None) -> list[Any]:
        found = [each for each in self.all if isinstance(each, kind)]
        return [each for each in found if partition in (None, getattr(each, "partition", None))]


async def test_the_way_of_a_feed_is_told(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    publisher.close(0)
    heard = Heard()
    async with consume(publisher, follow=False) as consumer:
        with consumer.subscribe(heard):
            assert await read_n(consumer) == list(range(10))
        told = len(heard.all)
        assert await read_n(consumer) == []
        assert len(heard.all) == told
    assert sum(each.events for each in heard.of(BatchDelivered, 0)) == 10
    assert heard.of(BatchCommitted, 0)
    assert heard.of(FetchEnded, 0)[0].error is None
    assert heard.of(PartitionDrained) == [PartitionDrained(0)]
    assert heard.of(DiscoveryEnded)
    assert heard.all[-1] == IterationEnded(None)
    order = [type(each) for each in heard.all]
    assert order.index(BatchDelivered) < order.index(BatchCommitted)


async def test_partitions_that_come_and_go_are_told(serve: Callable[..., Publisher]) -> None:
    publisher = serve(2)
    heard = Heard()
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        with consumer.subscribe(heard):
            tasks.start_soon(lambda: take(aiter(consumer)))
            await wait_until(lambda: len(heard.of(FetchEnded, 0)) > 1)
            child, _ = publisher.split(0, method="cursor-from")
            await wait_until(lambda: heard.of(PartitionStarted, child))
            assert heard.of(PartitionSuperseded) == [PartitionSuperseded(0)]
            publisher.remove(1)
            await wait_until(lambda: heard.of(PartitionVanished, 1))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["run", "run_by_key"])
async def test_failures_of_handlers_are_told_without_their_texts(
    publisher: Publisher, way: str
) -> None:
    numbers(publisher, 0, range(5))
    heard = Heard()

    def check(events: Any) -> None:
        if any(event.json()["n"] == 3 for event in events):
            raise RuntimeError("secret payload")

    async def by_batch(batch: Batch) -> None:
        check(batch.events)

    async def by_event(event: Event) -> None:
        check([event])

    async with consume(publisher, follow=False) as consumer:
        consumer.subscribe(heard)
        if way == "run":
            await consumer.run(by_batch, on_failure="quarantine")
        else:
            await consumer.run_by_key(by_event, key=lambda _: 1, on_failure=Quarantine())
    assert heard.of(HandlerFailed)[0] == HandlerFailed(0, "RuntimeError")
    assert heard.of(EventQuarantined) == [EventQuarantined(0, "RuntimeError")]
    assert "secret" not in str(heard.all)


async def test_an_error_that_ends_the_iteration_is_told_once(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.fail(BROKEN, times=None)
    heard = Heard()
    async with consume(publisher) as consumer:
        consumer.subscribe(heard)
        with pytest.raises(Exception, match="_last"):
            await anext(aiter(consumer))
    (ended,) = heard.of(IterationEnded)
    assert "_last" in ended.error
    assert "_last" in heard.of(FetchEnded)[-1].error


async def test_problems_are_found_and_gone(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.fail(503, times=None)
    heard = Heard()
    async with (
        consume(publisher, limit={"stall_timeout": 1.0}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        consumer.subscribe(heard)

        async def loop() -> None:
            async for _ in consumer:
                pass

        tasks.start_soon(loop)
        await wait_until(lambda: heard.of(ProblemFound, 0))
        publisher.heal()
        await wait_until(lambda: heard.of(ProblemGone, 0))
        tasks.cancel_scope.cancel()
    assert heard.of(ProblemFound, 0)[0].name is ProblemName.FETCH_FAILING
    assert heard.of(ProblemGone, 0)[0] == ProblemGone(ProblemName.FETCH_FAILING, 0)


async def test_leases_are_told(serve: Callable[..., Publisher]) -> None:
    publisher, heard = serve(2), Heard()
    share = Share(lease_seconds=60, rebalance_seconds=0.05)

    async def handle(_: Batch) -> None: ...

    async with (
        consume(publisher, store=MemoryCursorStore(), share=share) as consumer,
        anyio.create_task_group() as tasks,
    ):
        consumer.subscribe(heard)
        tasks.start_soon(consumer.run, handle)
        await wait_until(lambda: len(heard.of(PartitionAssigned)) == 2)
        consumer.stop()
    assert {each.partition for each in heard.of(PartitionReleased)} == {0, 1}
    assert not any(each.lost for each in heard.of(PartitionReleased))


async def test_a_listener_that_raises_is_reported_and_stops_nothing(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    numbers(publisher, 0, range(10))
    heard = Heard()

    def broken(_: Any) -> None:
        raise RuntimeError("broken listener")

    with caplog.at_level(logging.ERROR, "feedapi_client"):
        async with consume(publisher, follow=False) as consumer:
            consumer.subscribe(broken)
            consumer.subscribe(heard)
            assert await read_n(consumer) == list(range(10))
    assert heard.of(BatchDelivered)
    reports = [each for each in caplog.messages if "a listener" in each]
    assert 0 < len(reports) < len(heard.all)


async def test_what_is_no_listener_is_refused(publisher: Publisher) -> None:
    async def waits(_: Any) -> None: ...

    async with consume(publisher) as consumer:
        for wrong in (None, 1, waits):
            with pytest.raises(TypeError, match="the listener"):
                consumer.subscribe(wrong)  # type: ignore[arg-type]


def test_notifications_are_frozen_and_hold_no_payloads() -> None:
    for name in notifications.__all__:
        kind = getattr(notifications, name)
        assert kind.__dataclass_params__.frozen
        allowed = {"partition", "events", "seconds", "error", "name", "text", "lost"}
        assert {field.name for field in dataclasses.fields(kind)} <= allowed


async def test_r06_drained_is_told_once_where_it_is_only_found(
    serve: Callable[..., Publisher],
) -> None:
    """Its end was committed while it was open, and it was closed before the next iteration."""
    publisher = serve(1, dialect="v2-draft", page_size=10)
    numbers(publisher, 0, range(5))
    store, heard = MemoryCursorStore(), Heard()
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))
    publisher.close(0)
    for _ in range(2):
        consumer = consume(publisher, store=store, follow=False)
        with consumer.subscribe(heard):
            async with consumer:
                assert await read_n(consumer) == []
    assert heard.of(PartitionDrained) == [PartitionDrained(0)]
