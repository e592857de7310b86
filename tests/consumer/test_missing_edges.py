"""R8: a publisher that leaves out the edge to partition 0, as an application sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from feedapi_client import LineageError
from feedapi_client.testing import Publisher, Quirks
from tests.consumer.helpers import (
    RecordingStore,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    next_batch,
    read,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def feed(serve: Callable[..., Publisher]) -> Publisher:
    """One partition, whose children will not name it."""
    return serve(1, page_size=10, quirks=Quirks(omit_parent_zero=True))


async def test_r08_a_split_without_edges_is_reported(serve: Callable[..., Publisher]) -> None:
    feed = serve(1, dialect="v2-draft", page_size=10, quirks=Quirks(omit_parent_zero=True))
    fill(feed, 10)
    async with consume(feed) as consumer:
        await next_batch(consumer.batches())
        assert consumer.status().reports == ()
        first, second = feed.split(0, 2)
        await wait_until(lambda: consumer.status().reports)
        (report,) = consumer.status().reports
    assert f"lineage={{{first}: 0, {second}: 0}}" in report


@pytest.mark.parametrize("tells_end", [True, False])
async def test_r08_the_children_of_partition_0_wait_for_it_without_any_option(
    serve: Callable[..., Publisher], tells_end: bool
) -> None:
    quirks = Quirks(omit_parent_zero=True, last_cursor="closed" if tells_end else "never")
    feed = serve(2, dialect="v2-token", page_size=10, quirks=quirks)
    fill(feed, 60)
    first, second = feed.split(0, 2)
    fill(feed, 60, start=60)
    async with consume(feed, follow=False) as consumer:
        events = await read(consumer)
        (report,) = consumer.status().reports
    assert f"partitions 1, {first}, {second} may do so" in report
    assert "lineage={" in report
    assert_each_entity_in_order_and_once([event.json() for event in events], feed)
    assert len(events) == 120


async def test_r08_lineage_keeps_the_order(feed: Publisher, store: RecordingStore) -> None:
    fill(feed, 30)
    first, second = feed.split(0, 2)
    fill(feed, 30, start=30)
    edges = {first: 0, second: 0}
    async with consume(feed, store=store, lineage=edges, follow=False) as consumer:
        events = await read(consumer)
        assert consumer.status().reports == ()
    assert_each_entity_in_order_and_once([event.json() for event in events], feed)
    assert {event.partition for event in events[:30]} == {0}
    fill(feed, 5, start=60)
    feed.remove(0)
    async with consume(feed, store=store, lineage=edges, follow=False) as consumer:
        assert len(await read(consumer)) == 5


async def test_r08_lineage_may_be_declared_before_the_split(feed: Publisher) -> None:
    fill(feed, 30)
    async with consume(feed, lineage={1: 0, 2: 0, 8: None}) as consumer:
        events = aiter(consumer)
        read_before = await take(events, 20)
        feed.split(0, (1, 2))
        fill(feed, 30, start=30)
        read_after = await take(events, 40)
        assert consumer.status().reports == ()
    payloads = [event.json() for event in (*read_before, *read_after)]
    assert_each_entity_in_order_and_once(payloads, feed)


async def test_r08_lineage_that_contradicts_the_publisher_is_an_error_on_entry(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    feed = serve(2)
    feed.split(0, (2, 3))
    consumer = consume(feed, store=store, lineage={2: 1})
    with pytest.raises(LineageError, match="partition 2: lineage= says that it starts after"):
        await consumer.__aenter__()
    assert store.saves == []
    with pytest.raises(ValueError, match="lineage must map"):
        consume(feed, lineage={"1": 0})
