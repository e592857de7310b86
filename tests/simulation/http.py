"""An `httpx.AsyncClient` that passes each request straight to the simulated publisher.

What httpx does between a client and its transport (authentication, cookies, redirects, merging of
headers and parameters) is left out: it takes most of the time of a request, and no simulated
publisher asks for it. The tests of `http/` cover it with real connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from types import MappingProxyType
from typing import Any

import httpx

REQUEST_SECONDS = 30.0
_TIMEOUT = httpx.Timeout(REQUEST_SECONDS).as_dict()
_NO_HEADERS: Any = MappingProxyType({})
"""Nothing is looked up in it but single headers, which takes less time than in httpx's."""


class SimulatedRequest(httpx.Request):
    """A GET without headers."""

    def __init__(self, url: httpx.URL, timeout: Any) -> None:
        self.method = "GET"
        self.url = url
        self.headers = _NO_HEADERS
        self.extensions = {"timeout": timeout}


class SimulatedResponse(httpx.Response):
    """A response whose body comes from `simulated_body`, which calls `end` at its end.

    `closed` is called once, when the response is closed.
    """

    simulated_body: AsyncIterator[bytes]

    def __init__(
        self,
        status: int,
        request: httpx.Request,
        closed: Callable[[], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code = status
        self.request = request
        self.headers = httpx.Headers(headers) if headers else _NO_HEADERS
        self.extensions = {}
        self.history = []
        self.next_request = None
        self.is_closed = self.is_stream_consumed = False
        self.simulated_close = closed

    def aiter_raw(
        self,
        chunk_size: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Return the chunks of the body as they come."""
        self.is_stream_consumed = True
        return self.simulated_body

    async def aclose(self) -> None:
        """Close the response."""
        self.end()

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status_code < 300

    def end(self) -> None:
        """Close the response, as httpx does when the body has come."""
        if not self.is_closed:
            self.is_closed = True
            self.simulated_close()


Respond = Callable[[httpx.Request], Awaitable[httpx.Response]]


class SimulatedClient(httpx.AsyncClient):
    """The connections of one process. `simulated_respond` answers a request."""

    simulated_respond: Respond

    def build_request(
        self,
        method: str,
        url: Any,
        **options: Any,
    ) -> httpx.Request:
        """Return a request of that URL, with `timeout` as httpx gives it to a transport."""
        timeout = options.get("timeout")
        own = timeout.as_dict() if isinstance(timeout, httpx.Timeout) else _TIMEOUT
        return SimulatedRequest(url, own)

    async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        """Send a request to the publisher."""
        return await self.simulated_respond(request)


_UNUSED = httpx.MockTransport(lambda _: httpx.Response(500))
_NEW = SimulatedClient(transport=_UNUSED, timeout=REQUEST_SECONDS, trust_env=False)


def simulated_client(respond: Respond) -> SimulatedClient:
    """Return the connections of one process. `respond` answers a request.

    It is a copy of a client that was never used: httpx takes long to make one.
    """
    client = copy(_NEW)
    client.simulated_respond = respond
    return client
