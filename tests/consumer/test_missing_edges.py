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
    wait_until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def feed(serve: Callable[..., Publisher]) -> Publisher:
    """One partition, whose children will not name it."""
    return serve(1, page_size=10, quirks=Quirks(omit_parent_zero=True))


async def test_r08_a_split_without_edges_is_reported(feed: Publisher) -> None:
    fill(feed, 10)
    async with consume(feed) as consumer:
        await next_batch(consumer.batches())
        assert consumer.status().reports == ()
        first, second = feed.split(0, 2)
        await wait_until(lambda: consumer.status().reports)
        (report,) = consumer.status().reports
    assert f"lineage={{{first}: 0, {second}: 0}}" in report


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


async def test_r08_lineage_of_unknown_partitions_is_an_error_on_entry(
    feed: Publisher, store: RecordingStore
) -> None:
    consumer = consume(feed, store=store, lineage={7: 0})
    with pytest.raises(LineageError, match="partition 7: lineage= names this partition"):
        await consumer.__aenter__()
    assert store.saves == []
    with pytest.raises(ValueError, match="lineage must map"):
        consume(feed, lineage={"1": 0})
