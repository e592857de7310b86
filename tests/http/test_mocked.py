"""Programs that replace methods of httpx see every request: with `http=` and without.

Discoveries and fetches, as clients and consumers make them.
"""

from __future__ import annotations

import functools
import gzip
from typing import Any

import anyio
import httpx
import pytest
import respx
from pytest_httpx import HTTPXMock

from feedapi_client import FeedConsumer, SyncFeedConsumer
from tests.http.helpers import LINE, a_client, body_of, get, opened

URL = "http://service.invalid/feed"

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["async", "sync"])
def sync(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["own", "http="])
def http(request: pytest.FixtureRequest, sync: bool) -> Any:
    return None if request.param == "own" else a_client(sync)


@pytest.mark.parametrize("using", ["httpcore", "httpx"])
async def test_respx_sees_every_request_also_of_clients_made_before(
    http: Any, sync: bool, using: str
) -> None:
    async with opened(URL, sync=sync, http=http) as at:
        with respx.mock(using=using) as router:
            discoveries = router.get(URL).respond(content=LINE)
            fetches = router.get(f"{URL}/events").respond(content=LINE)
            assert [await get(at) for _ in range(2)] == [(200, LINE)] * 2
            assert await body_of(at) == LINE
    assert (discoveries.call_count, fetches.call_count) == (2, 1)


async def test_a_tracer_sees_every_request(
    http: Any, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wraps a method of httpx, and the wrapper passes for that."""
    traced: list[httpx.URL] = []
    kind, name = (
        (httpx.HTTPTransport, "handle_request")
        if sync
        else (httpx.AsyncHTTPTransport, "handle_async_request")
    )
    mocked = httpx.MockTransport(lambda _: httpx.Response(200, content=LINE))

    @functools.wraps(getattr(kind, name))
    def send(_: object, request: httpx.Request) -> Any:
        traced.append(request.url)
        return getattr(mocked, name)(request)

    monkeypatch.setattr(kind, name, send)
    async with opened(URL, sync=sync, http=http) as at:
        assert await get(at) == (200, LINE)
    assert traced == [httpx.URL(URL)]


DISCOVERY = b'{"token":"t","partitions":[{"id":"0","closed":true,"lastCursor":"1"}]}'
PAGE = b'{"data":{"n":1}}\n{"cursor":"1"}\n'


async def test_pytest_httpx_sees_every_request_of_a_consumer(
    http: Any, sync: bool, httpx_mock: HTTPXMock
) -> None:
    """One for threads has an asynchronous client, too. Responses are in memory already."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        body = gzip.compress(PAGE if request.url.query else DISCOVERY)
        return httpx.Response(200, content=body, headers={"Content-Encoding": "gzip"})

    httpx_mock.add_callback(answer, is_reusable=True)
    if sync:
        events = await anyio.to_thread.run_sync(in_a_thread)
    else:
        async with FeedConsumer(URL, http=http, follow=False) as consumer:
            events = [event.json() async for event in consumer]
    assert events == [{"n": 1}]
    assert asked[:2] == ["/feed", "/feed/events"]
    assert len(httpx_mock.get_requests()) == len(asked)


def in_a_thread() -> list[Any]:
    with SyncFeedConsumer(URL, follow=False) as consumer:
        return [event.json() for event in consumer]
