"""The transport that has a connection for each request under way."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import httpx
import pytest

from feedapi_client import FeedClient, NegotiationError
from feedapi_client.http.connections import ConnectionPerRequest
from tests.consumer.helpers import wait_until

pytestmark = pytest.mark.anyio

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Site:
    """A server that answers each request when `answers` is set, and counts its connections."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.open = 0
        self.answers = anyio.Event()
        self.asked = 0
        self.closed = anyio.Event()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        self.connections += 1
        self.open += 1
        try:
            async with stream:
                async for data in stream:
                    self.asked += data.count(b"\r\n\r\n")
                    await self.answers.wait()
                    await stream.send(ANSWER)
        except anyio.BrokenResourceError:
            pass
        finally:
            self.open -= 1
            self.closed.set()


@asynccontextmanager
async def a_site() -> AsyncIterator[Site]:
    site = Site()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    site.url = f"http://127.0.0.1:{port}/"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site.serve)
        yield site
        tasks.cancel_scope.cancel()


def a_client(
    places: int,
    *,
    expiry: float | None = 60.0,
    wait: float | None = None,
    read_bytes: int = 64 * 1024,
) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=places, keepalive_expiry=expiry)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    transport = ConnectionPerRequest(context, limits, read_bytes=read_bytes)
    return httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None, pool=wait))


async def until(site: Site, *, asked: int) -> None:
    await wait_until(lambda: site.asked >= asked)


async def test_requests_one_after_the_other_share_a_connection() -> None:
    async with a_site() as site, a_client(8) as client:
        site.answers.set()
        for _ in range(5):
            assert (await client.get(site.url)).text == "ok"
        assert (site.asked, site.connections) == (5, 1)


async def test_without_an_expiry_idle_connections_are_kept() -> None:
    async with a_site() as site, a_client(8, expiry=None) as client:
        site.answers.set()
        for _ in range(5):
            assert (await client.get(site.url)).text == "ok"
        assert (site.asked, site.connections) == (5, 1)


async def test_each_request_under_way_has_a_connection_and_no_more_than_there_are_places() -> None:
    async with a_site() as site, a_client(3) as client, anyio.create_task_group() as tasks:
        for _ in range(7):
            tasks.start_soon(client.get, site.url)
        await until(site, asked=3)
        await anyio.wait_all_tasks_blocked()
        assert (site.asked, site.connections) == (3, 3)
        site.answers.set()
        await until(site, asked=7)
        assert site.connections == 3


async def test_who_waits_too_long_for_a_place_has_a_pool_timeout() -> None:
    async with a_site() as site, a_client(1, wait=0.01) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get, site.url)
            await until(site, asked=1)
            with pytest.raises(httpx.PoolTimeout):
                await client.get(site.url)
            site.answers.set()
        assert (await client.get(site.url)).text == "ok"


async def test_a_cancelled_request_gives_its_place_back() -> None:
    async with a_site() as site, a_client(1) as client:
        for number in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get, site.url)
                await until(site, asked=number + 1)
                tasks.cancel_scope.cancel()
        site.answers.set()
        assert (await client.get(site.url)).text == "ok"


async def test_a_refused_connection_gives_its_place_back() -> None:
    async with a_site() as site:
        pass
    async with a_client(1) as client:
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                await client.get(site.url)


async def test_a_response_that_is_closed_twice_gives_one_place_back() -> None:
    async with a_site() as site, a_client(1) as client, anyio.create_task_group() as tasks:
        site.answers.set()
        async with client.stream("GET", site.url) as response:
            await response.aread()
            await response.aclose()
        site.answers = anyio.Event()
        for _ in range(2):
            tasks.start_soon(client.get, site.url)
        await until(site, asked=2)
        await anyio.wait_all_tasks_blocked()
        assert site.asked == 2, "one of the two has to wait"
        site.answers.set()


async def test_connections_that_are_idle_for_too_long_are_closed() -> None:
    async with a_site() as site, a_client(4, expiry=0.02) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(client.get, site.url)
            await until(site, asked=4)
            site.answers.set()
        while site.open > 1:  # each request closes one
            await anyio.sleep(0.005)
            await client.get(site.url)


@pytest.mark.parametrize("kib", [64, 256])
async def test_a_read_brings_as_much_as_is_asked_for(kib: int) -> None:
    sent = anyio.Event()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 150000\r\n\r\n")
            await stream.send(b"x" * 150_000)  # fits into the buffers of a socket
            sent.set()
            await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with (
            a_client(1, read_bytes=kib * 1024) as client,
            client.stream("GET", f"http://127.0.0.1:{port}/") as response,
        ):
            await sent.wait()
            sizes = [len(chunk) async for chunk in response.aiter_raw()]
        tasks.cancel_scope.cancel()
    assert sum(sizes) == 150_000
    assert (max(sizes) > 64 * 1024) == (kib == 256)


async def test_a_mock_of_httpx_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mocked(_: object, request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, text="mocked", request=request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", mocked)
    async with FeedClient("http://service.invalid/feed") as client:
        with pytest.raises(NegotiationError, match="mocked"):
            await client.discover()


async def test_closing_the_client_closes_the_connections() -> None:
    async with a_site() as site:
        site.answers.set()
        async with a_client(4) as client:
            await client.get(site.url)
            assert site.open == 1
        await site.closed.wait()
        assert site.open == 0


async def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_site() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        proxy.answers.set()
        async with FeedClient("http://service.invalid/feed") as client:
            with pytest.raises(NegotiationError, match="ok"):
                await client.discover()
        assert proxy.asked
