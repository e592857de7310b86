"""Programs that replace methods of httpx see every request: with `http=` and without."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
import respx
from pytest_httpx import HTTPXMock

from tests.http.helpers import LINE, a_client, get, opened

URL = "http://service.invalid/feed"

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["async", "sync"])
def sync(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["own", "http="])
def http(request: pytest.FixtureRequest, sync: bool) -> Any:
    return None if request.param == "own" else a_client(sync)


async def test_pytest_httpx_sees_every_request(
    http: Any, sync: bool, httpx_mock: HTTPXMock
) -> None:
    httpx_mock.add_response(url=URL, content=LINE, is_reusable=True)
    async with opened(URL, sync=sync, http=http) as at:
        assert [await get(at) for _ in range(2)] == [(200, LINE)] * 2
    assert len(httpx_mock.get_requests()) == 2


@pytest.mark.parametrize("using", ["httpcore", "httpx"])
async def test_respx_sees_every_request_also_of_clients_made_before(
    http: Any, sync: bool, using: str
) -> None:
    async with opened(URL, sync=sync, http=http) as at:
        with respx.mock(using=using) as router:
            route = router.get(URL).respond(content=LINE)
            assert [await get(at) for _ in range(2)] == [(200, LINE)] * 2
    assert route.call_count == 2


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
