"""How requests are sent: `AsyncIO` by `httpx.AsyncClient`, `BlockingIO` by `httpx.Client`.

Both have the same coroutines, which `Endpoint` awaits. Those of `BlockingIO` never suspend.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NamedTuple, TypeVar
from urllib.request import getproxies

import anyio
import anyio.lowlevel
import httpx

from feedapi_client.arguments import check_instance
from feedapi_client.causes import failure_of
from feedapi_client.http.connections import ConnectionPerRequest, LargeReadsTransport
from feedapi_client.http.environment import ByEnvironment, public_certificates
from feedapi_client.http.urls import parse_url
from feedapi_client.options import Limits

T = TypeVar("T")
AsyncHTTP = httpx.AsyncClient
SyncHTTP = httpx.Client
SHARE = 0.9
"""Of the time for an exchange: httpcore's own timeouts come before. It closes the connection then,
and the socket of a TLS handshake, which it leaves to the garbage collector when it is cancelled."""
_SPARE_CONNECTIONS = 4
_MIN_KEEPALIVE_EXPIRY = 30.0
_SLICE = 0.001
"""Seconds that a response may be worked on until other tasks get their turn."""
_LONGEST = 86_400.0
"""Seconds of a read that is not limited."""
_ASYNC_SEND = httpx.AsyncHTTPTransport.handle_async_request
_SEND = httpx.HTTPTransport.handle_request
"""httpx's own methods, which pytest-httpx replaces."""


class Deadline(NamedTuple):
    """When an exchange has to be complete, on the clock `now`, and within how many seconds."""

    at: float
    seconds: float


_NEVER = Deadline(math.inf, math.inf)


class AsyncIO:
    """Sends requests on asyncio and trio, by the caller's client or by one of its own.

    Raises `NegotiationError` for a URL that can't be a feed's, TypeError for a client of another
    kind.
    """

    now = staticmethod(anyio.current_time)
    sleep = staticmethod(anyio.sleep)
    lock = anyio.Lock

    def __init__(
        self, url: str, http: httpx.AsyncClient | None = None, limits: Limits | None = None
    ) -> None:
        _check(url, http, httpx.AsyncClient, limits)
        self.limits = limits = limits or Limits()
        self.owned = http is None
        self.client: httpx.AsyncClient = http or _own_client(httpx.AsyncClient, url, limits, None)

    async def aclose(self) -> None:
        """Close the client, unless it is the caller's."""
        if self.owned:
            await self.client.aclose()

    async def attempt(
        self, call: Awaitable[T], _request: httpx.Request, deadline: Deadline
    ) -> T | Exception:
        """Await a call until a deadline. Return its result, or what it failed with (R14)."""
        try:
            with anyio.CancelScope(deadline=deadline.at):
                return await call
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            return failure_of(error)
        return too_slow(deadline.seconds)

    async def send(self, request: httpx.Request, auth: Any) -> httpx.Response:
        """Send a request, and return the response without its body."""
        return await self.client.send(request, stream=True, auth=auth, follow_redirects=False)

    def read_timeout(self, silence: float | None) -> Any:
        """The timeout of one read, as httpx takes it."""
        return silence

    async def others(self) -> None:
        """Let other tasks run."""
        await anyio.lowlevel.checkpoint()

    def body(self, response: httpx.Response) -> AsyncBody:
        """The body of a response, which is closed with it."""
        return AsyncBody(response)


