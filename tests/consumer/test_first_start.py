"""R7: nothing is read again by mistake. A start beside cursors of the same feed; names of feeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import (
    FeedConsumer,
    FeedKey,
    FetchOptions,
    MemoryCursorStore,
    NegotiationError,
    Position,
    Share,
    SQLiteCursorStore,
    StoreError,
    SyncFeedConsumer,
)
from feedapi_client.operations import move
from feedapi_client.stores.moving import adopt
from feedapi_client.testing import Publisher
from tests.consumer.helpers import LocalFeed, limits, n_of
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio

URL, FORMER = "http://new.test/feed", "http://former.test/feed"


class Feed(LocalFeed):
    """A feed of ten events that is reached by any URL. Its consumers have the name "app"."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_some(10, type="created")

    def add_some(self, count: int = 1, **fields: Any) -> None:
        begin = len(self.payloads())
        self.extend(0, [{"n": n, **fields} for n in range(begin, begin + count)])

    async def found_at(self, url: str = URL, **options: Any) -> tuple[list[int], tuple[str, ...]]:
        """What a consumer reads at a URL, and what it reports."""
        options = {"store": self.store, "name": "app", "limits": limits(), **options}
        consumer = FeedConsumer(url, follow=False, http=asgi_client(self), **options)
        async with consumer:
            found = n_of([event async for event in consumer])
            return found, consumer.status().reports

    async def read_at(self, url: str = URL, **options: Any) -> list[int]:
        return (await self.found_at(url, **options))[0]


async def run_command(refused: StoreError, store: Any) -> None:
    """Run the command that the message names, as `feedapi cursors move` does."""
    _, _, rest = str(refused).partition("feedapi cursors move ")
    old, new, *more = shlex.split(rest.partition(". To read this feed")[0])
    assert more[:2] == ["--name", "app"]
    await move(store, old, new, name="app")


@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
async def test_r07_a_changed_host_name_does_not_read_the_history_again(share: Share | None) -> None:
    feed = Feed()
    assert await feed.read_at(FORMER, share=share) == [*range(10)]
    feed.add_some()
    with pytest.raises(StoreError, match="looks like the same feed") as refused:
        await feed.read_at(share=share)
    assert [key.url for key in await feed.store.feeds()] == [FORMER]
    await run_command(refused.value, feed.store)
    assert await feed.read_at(share=share) == [10]


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "origin": (FORMER, {}),
    "slash": (f"{URL}/", {}),
    "selection": (URL, {"fetch": FetchOptions(event_types=("created", "paid"))}),
    "feed name": (URL, {"feed_name": "orders"}),
}


@pytest.mark.parametrize("what", CHANGED)
async def test_r07_start_first_is_for_who_means_it(what: str) -> None:
    feed, (former, options) = Feed(), CHANGED[what]
    await feed.store.save(FeedConsumer(former, name="app", **options).key, {0: Position("c")})
    with pytest.raises(StoreError, match="looks like the same feed"):
        await feed.read_at()
    assert len(await feed.read_at(start="first")) == 10
    assert await feed.read_at() == []  # its own positions are stored now


async def test_r07_one_more_event_type_goes_on_with_the_command() -> None:
    feed = Feed()
    one, two = (FetchOptions(event_types=types) for types in (("created",), ("created", "paid")))
    assert len(await feed.read_at(fetch=one)) == 10
    with pytest.raises(StoreError) as refused:
        await feed.read_at(fetch=two)
    selections = """--selection '{"event-types":"created"}' '{"event-types":"created;paid"}'"""
    assert f"feedapi cursors move {URL} {URL} --name app {selections}" in str(refused.value)
    selection = one.selection(), two.selection()
    await move(feed.store, URL, URL, name="app", selection=selection)
    feed.add_some(type="paid")
    assert await feed.read_at(fetch=two) == [10]


async def test_r07_a_third_feed_with_the_same_path_is_only_reported() -> None:
    feed = Feed()
    for host in ("a.test", "b.test"):
        await feed.store.save(FeedKey(f"https://{host}/feed", "app"), {0: Position("c")})
    _, (report,) = await feed.found_at()
    assert "2 others that look like it" in report
    assert (await feed.found_at())[1] == ()  # the first start has saved positions


class OwnStore:
    """A store of an application's own: it can load and save, and nothing else."""

    def __init__(self) -> None:
        cursors = MemoryCursorStore()
        self.load, self.save = cursors.load, cursors.save


class BrokenList(MemoryCursorStore):
    async def feeds(self) -> list[FeedKey]:
        raise StoreError("the list is broken")


@pytest.mark.parametrize("store", [OwnStore, BrokenList, MemoryCursorStore])
async def test_a_consumer_starts_where_no_keys_can_be_listed(store: Callable[[], Any]) -> None:
    assert await Feed(store=store()).found_at() == ([*range(10)], ())


def test_r07_without_async_too(feedapi_publisher: Publisher, tmp_path: Path) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    former = url.replace("127.0.0.1", "localhost")

    def read(url: str, **options: Any) -> int:
        store = SQLiteCursorStore(tmp_path / "cursors.db")
        with SyncFeedConsumer(url, store=store, follow=False, **options) as consumer:
            return len(list(consumer))

    assert read(former) == 10
    with pytest.raises(StoreError, match="looks like the same feed"):
        read(url)
    assert read(url, start="first") == 10


# ---------------------------------------------------------------------- names of feeds

NAMED: Mapping[str, Any] = {"feed_name": "payments"}


async def test_r07_a_feed_with_a_name_goes_on_at_another_url() -> None:
    feed = Feed()
    assert await feed.read_at(FORMER, **NAMED) == [*range(10)]
    feed.add_some()
    assert await feed.read_at(**NAMED) == [10]
    [key] = await feed.store.feeds()
    assert (key.url, key.feed_name) == ("feed:payments", "payments")
    assert FeedKey(key.url).id == FeedKey.named("payments").id


async def test_r07_cursors_under_the_url_are_adopted_once_and_reported(tmp_path: Path) -> None:
    async with SQLiteCursorStore(tmp_path / "c.db") as store:
        feed = Feed(store=store)
        assert await feed.read_at() == [*range(10)]
        for n, adopts in ((10, True), (11, False)):
            feed.add_some()
            found, reports = await feed.found_at(**NAMED)
            assert found == [n]
            says = ["kept under feed:payments from now on" in report for report in reports]
            assert any(says) is adopts
            assert await store.load(FeedKey(URL, "app")) == {}


async def test_r07_what_is_stored_under_the_name_is_never_replaced() -> None:
    store, old, new = MemoryCursorStore(), FeedKey("http://a/f"), FeedKey.named("f")
    await store.save(old, {0: Position("old")})
    await store.save(new, {0: Position("new")})
    assert await adopt(store, old, new) == 0
    assert (await store.load(new))[0].cursor == "new"
    assert (await store.load(old))[0].cursor == "old"


async def test_r07_an_instance_under_the_url_that_has_saved_nothing_yet_is_waited_for() -> None:
    store, old, new = MemoryCursorStore(), FeedKey("http://a/f"), FeedKey.named("f")
    await store.beat(old, "bootstraps", 60)
    assert await adopt(store, old, new, store) is None
    await store.save(old, {0: Position("old")})
    await store.leave(old, "bootstraps")
    assert await adopt(store, old, new, store) == 1


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * 201])
async def test_a_name_that_no_feed_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="feed_name"):
        FeedConsumer("http://localhost/feed", feed_name=name)
    with pytest.raises(NegotiationError, match="feed_name"):
        FeedKey(f"feed:{name}")
