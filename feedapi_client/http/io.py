"""How requests are sent: `AsyncIO` by connections of our own or `httpx.AsyncClient`, `BlockingIO`
by `httpx.Client`.

Both have the same coroutines, which `Endpoint` awaits. Those of `BlockingIO` never suspend.
"""

from __future__ import annotations

import math
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.request import getproxies

import anyio
import anyio.lowlevel
import httpx
from anyio import to_thread

from feedapi_client.arguments import check_instance
from feedapi_client.causes import failure_of
from feedapi_client.http.environment import ByEnvironment, is_patched, proxy_of, public_certificates
from feedapi_client.http.urls import parse_url
from feedapi_client.http.wire import Fetcher, WireBody
from feedapi_client.options import Limits

T = TypeVar("T")
AsyncHTTP = httpx.AsyncClient
SyncHTTP = httpx.Client
# Of the time for an exchange: the timeouts of httpx come before. It closes the connection then, and
# the socket of a TLS handshake, which it leaves to the garbage collector when it is cancelled.
SHARE = 0.9
_SPARE_CONNECTIONS = 4
_MIN_KEEPALIVE_EXPIRY = 30.0
_SLICE = 0.001  # seconds that a response may be worked on until other tasks get their turn
_LONG = 64 * 1024  # bytes that take a millisecond or two to read: some thousand partitions
_LONGEST = 86_400.0  # seconds of a read that is not limited


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not suspend, as those over `BlockingIO`. Raises RuntimeError if it
    does.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine of the synchronous client waits for an event loop")


def basic(user: str, password: str) -> str:
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


class Deadline(NamedTuple):
    """When an exchange has to be complete, on the clock `now`, and within how many seconds."""

    at: float
    seconds: float


_NEVER = Deadline(math.inf, math.inf)


