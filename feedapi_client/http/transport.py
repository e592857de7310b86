"""HTTP: the only module that imports httpx.

`Transport` and `SyncTransport` do the I/O and hold little more than that; what to send, what an answer means and which error it is stands in `_Endpoint`,
which they share.
"""

from __future__ import annotations

import logging
import math
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar
from urllib.parse import quote, unquote

import anyio
import httpx
import tenacity

from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.model import public_url
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.dialects import Params
from feedapi_client.protocol.text import excerpt

T = TypeVar("T")
Client = TypeVar("Client", httpx.AsyncClient, httpx.Client)
AsyncHTTP = httpx.AsyncClient
SyncHTTP = httpx.Client
Exchange = Generator[Any, Any, tuple[httpx.Response, bytes]]

logger = logging.getLogger("feedapi_client")

_MAX_REDIRECTS = 5
_SPARE_CONNECTIONS = 4
_EXCERPT_BYTES = 1600
_SHORTEST_SECRET = 4
_PLAIN_HEADERS = frozenset({"host", "accept", "accept-encoding", "connection", "user-agent"})
_PORTS = {"http": 80, "https": 443}
_REFUSED = frozenset({400, 404, 409, 410})
_LATER = frozenset({408, 425, 429})


class _FeedURL(httpx.URL):
    """The URL of one of our requests: httpx logs it, and `_HideQueries` knows it by its type."""


class _HideQueries(logging.Filter):
    """Takes query and credentials out of the request lines that httpx logs, for our requests only."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and any(isinstance(arg, _FeedURL) for arg in record.args):
            record.args = tuple(
                public_url(str(arg)) if isinstance(arg, _FeedURL) else arg for arg in record.args
            )
        return True


class _HideSecrets(logging.Filter):
    """Takes the secrets of feeds in use out of what the layers below httpx log at DEBUG: headers of responses, and of requests over HTTP/2."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        hidden = _without(
            said, {secret for endpoint in list(_ENDPOINTS) for secret in endpoint.secrets()}
        )
        if hidden != said:
            record.msg, record.args = hidden, ()
        return True


_ENDPOINTS: weakref.WeakSet[_Endpoint[Any]] = weakref.WeakSet()

# Once a process: loggers keep their filters, and these leave all other requests alone.
logging.getLogger("httpx").addFilter(_HideQueries())
for _name in (
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
    "hpack.hpack",
    "hpack.table",
):
    logging.getLogger(_name).addFilter(_HideSecrets())


