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
from tests.simulation.loop import new_loop

HOUR = 3600.0


def run_in_virtual_time(test: Callable[[], Awaitable[None]], backend: str = "trio") -> None:
    name, options = virtual_backend(backend)
    anyio.run(test, backend=name, backend_options=options)


def virtual_backend(backend: str) -> tuple[str, dict[str, Any]]:
    """Return what a fixture `anyio_backend` returns for async tests on virtual time."""
    if backend == "asyncio":
        return backend, {"loop_factory": lambda: new_loop(Random(0))}
    return backend, {"clock": trio.testing.MockClock(autojump_threshold=0)}


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
