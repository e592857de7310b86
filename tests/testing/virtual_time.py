"""Call a publisher's ASGI application on a clock that jumps ahead whenever every task waits.

A test that uses it waits for an hour at no cost, and its result does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import anyio
import httpx
import trio.testing

from feedapi_client.testing import Publisher
from feedapi_client.testing.simulator.loop import new_loop

HOUR = 3600.0


def run_in_virtual_time(test: Callable[[], Awaitable[None]], backend: str = "trio") -> None:
    options: dict[str, Any] = {"clock": trio.testing.MockClock(autojump_threshold=0)}
    if backend == "asyncio":
        options = {"loop_factory": lambda: new_loop(Random(0))}
    anyio.run(test, backend=backend, backend_options=options)


def asgi_client(publisher: Publisher) -> httpx.AsyncClient:
    """Return a client of the application, without a socket. Its URL of the feed is ``/feed``."""
    transport = httpx.ASGITransport(publisher.asgi)
    return httpx.AsyncClient(transport=transport, base_url="http://feed", timeout=None)


def asgi_scope(path: str, query: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query.encode(),
        "headers": [],
    }
