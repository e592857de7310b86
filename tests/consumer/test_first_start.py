"""Nothing is read again by mistake: a start beside the cursors of the same feed (R7)."""

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
    Position,
    Share,
    SQLiteCursorStore,
    StoreError,
    SyncFeedConsumer,
)
from feedapi_client.operations import move
from feedapi_client.testing import Publisher

pytestmark = pytest.mark.anyio

MEANT: Mapping[str, Any] = {"start": "first"}


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


async def numbers(url: str, store: Any, **options: Any) -> list[int]:
    async with FeedConsumer(url, store=store, name="app", follow=False, **options) as consumer:
        return [event.json()["n"] async for event in consumer]


async def reports(url: str, store: Any, **options: Any) -> tuple[str, ...]:
    async with FeedConsumer(url, store=store, name="app", follow=False, **options) as consumer:
        return consumer.status().reports


def filled(publisher: Publisher, count: int = 10) -> str:
    publisher.extend(0, [{"n": n, "type": "created"} for n in range(count)])
    assert publisher.url is not None
    return publisher.url


async def run_command(refused: StoreError, store: Any) -> None:
    """Run the command that the message names, as `feedapi cursors move` does."""
    _, _, rest = str(refused).partition("feedapi cursors move ")
    old, new, *more = shlex.split(rest.partition(". To read this feed")[0])
    assert more[:2] == ["--name", "app"]
    await move(store, old, new, name="app")


@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
async def test_r07_a_changed_host_name_does_not_read_the_history_again(
    feedapi_publisher: Publisher, tmp_path: Path, share: Share | None
) -> None:
    url = filled(feedapi_publisher, 2_000)
    former = url.replace("127.0.0.1", "localhost")
    async with SQLiteCursorStore(tmp_path / "cursors.db") as store:
        assert await numbers(former, store, share=share) == list(range(2_000))
        feedapi_publisher.append(0, {"n": 2_000})
        with pytest.raises(StoreError, match="looks like the same feed") as refused:
            await numbers(url, store, share=share)
        assert [key.url for key in await store.feeds()] == [former]
        await run_command(refused.value, store)
        assert await numbers(url, store, share=share) == [2_000]


def changed(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "origin": (url.replace("127.0.0.1", "localhost"), {}),
        "slash": (f"{url}/", {}),
        "selection": (url, {"fetch": FetchOptions(event_types=("created", "paid"))}),
        "feed name": (url, {"feed_name": "orders"}),
    }


@pytest.mark.parametrize("what", changed(""))
async def test_r07_start_first_is_for_who_means_it(feedapi_publisher: Publisher, what: str) -> None:
    url, store = filled(feedapi_publisher), MemoryCursorStore()
    former, options = changed(url)[what]
    await store.save(FeedConsumer(former, name="app", **options).key, {0: Position("c")})
    with pytest.raises(StoreError, match="looks like the same feed"):
        await numbers(url, store)
    assert len(await numbers(url, store, **MEANT)) == 10
    assert await numbers(url, store) == []  # its own positions are stored now


async def test_r07_one_more_event_type_goes_on_with_the_command(
    feedapi_publisher: Publisher,
) -> None:
    url, store = filled(feedapi_publisher), MemoryCursorStore()
    one = {"fetch": FetchOptions(event_types=("created",))}
    two = {"fetch": FetchOptions(event_types=("created", "paid"))}
    assert len(await numbers(url, store, **one)) == 10
    with pytest.raises(StoreError) as refused:
        await numbers(url, store, **two)
    selections = """--selection '{"event-types":"created"}' '{"event-types":"created;paid"}'"""
    assert f"feedapi cursors move {url} {url} --name app {selections}" in str(refused.value)
    old, new = one["fetch"].selection(), two["fetch"].selection()
    await move(store, url, url, name="app", selection=(old, new))
    feedapi_publisher.append(0, {"n": 10, "type": "paid"})
    assert await numbers(url, store, **two) == [10]


async def test_r07_a_third_feed_with_the_same_path_is_only_reported(
    feedapi_publisher: Publisher,
) -> None:
    url, store = filled(feedapi_publisher), MemoryCursorStore()
    path = url.split("/", 3)[3]
    for host in ("a.test", "b.test"):
        await store.save(FeedKey(f"https://{host}/{path}", "app"), {0: Position("c")})
    (report,) = await reports(url, store)
    assert "2 others that look like it" in report
    assert await reports(url, store) == ()  # the first start has saved positions


@pytest.mark.parametrize("store", [OwnStore, BrokenList, MemoryCursorStore])
async def test_a_consumer_starts_where_no_keys_can_be_listed(
    feedapi_publisher: Publisher, store: Callable[[], Any]
) -> None:
    assert await reports(filled(feedapi_publisher), store()) == ()


def test_r07_without_async_too(feedapi_publisher: Publisher, tmp_path: Path) -> None:
    url = filled(feedapi_publisher)
    for start, host in ((None, "localhost"), ("first", "127.0.0.1")):
        store = SQLiteCursorStore(tmp_path / "cursors.db")
        there = url.replace("127.0.0.1", host)
        with SyncFeedConsumer(there, store=store, follow=False, start=start) as consumer:  # type: ignore[arg-type]
            assert len(list(consumer)) == 10
    store = SQLiteCursorStore(tmp_path / "cursors.db")
    with (
        pytest.raises(StoreError, match="looks like the same feed"),
        SyncFeedConsumer(f"{url}/", store=store, follow=False),
    ):
        pass
