"""Transports against a scripted server, and what they read or raise."""

from __future__ import annotations

from base64 import b64encode
from contextlib import aclosing, closing
from typing import Any

import anyio
import pytest

from feedapi_client.errors import FeedError
from feedapi_client.http.async_transport import Transport
from feedapi_client.http.sync_transport import SyncTransport
from feedapi_client.options import Limits
from tests.client.wire import Reply, wire

LIMIT = 1 << 20
LINE = b'{"cursor":"c"}\n'


def basic_auth(user: str, password: str) -> str:
    """The `Authorization` header of basic authentication."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


async def body_of(
    transport: Transport, params: list[tuple[str, str]] | None = None, **more: Any
) -> bytes:
    async with transport.stream("/events", params or [], partition=3, **more) as body:
        return b"".join([piece async for piece in body])


def sync_body_of(transport: SyncTransport) -> bytes:
    with transport.stream("/events", [], partition=3) as body:
        return b"".join(body)


def opened(url: str, **more: Any) -> aclosing[Transport]:
    return aclosing(Transport(url, **more))


async def page_of(url: str, *, sync: bool, **more: Any) -> bytes:
    """The body of a fetch, by the transport of either kind."""
    if sync:
        with closing(SyncTransport(url, **more)) as transport:
            return await anyio.to_thread.run_sync(sync_body_of, transport)
    async with opened(url, **more) as transport:
        return await body_of(transport)


async def discovery_of(url: str, *, sync: bool, **more: Any) -> tuple[int, bytes]:
    """Status and body of a discovery, by the transport of either kind."""
    if sync:
        with closing(SyncTransport(url, **more)) as transport:
            return await anyio.to_thread.run_sync(lambda: transport.get("", [], max_bytes=LIMIT))
    async with opened(url, **more) as transport:
        return await transport.get("", [], max_bytes=LIMIT)


async def fetch_error(
    reply: Reply, *, sync: bool = False, limits: Limits | None = None
) -> FeedError:
    async with wire(lambda _: reply) as server:
        with closing(SyncTransport(server.url, limits=limits)) as blocking:
            async with opened(server.url, limits=limits) as transport:
                with pytest.raises(FeedError) as caught:
                    await (
                        anyio.to_thread.run_sync(sync_body_of, blocking)
                        if sync
                        else body_of(transport)
                    )
        assert (caught.value.feed, caught.value.partition) == (server.url, 3)
        return caught.value
