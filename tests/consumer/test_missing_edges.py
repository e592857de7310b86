"""R8: a publisher that leaves out the edge to partition 0, as an application sees it."""

from __future__ import annotations

import pytest

from feedapi_client import LineageError
from feedapi_client.testing import Quirks
from tests.consumer.helpers import LocalFeed, read, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
OMITS = Quirks(omit_parent_zero=True)


async def test_r08_a_split_without_edges_is_reported() -> None:
    feed = LocalFeed(dialect="v2-draft", quirks=OMITS)
    feed.fill(0, 10)
    async with feed.open() as reader:
        await reader.batch()
        assert reader.reports() == []
        first, second = feed.split(0, 2)
        await wait_until(reader.reports)
        (report,) = reader.reports()
    assert f"lineage={{{first}: 0, {second}: 0}}" in report


@pytest.mark.parametrize("last_cursor", ["closed", "never"])
async def test_r08_the_children_of_partition_0_wait_for_it_without_any_option(
    last_cursor: str,
) -> None:
    feed = LocalFeed(2, quirks=Quirks(omit_parent_zero=True, last_cursor=last_cursor))
    feed.fill(0, 60)
    first, second = feed.split(0, 2)
    feed.fill(60, 120)
    async with feed.consume(follow=False) as consumer:
        events = await read(consumer)
        (report,) = consumer.status().reports
    assert f"partitions 1, {first}, {second} may start after partition 0" in report
    assert "lineage={" in report
    feed.check(events)
    assert len(events) == 120


async def test_r08_lineage_keeps_the_order() -> None:
    feed = LocalFeed(quirks=OMITS)
    feed.fill(0, 30)
    first, second = feed.split(0, 2)
    feed.fill(30, 60)
    edges = {first: 0, second: 0}
    async with feed.consume(lineage=edges, follow=False) as consumer:
        events = await read(consumer)
        assert consumer.status().reports == ()
    feed.check(events)
    assert {event.partition for event in events[:30]} == {0}
    feed.fill(60, 65)
    feed.remove(0)
    assert len(await feed.read(lineage=edges)) == 5


async def test_r08_lineage_may_be_declared_before_the_split() -> None:
    feed, seen = LocalFeed(quirks=OMITS), []
    feed.fill(0, 30)
    async with feed.consume(lineage={1: 0, 2: 0, 8: None}) as consumer:
        async for event in consumer:
            seen.append(event)
            if len(seen) == 20:
                feed.split(0, (1, 2))
                feed.fill(30, 60)
            if len(seen) == 60:
                break
        assert consumer.status().reports == ()
    feed.check(seen)


async def test_r08_lineage_that_contradicts_the_publisher_is_an_error_on_entry() -> None:
    feed = LocalFeed(2)
    feed.split(0, (2, 3))
    with pytest.raises(LineageError, match="partition 2: lineage= says that it starts after"):
        await feed.enter(lineage={2: 1})
    assert feed.store.saves == []
    with pytest.raises(ValueError, match="lineage must map"):
        feed.consume(lineage={"1": 0})