class _Endpoint(Generic[Client]):
    """What both transports share: how a request is made, and what its answer means."""

    def __init__(self, url: str, client: Client) -> None:
        self.client: Client = client
        base = _parse(url)
        self.feed = public_url(url)
        self.origin = _origin(base)
        path, _, query = base.raw_path.decode("ascii").partition("?")
        self._site = f"{base.scheme}://{base.netloc.decode('ascii')}"
        self._path = path
        self._query = query
        self._basic = httpx.BasicAuth(base.username, base.password) if base.userinfo else None
        self._secrets = _secrets(query, base)
        self._sent: httpx.Headers = httpx.Headers()
        _ENDPOINTS.add(self)

    @property
    def auth(self) -> Any:
        """The client's own auth comes first, then the credentials in the feed's URL."""
        return (
            self._basic
            if self._basic is not None and self.client.auth is None
            else httpx.USE_CLIENT_DEFAULT
        )

    def request(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> httpx.Request:
        """A GET of the feed. With `idle_timeout` the response may be silent for that long; else the client's own timeouts hold."""
        path = self._path.rstrip("/") + suffix if suffix else self._path
        own: list[str] = [str(self.client.params)] if self.client.params else []
        query = "&".join(
            filter(
                None,
                [
                    self._query,
                    *own,
                    *[f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in params],
                ],
            )
        )
        try:
            url = _FeedURL(f"{self._site}{path}?{query}" if query else self._site + path)
        except httpx.InvalidURL as error:
            raise ProtocolError(
                "the request's URL is over 64 KiB: the cursor or the filters are too long to be sent",
                **self._where(partition),
            ) from error
        request = self.client.build_request("GET", url, timeout=self._timeout(idle_timeout))
        request.url = url
        return request

    def _timeout(self, idle: float | None) -> Any:
        if idle is None:
            return httpx.USE_CLIENT_DEFAULT
        own = self.client.timeout
        return httpx.Timeout(connect=own.connect, read=idle, write=own.write, pool=own.pool)

    def exchange(
        self,
        request: httpx.Request,
        partition: int | None,
        *,
        discovery: bool = False,
        limit: int = _EXCERPT_BYTES,
    ) -> Exchange:
        """What both transports do, as a generator of its I/O: it yields what `_send` and `_read` return, and takes back what comes of it.

        Returns an answer that is to be read. A fetch's body is still to come then; at a discovery it is there, up to a little over `limit` bytes.
        """
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                response = yield self._send(request)
            except httpx.HTTPError as error:
                self._unanswered(error, partition)
            if response.status_code == 200 and not discovery:
                return response, b""
            self._sent = response.request.headers
            try:
                body = yield self._read(response, limit)
            except httpx.HTTPError as error:
                if response.status_code == 200:
                    self.torn(error, partition)
                body = b""
            onward = self._redirect(response, partition, discovery)
            if onward is None:
                self._judge(response, body, partition, discovery)
                return response, body
            request = onward
        raise self._redirect_error(
            f"more than {_MAX_REDIRECTS} redirects, one after the other", partition, discovery
        )

    def _send(self, request: httpx.Request) -> Any:
        raise NotImplementedError

    def _read(self, response: httpx.Response, limit: int) -> Any:
        """The body, or as much of it as is a little over `limit`; closes the response."""
        raise NotImplementedError

    def _redirect(
        self, response: httpx.Response, partition: int | None, discovery: bool
    ) -> httpx.Request | None:
        """The request to follow a redirect with; None for an answer that is none. Raises when it leads to another origin."""
        request = response.next_request
        if request is None:
            return None
        if _origin(request.url) != self.origin:
            raise self._redirect_error(
                f"the feed redirects (status {response.status_code}) to another origin, {_shown_origin(request.url)}, which is refused: "
                "no credentials are sent there. If the feed has moved, use its new URL",
                partition,
                discovery,
            )
        request.url = _FeedURL(request.url)
        return request

    def _redirect_error(self, message: str, partition: int | None, discovery: bool) -> FeedError:
        return (NegotiationError if discovery else TransportError)(
            message, **self._where(partition)
        )

    def _judge(
        self, response: httpx.Response, body: bytes, partition: int | None, discovery: bool
    ) -> None:
        """Raise what an answer's status means, unless it is for negotiation to look at."""
        status, where = response.status_code, self._where(partition)
        said = f": {self.quote(body)!r}" if body.strip() else ""
        if status in _LATER or status >= 500:
            wish = retry_after(response.headers.get("retry-after"), response.headers.get("date"))
            raise FeedUnavailableError(
                f"the publisher answers status {status}{said}",
                status=status,
                retry_after=wish,
                **where,
            )
        if status in (401, 403):
            raise AuthenticationError(
                f"the publisher answers status {status}{said}. Check the credentials", **where
            )
        if discovery:
            return
        message = f"the publisher answers a fetch with status {status}{said}"
        if status in _REFUSED:
            raise RequestRefusedError(message, status=status, **where)
        raise ProtocolError(f"{message}. Check the URL", **where)

    def quote(self, body: bytes) -> str:
        """An excerpt of a response for a message, without the secrets that we sent and a publisher may echo."""
        return excerpt(body, self.hide)

    def hide(self, text: str) -> str:
        """The text without the query of the feed's URL, and without what was last sent in headers such as Authorization and Cookie."""
        return _without(text, self.secrets())

    def secrets(self) -> set[str]:
        """What `hide` takes out."""
        sent: Iterator[str] = (
            word
            for name, value in self._sent.items()
            if name not in _PLAIN_HEADERS
            for word in value.split()
        )
        return {*self._secrets, *sent}

    def bounded(self, body: bytes, limit: int) -> bytes:
        """The body itself; raises when it is longer than `limit`."""
        if len(body) <= limit:
            return body
        raise NegotiationError(
            f"the discovery is longer than {limit} bytes: raise Limits.max_discovery_bytes if that is to be expected",
            feed=self.feed,
        )

    def _unanswered(self, error: httpx.HTTPError, partition: int | None) -> NoReturn:
        """Raise our error for one of httpx that came before the answer."""
        where = self._where(partition)
        if isinstance(error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol)):
            # Its text may quote a header of ours, credentials included: it is not shown, and not chained.
            raise TransportError(
                "the request can't be sent: check the http client's headers and proxies", **where
            ) from None
        if isinstance(error, httpx.PoolTimeout):
            raise FeedUnavailableError(
                "no connection came free in time: give the http client a larger pool, or lower Limits.max_concurrent_fetches",
                **where,
            ) from error
        raise FeedUnavailableError(
            f"no answer: {self.hide(_described(error))}", **where
        ) from _chainable(error)

    def torn(self, error: httpx.HTTPError, partition: int | None) -> NoReturn:
        """Raise our error for one of httpx that came within the body."""
        raise TornResponseError(
            f"the response broke off: {self.hide(_described(error))}", **self._where(partition)
        ) from _chainable(error)

    def _where(self, partition: int | None) -> dict[str, Any]:
        return {"feed": self.feed, "partition": partition}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.feed}>"


