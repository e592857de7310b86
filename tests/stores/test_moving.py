"""Cursors of a feed that moved are found, and a consumer says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from feedapi_client import FeedConsumer, FeedKey, MemoryCursorStore, Position, StoreError
from feedapi_client.stores.moving import cursors_elsewhere, keys_elsewhere
from feedapi_client.testing import Publisher

pytestmark = pytest.mark.anyio

HERE = FeedKey("https://here.test/feed?tenant=1", "app", {"filter-a": "b"})
FORMER = [
    FeedKey("https://former.test/feed?tenant=1", "app", {"filter-a": "b"}),
    FeedKey("http://here.test/feed", "app", {"filter-a": "b"}),
    FeedKey("https://here.test:8443/feed", "app", {"filter-a": "b"}),
]
OTHERS = [
    FeedKey("https://former.test/other", "app", {"filter-a": "b"}),
    FeedKey("https://former.test/feed", "other", {"filter-a": "b"}),
    FeedKey("https://former.test/feed", "app"),
    FeedKey("https://here.test/feed?tenant=2", "app", {"filter-a": "b"}),
]


class OwnStore:
    """A store of an application's own: it can load and save, and nothing else."""

    def __init__(self) -> None:
        self._cursors = MemoryCursorStore()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        return await self._cursors.load(feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        await self._cursors.save(feed, positions, transaction=transaction)


class BrokenList(MemoryCursorStore):
    async def feeds(self) -> list[FeedKey]:
        raise StoreError("the list is broken")


async def test_keys_that_differ_in_their_origin_only_are_found() -> None:
    store = MemoryCursorStore()
    for key in (*FORMER, *OTHERS):
        await store.save(key, {0: Position("c")})
    assert set(await keys_elsewhere(store, HERE)) == set(FORMER)


async def test_a_store_that_can_not_list_its_keys_finds_none() -> None:
    assert await keys_elsewhere(OwnStore(), HERE) == []


async def _reports(publisher: Publisher, store: Any) -> tuple[str, ...]:
    assert publisher.url is not None
    async with FeedConsumer(publisher.url, store=store, follow=False) as consumer:
        return consumer.status().reports


def _former(publisher: Publisher) -> FeedKey:
    assert publisher.url is not None
    return FeedKey("https://former.test/" + publisher.url.split("/", 3)[3])


async def test_a_consumer_reports_cursors_under_another_origin(
    feedapi_publisher: Publisher,
) -> None:
    store, former = MemoryCursorStore(), _former(feedapi_publisher)
    await store.save(former, {0: Position("c")})
    (report,) = await _reports(feedapi_publisher, store)
    assert f"feedapi cursors move {former.url} {feedapi_publisher.url} --overwrite" in report
    # The first start has saved positions.
    assert await _reports(feedapi_publisher, store) == ()


@pytest.mark.parametrize("store", [OwnStore, BrokenList, MemoryCursorStore])
async def test_a_consumer_starts_where_no_keys_can_be_listed(
    feedapi_publisher: Publisher, store: Any
) -> None:
    assert await _reports(feedapi_publisher, store()) == ()


def test_r21_the_report_is_escaped_and_cut() -> None:
    found = FeedKey("https://former.test/feed", "\x1b[2J" + "n" * 10_000)
    report = cursors_elsewhere(found, HERE.url)
    assert report.isprintable()
    assert "\\x1b[2J" in report
    assert len(report) < 1_000
    assert "move https://former.test/feed https://here.test/feed?... " in report
