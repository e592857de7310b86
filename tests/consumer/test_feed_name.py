"""Cursors that are stored under a name of the feed, instead of its URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from feedapi_client import FeedConsumer, MemoryCursorStore, NegotiationError, SQLiteCursorStore
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.moving import adopt
from feedapi_client.testing import Publisher

pytestmark = pytest.mark.anyio

Feeds = Callable[..., Publisher]


async def numbers(url: str, store: CursorStore, **options: object) -> tuple[list[int], list[str]]:
    async with FeedConsumer(url, store=store, follow=False, **options) as consumer:  # type: ignore[arg-type]
        found = [event.json()["n"] async for event in consumer]
        return found, [str(report) for report in consumer.status().reports]


async def test_a_feed_with_a_name_goes_on_at_another_url(feedapi_publisher: Publisher) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    store = MemoryCursorStore()
    assert (await numbers(url, store, feed_name="payments"))[0] == list(range(10))
    feedapi_publisher.append(0, {"n": 10})
    moved = url.replace("127.0.0.1", "localhost")
    assert (await numbers(moved, store, feed_name="payments"))[0] == [10]
    [key] = await store.feeds()
    assert (key.url, key.feed_name) == ("feed:payments", "payments")
    assert FeedKey(key.url).id == FeedKey.named("payments").id


async def test_cursors_under_the_url_are_adopted_once_and_reported(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    async with SQLiteCursorStore(tmp_path / "c.db") as store:
        assert (await numbers(url, store))[0] == list(range(10))
        feedapi_publisher.append(0, {"n": 10})
        found, reports = await numbers(url, store, feed_name="payments")
        assert found == [10]
        assert any("kept under feed:payments from now on" in report for report in reports)
        assert await store.load(FeedKey(url)) == {}
        feedapi_publisher.append(0, {"n": 11})
        found, reports = await numbers(url, store, feed_name="payments")
        assert found == [11]
        assert not any("from now on" in report for report in reports)


async def test_what_is_stored_under_the_name_is_never_replaced() -> None:
    store, old, new = MemoryCursorStore(), FeedKey("http://a/f"), FeedKey.named("f")
    await store.save(old, {0: Position("old")})
    await store.save(new, {0: Position("new")})
    assert await adopt(store, old, new) == 0
    assert (await store.load(new))[0].cursor == "new"
    assert (await store.load(old))[0].cursor == "old"


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * 201])
async def test_a_name_that_no_feed_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="feed_name"):
        FeedConsumer("http://localhost/feed", feed_name=name)
    with pytest.raises(NegotiationError, match="feed_name"):
        FeedKey(f"feed:{name}")