class Transport(_Endpoint[httpx.AsyncClient]):
    """GET requests of one feed over httpx, on asyncio and trio. Several tasks may use it at once.

    `http` is the caller's client: used as it is, and never closed. Without it the transport makes one of its own, and `aclose` closes that. Raises
    `NegotiationError` for a URL that can't be one of a feed.
    """

    def __init__(
        self, url: str, *, http: httpx.AsyncClient | None = None, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        _check(url, http, httpx.AsyncClient)
        super().__init__(url, http or httpx.AsyncClient(**_own_client(url, limits)))
        self._owned = http is None

    async def aclose(self) -> None:
        """Close the client, unless it is the caller's."""
        if self._owned:
            await self.client.aclose()

    async def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """Status and body of an answer, for negotiation.

        Raises `AuthenticationError`, `FeedUnavailableError`, `TornResponseError`, and `NegotiationError` for a body over `max_bytes` or a redirect to
        another origin.
        """
        response, body = await self.drive(
            self.exchange(self.request(suffix, params), None, discovery=True, limit=max_bytes)
        )
        return response.status_code, self.bounded(body, max_bytes)

    def stream(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> Answer:
        """A fetch, to be entered: ``async with transport.stream(...) as answer: async for chunk in answer: ...``."""
        return Answer(
            self,
            self.request(suffix, params, partition=partition, idle_timeout=idle_timeout),
            partition,
        )

    @staticmethod
    async def drive(exchange: Exchange) -> tuple[httpx.Response, bytes]:
        """Do an exchange's I/O."""
        try:
            step = next(exchange)
            while True:
                try:
                    result = await step
                except BaseException as error:  # noqa: BLE001 - the exchange says what becomes of it, of a cancellation too
                    step = exchange.throw(error)
                else:
                    step = exchange.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _send(self, request: httpx.Request) -> Awaitable[httpx.Response]:
        return self.client.send(request, stream=True, auth=self.auth, follow_redirects=False)

    async def _read(self, response: httpx.Response, limit: int) -> bytes:
        body = bytearray()
        chunks = response.aiter_bytes()
        try:
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    await _abandon(chunks)
                    break
        finally:
            await response.aclose()
        return bytes(body)


class Answer:
    """A 200 response, while it is entered: an asynchronous iterator of its chunks.

    Entering sends the request and raises what `Transport.get` does, and `RequestRefusedError` and `ProtocolError` for the other statuses. Iterating raises
    `TornResponseError` when the body breaks off. Leaving closes the connection if the body was not read to its end.
    """

    __slots__ = ("_chunks", "_partition", "_request", "_response", "_transport", "_under_way")

    def __init__(self, transport: Transport, request: httpx.Request, partition: int | None) -> None:
        self._transport = transport
        self._request = request
        self._partition = partition
        self._under_way = False

    async def __aenter__(self) -> Self:
        self._response, _ = await self._transport.drive(
            self._transport.exchange(self._request, self._partition)
        )
        self._chunks = self._response.aiter_bytes()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._under_way:
                await _abandon(self._chunks)
        finally:
            await self._response.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        self._under_way = False  # until there is a chunk: an exception ends the iteration
        try:
            chunk = await self._chunks.__anext__()
        except httpx.HTTPError as error:
            self._transport.torn(error, self._partition)
        self._under_way = True
        return chunk


async def _abandon(chunks: AsyncIterator[bytes]) -> None:
    """End a body that is not read to its end.

    httpx iterates through a chain of generators, and closing the outermost leaves the others to the garbage collector, which trio warns of. A read that is
    cancelled ends them all, in order.
    """
    with anyio.CancelScope(shield=True) as scope:
        scope.cancel()
        try:
            async for _ in chunks:  # what is in memory already comes without a wait
                pass
        except httpx.HTTPError:
            pass


class SyncTransport(_Endpoint[httpx.Client]):
    """The same over `httpx.Client`."""

    def __init__(
        self, url: str, *, http: httpx.Client | None = None, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        _check(url, http, httpx.Client)
        super().__init__(url, http or httpx.Client(**_own_client(url, limits)))
        self._owned = http is None

    def close(self) -> None:
        """Close the client, unless it is the caller's."""
        if self._owned:
            self.client.close()

    def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """See `Transport.get`."""
        response, body = self.drive(
            self.exchange(self.request(suffix, params), None, discovery=True, limit=max_bytes)
        )
        return response.status_code, self.bounded(body, max_bytes)

    def stream(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> SyncAnswer:
        """See `Transport.stream`."""
        return SyncAnswer(
            self,
            self.request(suffix, params, partition=partition, idle_timeout=idle_timeout),
            partition,
        )

    @staticmethod
    def drive(exchange: Exchange) -> tuple[httpx.Response, bytes]:
        """Do an exchange's I/O, which happens in its own calls here."""
        try:
            step = next(exchange)
            while True:
                step = exchange.send(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _send(self, request: httpx.Request) -> httpx.Response:
        return self.client.send(request, stream=True, auth=self.auth, follow_redirects=False)

    def _read(self, response: httpx.Response, limit: int) -> bytes:
        body = bytearray()
        try:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > limit:
                    break
        finally:
            response.close()
        return bytes(body)


class SyncAnswer:
    """See `Answer`."""

    __slots__ = ("_chunks", "_partition", "_request", "_response", "_transport")

    def __init__(
        self, transport: SyncTransport, request: httpx.Request, partition: int | None
    ) -> None:
        self._transport = transport
        self._request = request
        self._partition = partition

    def __enter__(self) -> Self:
        self._response, _ = self._transport.drive(
            self._transport.exchange(self._request, self._partition)
        )
        self._chunks = self._response.iter_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._response.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._chunks)
        except httpx.HTTPError as error:
            self._transport.torn(error, self._partition)


def backoff(policy: RetryPolicy, attempt: int, error: FeedError | None = None) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1): what the server asked for, within bounds, or exponential backoff with full jitter."""
    wish = error.retry_after if isinstance(error, FeedUnavailableError) else None
    if wish is not None:
        return min(wish, policy.max_retry_after)
    state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = attempt + 1
    return float(
        tenacity.wait_random_exponential(multiplier=policy.base_delay, max=policy.max_delay)(state)
    )


async def retrying(policy: RetryPolicy, call: Callable[[], Awaitable[T]]) -> T:
    """`call`, again and again as `policy` says; its last error once that gives up. Only a `FeedError` is ever retried."""

    async def attempt() -> (
        T
    ):  # whatever `call` is, this is what tenacity takes for a coroutine function
        return await call()

    return await tenacity.AsyncRetrying(sleep=anyio.sleep, **_rules(policy))(attempt)


def retrying_sync(policy: RetryPolicy, call: Callable[[], T]) -> T:
    """See `retrying`."""
    return tenacity.Retrying(sleep=time.sleep, **_rules(policy))(call)


def _rules(policy: RetryPolicy) -> dict[str, Any]:
    def failed(state: tenacity.RetryCallState) -> FeedError:
        error = state.outcome.exception() if state.outcome else None
        assert isinstance(error, FeedError)
        return error

    return {
        "retry": tenacity.retry_if_exception(
            lambda error: isinstance(error, FeedError) and policy.decide(error) == "retry"
        ),
        "wait": lambda state: backoff(policy, state.attempt_number, failed(state)),
        "stop": tenacity.stop_never
        if policy.give_up_after is None
        else tenacity.stop_before_delay(policy.give_up_after),
        "before_sleep": lambda state: logger.warning(
            "%s; attempt %d in %.1f s",
            failed(state),
            state.attempt_number + 1,
            state.upcoming_sleep,
        ),
        "reraise": True,
    }


def retry_after(value: str | None, now: str | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, in either of its forms; None without one, or for one that can't be read.

    `now` is the response's Date: taken together, the two do not depend on how the publisher's clock differs from ours.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        later = _timestamp(value)
        if later is None:
            return None
        seconds = later - (_timestamp(now) or time.time())
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _timestamp(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError, OSError):
        return None


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        # The reason may quote a part of the URL, which may be a part of a password.
        raise NegotiationError(f"the feed's URL can't be read ({type(error).__name__})") from None
    if parsed.scheme not in _PORTS or not parsed.host:
        raise NegotiationError("the feed's URL must begin with http:// or https:// and name a host")
    return parsed


def _check(url: str, http: object, kind: type) -> None:
    _parse(url)
    if http is not None and not isinstance(http, kind):
        raise TypeError(f"http must be an httpx.{kind.__name__}, not {type(http).__name__}")


def _own_client(url: str, limits: Limits) -> dict[str, Any]:
    """The settings of a client of our own."""
    size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
    # An idle partition's connection lives until its next poll.
    pool = httpx.Limits(
        max_connections=size,
        max_keepalive_connections=size,
        keepalive_expiry=2 * limits.max_poll_interval,
    )
    settings = {"limits": pool, "timeout": limits.request_timeout}
    if url.lower().startswith("http:"):
        # Another origin is refused, so TLS is never spoken. A context that trusts nobody spares the loading of all certificates, some 20 ms.
        settings["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return settings


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _shown_origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"


def _without(text: str, secrets: set[str]) -> str:
    for secret in sorted(
        secrets, key=len, reverse=True
    ):  # the longest first, so that no rest of one stays
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _secrets(query: str, base: httpx.URL) -> set[str]:
    """What a publisher might echo of the feed's URL."""
    values = [
        query,
        *(pair.partition("=")[2] for pair in query.split("&")),
        base.password,
        base.userinfo.decode("ascii"),
    ]
    return {
        form
        for value in values
        for form in (value, unquote(value), unquote(value.replace("+", " ")))
    }


def _described(error: httpx.HTTPError) -> str:
    text = str(error)
    return (
        f"{type(error).__name__}: {text}"
        if text and _chainable(error) is not None
        else type(error).__name__
    )


def _chainable(error: httpx.HTTPError) -> httpx.HTTPError | None:
    """The error itself, unless its text quotes received bytes, which may be a payload."""
    return None if "b'" in str(error) or 'b"' in str(error) else error