class AsyncBody:
    """Chunks of a response."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        decoded = response.is_stream_consumed
        self._chunks = response.aiter_bytes() if decoded else response.aiter_raw()
        self._under_way = False
        self._until = 0.0

    async def read(self) -> bytes | None:
        """Return the next chunk, None at the end."""
        if (now := anyio.current_time()) >= self._until:  # a read may bring thousands of chunks
            await anyio.lowlevel.checkpoint()
            self._until = now + _SLICE
        self._under_way = False  # until there is a chunk: an exception ends the iteration
        chunk = await anext(self._chunks, None)
        self._under_way = chunk is not None
        return chunk

    async def aclose(self) -> None:
        """Close the response. Of one that was received, an error at its end says nothing (R14)."""
        try:
            if self._under_way:
                await abandon(self._chunks)
        finally:
            try:
                await self._response.aclose()
            except BaseException as error:  # noqa: BLE001 - raised where it ends the caller
                failure_of(error)


async def abandon(chunks: AsyncIterator[bytes]) -> None:
    """End a body that is not read to its end.

    httpx iterates through a chain of generators. Closing the outermost leaves the others to the
    garbage collector, which trio warns of. A read that is cancelled ends them all, in order.
    """
    with anyio.CancelScope(shield=True) as scope:
        scope.cancel()
        try:
            async for _ in chunks:  # what is in memory already comes without a wait
                pass
        except Exception:  # noqa: BLE001, S110 - what is not read can't fail any more
            pass


class BlockingIO:
    """`AsyncIO` for threads, over `httpx.Client`: its coroutines never suspend.

    `verify` says which certificates a client of its own trusts: by default the public ones.
    """

    now = staticmethod(time.monotonic)

    def __init__(
        self,
        url: str,
        http: httpx.Client | None = None,
        limits: Limits | None = None,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        _check(url, http, httpx.Client, limits)
        self.limits = limits = limits or Limits()
        self.owned = http is None
        self.client: httpx.Client = http or _own_client(httpx.Client, url, limits, verify)

    async def aclose(self) -> None:
        """Close the client, unless it is the caller's."""
        if self.owned:
            self.client.close()

    async def sleep(self, seconds: float) -> None:
        """Block the thread."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs it

    async def attempt(
        self, call: Awaitable[T], request: httpx.Request, deadline: Deadline
    ) -> T | Exception:
        """See `AsyncIO.attempt`."""
        timeout: ReadTimeout = request.extensions["timeout"]["read"]
        timeout.deadline = deadline
        try:
            return await call
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            return failure_of(error)
        finally:
            timeout.deadline = _NEVER

    async def send(self, request: httpx.Request, auth: Any) -> httpx.Response:
        """See `AsyncIO.send`."""
        return self.client.send(request, stream=True, auth=auth, follow_redirects=False)

    def read_timeout(self, silence: float | None) -> Any:
        """See `AsyncIO.read_timeout`. It also bounds the exchange as a whole."""
        return ReadTimeout(silence)

    async def others(self) -> None:
        """Threads need none of this."""

    def body(self, response: httpx.Response) -> BlockingBody:
        """See `AsyncIO.body`."""
        return BlockingBody(response)


class BlockingBody:
    """See `AsyncBody`."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        decoded = response.is_stream_consumed
        self._chunks: Iterator[bytes] = response.iter_bytes() if decoded else response.iter_raw()

    async def read(self) -> bytes | None:
        """Return the next chunk, None at the end."""
        return next(self._chunks, None)

    async def aclose(self) -> None:
        """See `AsyncBody.aclose`."""
        try:
            self._response.close()
        except BaseException as error:  # noqa: BLE001 - raised where it ends the caller
            failure_of(error)


class ReadTimeout:
    """The read timeout of a request, which also ends its exchange at a deadline.

    httpx has no such bound, and a blocking read can't be cancelled. httpcore gives a request's read
    timeout to `socket.settimeout` before each read, which asks an object that is no float for an
    integer: so each read gets what is left, in whole seconds.

    `silence`: seconds that one read may take; None: any number.
    """

    def __init__(self, silence: float | None) -> None:
        self._silence = _LONGEST if silence is None else silence
        self.deadline = _NEVER

    def __index__(self) -> int:
        seconds = min(self._silence, self.deadline.at - time.monotonic(), _LONGEST)
        if seconds <= 0:
            raise TimeoutError(str(too_slow(self.deadline.seconds)))
        return math.ceil(seconds)


Body = AsyncBody | BlockingBody


def too_slow(seconds: float) -> httpx.ReadTimeout:
    """The error of an exchange that goes on for too long although it is never silent."""
    return httpx.ReadTimeout(f"not complete after {seconds:g} s")


def _own_client(kind: Any, url: str, limits: Limits, verify: ssl.SSLContext | None) -> Any:
    """A client of our own, an `httpx.AsyncClient` or `httpx.Client`."""
    proxies = getproxies().keys() - {"no"}
    if verify is None:
        # Another origin is refused, so TLS is never spoken for http:. A context without
        # certificates saves the time to load them, some 20 ms.
        plain = url.lower().startswith("http:") and not proxies
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else public_certificates()
    size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
    pool = httpx.Limits(
        max_connections=size,
        max_keepalive_connections=size,
        # An idle partition's connection lives until its next poll. The floor keeps httpcore from a
        # race of its own: it may close a connection that expires after a request took it.
        keepalive_expiry=max(_MIN_KEEPALIVE_EXPIRY, 2 * limits.max_poll_interval),
    )
    is_async = kind is httpx.AsyncClient
    patched = (
        httpx.AsyncHTTPTransport.handle_async_request is not _ASYNC_SEND
        if is_async
        else httpx.HTTPTransport.handle_request is not _SEND
    )
    transport: Any
    if proxies or patched:
        of_httpx = httpx.AsyncHTTPTransport if is_async else httpx.HTTPTransport
        transport = ByEnvironment(of_httpx, verify=verify, limits=pool)
    else:
        ours: Any = ConnectionPerRequest if is_async else LargeReadsTransport
        transport = ours(verify, pool, read_bytes=limits.read_bytes)
    return kind(
        transport=transport,
        timeout=httpx.Timeout(limits.request_timeout, connect=SHARE * limits.request_timeout),
        # Load balancers set cookies under ever new names with each response: none is kept.
        cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
        trust_env=False,
    )


def _check(url: str, http: object, kind: type, limits: object) -> None:
    check_instance("limits", limits, Limits, "Limits or None")
    parse_url(url)
    if http is not None and not isinstance(http, kind):
        raise TypeError(f"http must be an httpx.{kind.__name__}, not {type(http).__name__}")
