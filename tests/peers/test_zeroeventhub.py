"""A publisher made with PyPI's zeroeventhub, and what a consumer makes of it (dialect v1)."""

from __future__ import annotations

from typing import Any

import pytest

from feedapi_client import (
    FeedClient,
    FeedConsumer,
    FeedError,
    FetchOptions,
    MemoryCursorStore,
    NegotiationError,
    ProtocolError,
    TornResponseError,
)
from tests.consumer.helpers import RETRY, SHORT, limits, read, take
from tests.peers.zeroeventhub import Reader, serve

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def consume(url: str, **options: Any) -> FeedConsumer:
    settings = {"limits": limits(request_timeout=20.0), "retry": RETRY, "v1_partitions": 2}
    return FeedConsumer(url, **{**settings, **options})


def logs(count: int) -> list[list[Any]]:
    return [[{"partition": id, "n": n} for n in range(count)] for id in (0, 1)]


@pytest.mark.parametrize("echoes", [True, False])
async def test_r01_r03_a_feed_is_read_to_its_end_and_on(echoes: bool) -> None:
    partitions = logs(250)
    store = MemoryCursorStore()
    with serve(Reader(partitions, echoes=echoes), 2) as url:
        async with consume(url, store=store, follow=False) as consumer:
            first = [event.json() for event in await read(consumer)]
        for log, later in zip(partitions, logs(300), strict=True):
            log += later[250:]
        async with consume(url, store=store) as consumer:
            second = [event.json() for event in await take(aiter(consumer), 100)]
    for id, log in enumerate(partitions):
        assert [each for each in first + second if each["partition"] == id] == log


async def test_r01_the_number_of_partitions() -> None:
    with serve(Reader(logs(1)), 2) as url:
        with pytest.raises(NegotiationError, match="v1_partitions"):
            async with consume(url, v1_partitions=None):
                pass
        with pytest.raises(ProtocolError, match="Partition count doesn't match"):
            async with consume(url, v1_partitions=3, follow=False) as consumer:
                await read(consumer)


async def test_event_headers() -> None:
    with serve(Reader(logs(5)), 2) as url:
        options = FetchOptions(v1_headers=["_all"])
        async with FeedClient(url, v1_partitions=2, fetch=options) as client:
            page = await client.fetch(1, "_first")
    assert [dict(event.headers or {}) for event in page.events] == [{"h": "1"}] * 5


async def test_r03_a_response_that_breaks_off() -> None:
    """What was checkpointed counts, and the rest is fetched again."""
    reader = Reader(logs(80))
    with serve(reader, 2) as url:
        reader.fails_behind = 25
        async with consume(url, partitions=[0]) as consumer:
            seen = [event.json()["n"] for event in await take(aiter(consumer), 60)]
        assert seen == list(range(60))
        reader.fails_behind = 5
        with pytest.raises(TornResponseError):
            async with consume(url, retry=SHORT, follow=False) as consumer:
                await read(consumer)


async def test_r10_a_cursor_that_is_none_is_an_error_in_the_end() -> None:
    """The library answers status 200, and breaks off."""
    with serve(Reader(logs(5)), 2) as url:
        options = {"start": {0: "nonsense", 1: "_first"}, "retry": SHORT, "follow": False}
        with pytest.raises(FeedError):
            async with consume(url, **options) as consumer:
                await read(consumer)


@pytest.mark.parametrize("echoes", [True, False])
async def test_r07_start_at_an_end_that_the_feed_does_not_say(echoes: bool) -> None:
    quick = limits(request_timeout=20.0, max_attempts_without_progress=2)
    with (
        serve(Reader(logs(5), echoes=echoes), 2) as url,
        pytest.raises(FeedError, match="cursors skip"),
    ):
        async with consume(url, start="last", limits=quick, retry=SHORT):
            pass
