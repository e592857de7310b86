"""`subscribe`: what happens is told once, without payloads, and listeners can't harm."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, Event, Quarantine, Share, notifications
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
from tests.consumer.helpers import BROKEN, LocalFeed, read_n, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, notification: Any) -> None:
        self.all.append(notification)

    def of(self, kind: type[Any], partition: int | None = None) -> list[Any]:
        found = [each for each in self.all if isinstance(each, kind)]
        return [each for each in found if partition in (None, getattr(each, "partition", None))]


async def test_the_way_of_a_feed_is_told() -> None:
    feed, heard = LocalFeed(), Heard()
    feed.numbers(0, *range(10))
    feed.close(0)
    async with feed.consume(follow=False) as consumer:
        with consumer.subscribe(heard):
            assert await read_n(consumer) == [*range(10)]
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


async def test_partitions_and_problems_that_come_and_go_are_told() -> None:
    feed, heard = LocalFeed(2), Heard()
    async with feed.running(limit={"stall_timeout": 1.0}) as reader:
        reader.consumer.subscribe(heard)
        await wait_until(lambda: len(heard.of(FetchEnded, 0)) > 1)
        feed.fail(503, partition=0, times=None)
        await wait_until(lambda: heard.of(ProblemFound, 0))
        assert heard.of(ProblemFound, 0)[0].name is ProblemName.FETCH_FAILING
        feed.heal()
        await wait_until(lambda: heard.of(ProblemGone, 0))
        assert heard.of(ProblemGone, 0)[0] == ProblemGone(ProblemName.FETCH_FAILING, 0)
        child, _ = feed.split(0, method="cursor-from")
        await wait_until(lambda: heard.of(PartitionStarted, child))
        assert heard.of(PartitionSuperseded) == [PartitionSuperseded(0)]
        feed.remove(1)
        await wait_until(lambda: heard.of(PartitionVanished, 1))


@pytest.mark.parametrize("way", ["run", "run_by_key"])
async def test_failures_of_handlers_are_told_without_their_texts(way: str) -> None:
    feed, heard = LocalFeed(), Heard()
    feed.numbers(0, *range(5))

    async def by_event(event: Event) -> None:
        if event.json()["n"] == 3:
            raise RuntimeError("secret payload")

    async def by_batch(batch: Batch) -> None:
        for event in batch.events:
            await by_event(event)

    async with feed.consume(follow=False) as consumer:
        consumer.subscribe(heard)
        if way == "run":
            await consumer.run(by_batch, on_failure="quarantine")
        else:
            await consumer.run_by_key(by_event, key=lambda _: 1, on_failure=Quarantine())
    assert heard.of(HandlerFailed)[0] == HandlerFailed(0, "RuntimeError")
    assert heard.of(EventQuarantined) == [EventQuarantined(0, "RuntimeError")]
    assert "secret" not in str(heard.all)


async def test_an_error_that_ends_the_iteration_is_told_once() -> None:
    feed, heard = LocalFeed(), Heard()
    feed.fail(BROKEN, times=None)
    async with feed.open() as reader:
        reader.consumer.subscribe(heard)
        with pytest.raises(Exception, match="_last"):
            await reader.take()
    (ended,) = heard.of(IterationEnded)
    assert "_last" in ended.error
    assert "_last" in heard.of(FetchEnded)[-1].error


async def test_leases_are_told() -> None:
    feed, heard = LocalFeed(2), Heard()
    share = Share(lease_seconds=60, rebalance_seconds=0.05)

    async def handle(_: Batch) -> None: ...

    async with feed.consume(share=share) as consumer, anyio.create_task_group() as tasks:
        consumer.subscribe(heard)
        tasks.start_soon(consumer.run, handle)
        await wait_until(lambda: len(heard.of(PartitionAssigned)) == 2)
        consumer.stop()
    assert {each.partition for each in heard.of(PartitionReleased)} == {0, 1}
    assert not any(each.lost for each in heard.of(PartitionReleased))


async def test_a_listener_that_raises_is_reported_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed, heard = LocalFeed(), Heard()
    feed.numbers(0, *range(10))

    def broken(_: Any) -> None:
        raise RuntimeError("broken listener")

    with caplog.at_level(logging.ERROR, "feedapi_client"):
        async with feed.consume(follow=False) as consumer:
            consumer.subscribe(broken)
            consumer.subscribe(heard)
            assert await read_n(consumer) == [*range(10)]
    assert heard.of(BatchDelivered)
    reports = [each for each in caplog.messages if "a listener" in each]
    assert 0 < len(reports) < len(heard.all)


async def test_what_is_no_listener_is_refused() -> None:
    async def waits(_: Any) -> None: ...

    for wrong in (None, 1, waits):
        with pytest.raises(TypeError, match="the listener"):
            LocalFeed().consume().subscribe(wrong)


def test_notifications_are_frozen_and_hold_no_payloads() -> None:
    for name in notifications.__all__:
        kind = getattr(notifications, name)
        assert kind.__dataclass_params__.frozen
        allowed = {"partition", "events", "seconds", "error", "name", "text", "lost"}
        assert {field.name for field in dataclasses.fields(kind)} <= allowed


async def test_r06_drained_is_told_once_where_it_is_only_found() -> None:
    """Its end was committed while it was open, and it was closed before the next iteration."""
    feed, heard = LocalFeed(dialect="v2-draft"), Heard()
    feed.numbers(0, *range(5))
    assert await feed.read() == [*range(5)]
    feed.close(0)
    for _ in range(2):
        consumer = feed.consume(follow=False)
        with consumer.subscribe(heard):
            async with consumer:
                assert await read_n(consumer) == []
    assert heard.of(PartitionDrained) == [PartitionDrained(0)]