class _IO:
    """Sends requests by the caller's client, or by one of its own, which trusts the public
    certificates, or those of `verify`.
    """

    kinds: ClassVar[tuple[Any, Any]]

    def __init__(
        self,
        url: str,
        http: Any = None,
        limits: Limits | None = None,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        check_instance("limits", limits, Limits, "Limits or None")
        self.site = parse_url(url)
        kind, transport = self.kinds
        if http is not None and not isinstance(http, kind):
            raise TypeError(f"http must be an httpx.{kind.__name__}, not {type(http).__name__}")
        self.limits, self.owned = limits or Limits(), http is None
        self.client: Any = http
        if http is None:
            self.verify = verify or _trust(self.site)
            self.places = self.limits.max_concurrent_fetches + _SPARE_CONNECTIONS
            # An idle connection of a partition is kept until its next poll. The floor keeps httpx
            # from a race: it may close one that expires after a request took it.
            self.expiry = max(_MIN_KEEPALIVE_EXPIRY, 2 * self.limits.max_poll_interval)
            pool = httpx.Limits(
                max_connections=self.places,
                max_keepalive_connections=self.places,
                keepalive_expiry=self.expiry,
            )
            seconds = self.limits.request_timeout
            self.client = kind(
                transport=ByEnvironment(transport, verify=self.verify, limits=pool),
                timeout=httpx.Timeout(seconds, connect=SHARE * seconds),
                # Load balancers set cookies under ever new names with each response: none is kept.
                cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
                trust_env=False,
            )


class HTTPXBody:
    """A response of httpx. One that is in memory already, as those of `httpx.MockTransport` are,
    was decoded by httpx; its raw bytes can't be had again.
    """

    iterates: ClassVar = ("aiter_raw", "aiter_bytes")

    def __init__(self, response: httpx.Response) -> None:
        self._response, self._under_way = response, False
        self.status, self.headers = response.status_code, response.headers
        decoded = response.is_stream_consumed
        self.coding = "" if decoded else self.headers.get("content-encoding", "")
        self._chunks: Any = getattr(response, self.iterates[decoded])()

    async def read(self) -> bytes | None:
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
    """End a body that is not read to its end. httpx iterates through a chain of generators. Closing
    the outermost leaves the others to the garbage collector, which trio warns of. A read that is
    cancelled ends them all, in order.
    """
    with anyio.CancelScope(shield=True) as scope, suppress(Exception):
        scope.cancel()
        async for _ in chunks:  # what is in memory already comes without a wait
            pass


class BlockingBody(HTTPXBody):
    iterates: ClassVar = ("iter_raw", "iter_bytes")

    async def read(self) -> bytes | None:
        return next(self._chunks, None)

    async def aclose(self) -> None:
        try:
            self._response.close()
        except BaseException as error:  # noqa: BLE001 - raised where it ends the caller
            failure_of(error)


class AsyncIO(_IO):
    """On asyncio and trio, by connections of its own, unless httpx has to send the requests: for a
    caller's client, through a proxy, and where somebody has replaced methods of httpx, as tests and
    tracers do.
    """

    kinds = httpx.AsyncClient, httpx.AsyncHTTPTransport
    body = HTTPXBody
    now = staticmethod(anyio.current_time)
    sleep = staticmethod(anyio.sleep)

    def __init__(
        self,
        url: str,
        http: httpx.AsyncClient | None = None,
        limits: Limits | None = None,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(url, http, limits, verify)
        self._turn = anyio.Lock(fast_acquire=True)
        self._wire: Fetcher | None = None
        if self.owned and proxy_of(self.site) is None:
            self._wire = Fetcher(
                self.site,
                self.verify,
                places=self.places,
                seconds=SHARE * self.limits.request_timeout,
                expiry=self.expiry,
                read_bytes=self.limits.read_bytes,
            )

    @property
    def wire(self) -> Fetcher | None:
        no_use = self.client.is_closed or is_patched(type(self.client))
        return None if no_use else self._wire

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """Return what `work` on so many bytes returns; on many it runs in a thread (R16)."""
        return await to_thread.run_sync(work) if size >= _LONG else work()

    async def others(self, since: float = math.inf) -> None:
        """Let other tasks run. Of those that worked for long `since` then, one goes on in a turn of
        the loop: a turn of 64 would be long, too.
        """
        if anyio.current_time() < since + _SLICE / 2:
            await anyio.lowlevel.checkpoint()
        else:
            async with self._turn:
                await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        if self.owned:
            await self.client.aclose()
        if self._wire is not None:
            await self._wire.aclose()

    async def attempt(
        self, call: Awaitable[T], _silence: float | None, deadline: Deadline
    ) -> T | Exception:
        """Await a call until a deadline. Return its result, or what it failed with (R14)."""
        try:
            with anyio.CancelScope(deadline=deadline.at):
                return await call
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            return failure_of(error)
        return too_slow(deadline.seconds)

    async def send(self, request: httpx.Request, auth: Any) -> HTTPXBody:
        # A response that is in memory comes, and is read, without a wait. Not behind it: a
        # cancellation there would leave it open.
        await self.others()
        response = await self.client.send(request, stream=True, auth=auth, follow_redirects=False)
        return self.body(response)

    def read_timeout(self, silence: float | None) -> Any:
        return silence


class BlockingIO(_IO):
    """`AsyncIO` for threads, over `httpx.Client`: its coroutines never suspend."""

    kinds = httpx.Client, httpx.HTTPTransport
    body = BlockingBody
    now = staticmethod(time.monotonic)
    wire = None

    async def aclose(self) -> None:
        if self.owned:
            self.client.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs it

    async def aside(self, work: Callable[[], T], _size: int) -> T:
        return work()  # threads need none of this

    async def others(self, since: float = math.inf) -> None: ...

    async def attempt(
        self, call: Awaitable[T], silence: ReadTimeout, deadline: Deadline
    ) -> T | Exception:
        silence.deadline = deadline
        try:
            return await call
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            return failure_of(error)
        finally:
            silence.deadline = _NEVER

    async def send(self, request: httpx.Request, auth: Any) -> BlockingBody:
        response = self.client.send(request, stream=True, auth=auth, follow_redirects=False)
        return self.body(response)

    def read_timeout(self, silence: float | None) -> Any:
        return ReadTimeout(silence)


class ReadTimeout:
    """The read timeout of a request, which also ends its exchange at a deadline: a blocking read
    can't be cancelled. It goes to `socket.settimeout` before each read, which asks an object that
    is no float for an integer: so each read gets what is left, in whole seconds.
    """

    def __init__(self, silence: float | None) -> None:
        self._silence = _LONGEST if silence is None else silence
        self.deadline = _NEVER

    def __index__(self) -> int:
        seconds = min(self._silence, self.deadline.at - time.monotonic(), _LONGEST)
        if seconds <= 0:
            raise TimeoutError(str(too_slow(self.deadline.seconds)))
        return math.ceil(seconds)


Body = HTTPXBody | WireBody


def too_slow(seconds: float) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"not complete after {seconds:g} s")


def _trust(site: httpx.URL) -> ssl.SSLContext:
    """Another origin is refused, so TLS is never spoken for http: without a proxy. A context
    without certificates saves the time to load them, some 20 ms.
    """
    plain = site.scheme == "http" and not getproxies().keys() - {"no"}
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else public_certificates()
