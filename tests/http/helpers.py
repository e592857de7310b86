"""Transports opened against a scripted server, and what they read."""

from __future__ import annotations

from contextlib import aclosing, closing
from typing import Any

import anyio
import pytest

from feedapi_client.errors import FeedError
from feedapi_client.http.sync import SyncTransport
from feedapi_client.http.transport import Transport
from feedapi_client.options import Limits
from tests.client.wire import Reply, wire

LIMIT = 1 << 20
LINE = b'{"cursor":"c"}\n'


async def body_of(
    transport: Transport, params: list[tuple[str, str]] | None = None, **more: Any
) -> bytes:
    async with transport.stream("/events", params or [], partition=3, **more) as answer:
        return b"".join([piece async for piece in answer])


def sync_body_of(transport: SyncTransport) -> bytes:
    with transport.stream("/events", [], partition=3) as answer:
        return b"".join(answer)


def opened(url: str, **more: Any) -> aclosing[Transport]:
    return aclosing(Transport(url, **more))


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
