"""Both faces of the transport against a scripted server, and what they read or raise."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client.errors import FeedError
from feedapi_client.http.io import AsyncIO, BlockingIO, run_now
from feedapi_client.http.transport import Endpoint, Exchange
from feedapi_client.options import Limits
from tests.client.wire import Reply, wire

LIMIT = 1 << 20
LINE = b'{"cursor":"c"}\n'


def basic_auth(user: str, password: str) -> str:
    """The `Authorization` header of basic authentication."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


made: list[Any] = []


def a_client(sync: bool, **settings: Any) -> Any:
    """An HTTP client of the caller's, which is closed after the test."""
    made.append(httpx.Client(**settings) if sync else httpx.AsyncClient(**settings))
    return made[-1]


def endpoint(url: str, *, sync: bool = False, http: Any = None, **more: Any) -> Endpoint:
    io: Any = BlockingIO if sync else AsyncIO
    return Endpoint(url, io(url, http, **more))


async def run(at: Endpoint, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of an endpoint: one that blocks has a thread for it, and no event loop."""
    if isinstance(at.io, BlockingIO):
        return await anyio.to_thread.run_sync(run_now, coroutine)
    return await coroutine


@asynccontextmanager
async def opened(url: str, **more: Any) -> AsyncIterator[Endpoint]:
    at = endpoint(url, **more)
    try:
        yield at
    finally:
        await run(at, at.io.aclose())


async def body_of(at: Endpoint, params: list[tuple[str, str]] | None = None, **more: Any) -> bytes:
    """The body of a fetch."""

    async def read() -> bytes:
        async with Exchange(at, "/events", params or [], 3, **more) as body:
            return b"".join([piece async for piece in body])

    body: bytes = await run(at, read())
    return body


async def get(at: Endpoint, max_bytes: int = LIMIT) -> tuple[int, bytes]:
    """Status and body of a discovery."""
    found: tuple[int, bytes] = await run(at, Exchange(at, "", []).discovery(max_bytes))
    return found


async def page_of(url: str, *, sync: bool, **more: Any) -> bytes:
    async with opened(url, sync=sync, **more) as at:
        return await body_of(at)


async def discovery_of(url: str, *, sync: bool, **more: Any) -> tuple[int, bytes]:
    async with opened(url, sync=sync, **more) as at:
        return await get(at)


async def fetch_error(
    reply: Reply, *, sync: bool = False, limits: Limits | None = None
) -> FeedError:
    async with wire(lambda _: reply) as server:
        with pytest.raises(FeedError) as caught:
            await page_of(server.url, sync=sync, limits=limits)
        assert (caught.value.feed, caught.value.partition) == (server.url, 3)
        return caught.value
