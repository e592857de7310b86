"""One request and its response, without I/O: what is sent, and which error a status means.

`Transport` and `SyncTransport` drive it and hold little more than the I/O.
"""

from __future__ import annotations

import re
import ssl
from base64 import b64decode
from collections.abc import Generator
from contextlib import suppress
from functools import cache, lru_cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import httpx

from feedapi_client.arguments import OneProcess
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    HostError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.http.decompression import (
    CodingError,
    Decompressor,
    UnsupportedCodingError,
    accept_encoding,
    decompressor,
)
from feedapi_client.http.httpx_errors import (
    RequestFault,
    chainable,
    described,
    fault_of,
    host_problem,
    request_of_location,
    response_in,
    the_error,
)
from feedapi_client.http.redaction import hide_secrets, register
from feedapi_client.http.retry_after import retry_after
from feedapi_client.http.urls import (
    decoded,
    feed_urls,
    foreign_secrets,
    origin,
    query_secrets,
    shown_origin,
)
from feedapi_client.options import Limits
from feedapi_client.protocol.dialects import Params
from feedapi_client.protocol.text import excerpt

Client = TypeVar("Client", httpx.AsyncClient, httpx.Client)
Exchange = Generator[Any, Any, tuple[httpx.Response, bytes]]
"""Yields I/O for a transport to do, is sent its result, and returns the response and its body."""

_MAX_REDIRECTS = 5
_SPARE_CONNECTIONS = 4
_MIN_KEEPALIVE_EXPIRY = 30.0
SHARE = 0.9
"""Of the time for an exchange: httpcore's own timeouts come before. It closes the connection then,
and the socket of a TLS handshake, which it leaves to the garbage collector when it is cancelled."""
_EXCERPT_BYTES = 1600
_PLAIN_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "user-agent"}
)
_USER_AGENT_OF_HTTPX = f"python-httpx/{httpx.__version__}"
_UNSENDABLE = "the request can't be sent: check the http client's headers, proxies and auth"
_URL_ERRORS = (httpx.InvalidURL, UnicodeError)
_REFUSED = frozenset({400, 404, 409, 410})
_LATER = frozenset({408, 425, 429})
_SOME_REDIRECT = 302
"""Stands for the status of a redirect to a URL that httpx can't read: its error has none."""


class Endpoint(Generic[Client]):
    """A feed for both transports: makes requests and classifies responses."""

    _owned: bool
    """Whether the client is one of ours."""

    def __init__(self, url: str, client: Client, limits: Limits) -> None:
        self.client: Client = client
        self.limits = limits
        self._urls = feed_urls(url)
        self._url = self._urls.feed
        self._basic = httpx.BasicAuth(*self._url.basic_auth) if self._url.basic_auth else None
        self._sent: WeakKeyDictionary[httpx.Request, None] = WeakKeyDictionary()
        """The requests under way, whose URL and headers an auth may change, and `_last`."""
        self._last: httpx.Request | None = None
        self._used_in: OneProcess | None = None
        register(self)

    @property
    def feed(self) -> str:
        """The feed's URL for messages."""
        return self._url.public

    def owns(self, url: httpx.URL) -> bool:
        """Whether a request to the URL is one of this feed's."""
        return origin(url) == self._url.origin and url.path.startswith(self._url.path.rstrip("/"))

    @property
    def auth(self) -> Any:
        """Auth of the request: the client's own, otherwise the credentials in the feed's URL."""
        if self._basic is not None and self.client.auth is None:
            return self._basic
        return httpx.USE_CLIENT_DEFAULT

    def request(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> httpx.Request:
        """A GET of the feed: a fetch, or without a partition a discovery, which no cache answers.

        With `idle_timeout` (seconds) the response may be silent for that long; else the client's
        own timeouts hold. Raises `ProtocolError` for a cursor that makes the URL too long.
        """
        self._used_in = self._used_in or OneProcess()
        self._used_in.check("the http client")  # its connections would be shared
        own = str(self.client.params) if self.client.params else ""
        try:
            url = self._urls.url(suffix, params, own)
        except httpx.InvalidURL as error:
            raise ProtocolError(
                "the request's URL is over 64 KiB: the cursor or the filters are too long",
                **self._where(partition),
            ) from error
        request = self.client.build_request(
            "GET",
            url,
            headers=self._headers(partition),
            timeout=self.timeout(idle_timeout),
        )
        # build_request merges the client's parameters once more and encodes the query anew.
        request.url = url
        return request

    def _headers(self, partition: int | None) -> dict[str, str]:
        headers = {"Accept-Encoding": accept_encoding()}
        if self.client.headers.get("user-agent") == _USER_AGENT_OF_HTTPX:
            headers["User-Agent"] = _user_agent()  # the caller has named no other
        if partition is None:
            headers["Cache-Control"] = "no-cache"
        return headers

    def timeout(self, idle: float | None) -> httpx.Timeout:
        """httpx's timeout of one request: the client's own, unless they come after ours.

        An HTTP/2 connection that is dead is used again and again where a request on it is only
        given up. httpcore drops it once a timeout of its own was over.
        """
        own, most = self.client.timeout, SHARE * self.limits.request_timeout
        read, write = (
            most if seconds is None or seconds >= self.limits.request_timeout else seconds
            for seconds in (own.read, own.write)
        )
        return _timeout(own.connect, idle or read, write, own.pool)

    def exchange(
        self,
        request: httpx.Request,
        partition: int | None,
        *,
        discovery: bool = False,
        limit: int = _EXCERPT_BYTES,
    ) -> Exchange:
        """Send a request, follow redirects, and return the final response.

        The body of a fetch is not read yet. The body of a discovery is returned too, up to a little
        over `limit` bytes.
        """
        redirects = 0
        while True:
            self._note(request)
            try:
                answer: httpx.Response | Exception = yield self._send(request)
            except Exception as error:  # noqa: BLE001 - of the caller's auth, hooks, transport
                answer = error
            # Outside the handler, so that what is raised for an error does not quote it (R19).
            failed = isinstance(answer, Exception)
            response = (
                self._answer_in(answer, request, partition, discovery)
                if isinstance(answer, Exception)
                else answer
            )
            if response.request is not request:  # an auth made another one
                self._note(response.request)
            if response.is_success and not discovery:
                return response, b""
            body = yield from self._body_of(response, partition, limit, read=failed)
            onward = self._onward(response, partition, discovery)
            if onward is None:
                self._classify(response, body, partition, discovery)
                return response, body
            request, redirects = onward, redirects + 1
            if redirects > _MAX_REDIRECTS:
                raise self._redirect_error(
                    f"more than {_MAX_REDIRECTS} redirects, one after the other (status "
                    f"{response.status_code})",
                    response.status_code,
                    partition,
                    discovery,
                )

    def _answer_in(
        self, error: Exception, request: httpx.Request, partition: int | None, discovery: bool
    ) -> httpx.Response:
        """The answer that a hook of the caller's client has raised for.

        Raises our error where there is none. httpx's own names the URL with its query, so that it
        is not chained (R19).
        """
        if isinstance(error, FeedError):  # of an auth of ours
            error.feed, error.partition = error.feed or self.feed, error.partition or partition
            raise error
        response = response_in(error)
        if response is None:
            where = request_of_location(error)
            # A client of ours has no code of the caller's that makes URLs.
            if where == request.url or (self._owned and isinstance(error, _URL_ERRORS)):
                raise self._unreadable_location(_SOME_REDIRECT, partition, discovery) from None
            self._unanswered(the_error(error), partition)
        asked = response.request
        if (asked.url.path, origin(asked.url)) == (request.url.path, self._url.origin):
            return response
        status = response.status_code
        if status in (401, 403):
            raise AuthenticationError(
                f"{shown_origin(asked.url)}, which the http client asks, answers status {status}. "
                "Check the credentials",
                **self._where(partition),
            ) from None
        raise FeedUnavailableError(
            f"the http client failed with {type(the_error(error)).__name__}: "
            f"{shown_origin(asked.url)}, which it asks, answers status {status}",
            **self._where(partition),
        ) from None

    def _body_of(
        self, response: httpx.Response, partition: int | None, limit: int, *, read: bool
    ) -> Generator[Any, Any, bytes]:
        """The body of an error or a discovery; `read`: the caller's hook had the response."""
        if read and response.is_closed:
            return response.content[:limit] if response.is_stream_consumed else b""
        failed: Exception | None = None
        try:
            return bytes((yield self._read(response, limit)))
        except Exception as error:  # noqa: BLE001 - of the caller's transport
            failed = error
        if response.status_code == 200:
            self.broke_off(failed, partition)
        return b""

    def _send(self, request: httpx.Request) -> Any:
        raise NotImplementedError

    def _read(self, response: httpx.Response, limit: int) -> Any:
        """Read the body, up to a little over `limit` bytes, and close the response."""
        raise NotImplementedError

    def body(self, response: httpx.Response, partition: int | None) -> Decompressor:
        """What undoes the content coding of a page. Raises `ProtocolError` where nothing does."""
        try:
            return coding_of(response)
        except UnsupportedCodingError as error:
            self.undecodable(error, partition)

    def undecodable(self, error: CodingError, partition: int | None) -> NoReturn:
        """Raise our error for a body whose content coding is unknown, damaged or incomplete."""
        if isinstance(error, UnsupportedCodingError):
            raise ProtocolError(
                f"the response can't be read: {error}", **self._where(partition)
            ) from None
        raise TornResponseError(
            f"the response broke off: {error}", **self._where(partition)
        ) from None

    def broke_off(self, failed: Exception, partition: int | None) -> NoReturn:
        """Raise our error for whatever came while the body was read."""
        if isinstance(failed, CodingError):
            self.undecodable(failed, partition)
        error = the_error(failed)
        shown = self._shown(error)
        if fault_of(error) is not RequestFault.NETWORK:
            shown = f"the http client failed with {shown}"
        raise TornResponseError(
            f"the response broke off: {shown}", **self._where(partition)
        ) from chainable(error, self.hide)

    def _onward(
        self, response: httpx.Response, partition: int | None, discovery: bool
    ) -> httpx.Request | None:
        """Return the request that follows a redirect; None for any other response."""
        request = response.next_request
        if request is None and not response.has_redirect_location:
            return None
        try:
            if request is None:  # the caller's hook came before httpx made it
                sent, location = response.request, response.headers["location"]
                request = httpx.Request(
                    "GET",
                    sent.url.join(location),
                    headers=sent.headers,
                    extensions=sent.extensions,
                )
            same = origin(request.url) == self._url.origin
        except (httpx.InvalidURL, ValueError):  # such as a host name that idna refuses
            raise self._unreadable_location(response.status_code, partition, discovery) from None
        if same:
            return request
        raise self._redirect_error(
            f"the feed redirects (status {response.status_code}) to another origin, "
            f"{self.quote(shown_origin(request.url).encode())}, which is refused: no credentials "
            "are sent there. If the feed has moved, use its new URL",
            response.status_code,
            partition,
            discovery,
        )

    def _unreadable_location(
        self, status: int, partition: int | None, discovery: bool
    ) -> FeedError:
        return self._redirect_error(
            "the feed redirects to a URL that can't be read", status, partition, discovery
        )

    def _redirect_error(
        self, message: str, status: int, partition: int | None, discovery: bool
    ) -> FeedError:
        if discovery:
            return NegotiationError(message, **self._where(partition))
        error = TransportError(message, **self._where(partition))
        error.status = status
        return error

    def _classify(
        self, response: httpx.Response, body: bytes, partition: int | None, discovery: bool
    ) -> None:
        """Raise the error for a status, unless negotiation classifies it."""
        status, where = response.status_code, self._where(partition)
        said = f": '{self.quote(body)}'" if body.strip() else ""
        if status in _LATER or status >= 500:
            headers = response.headers
            raise FeedUnavailableError(
                f"the publisher answers status {status}{said}",
                status=status,
                retry_after=retry_after(headers.get("retry-after"), headers.get("date")),
                **where,
            )
        if status in (401, 403):
            denied = AuthenticationError(
                f"the publisher answers status {status}{said}. Check the credentials", **where
            )
            denied.status = status
            raise denied
        if discovery:
            return
        message = f"the publisher answers a fetch with status {status}{said}"
        if status in _REFUSED:
            raise RequestRefusedError(message, status=status, **where)
        error = ProtocolError(f"{message}. Check the URL", **where)
        error.status = status
        raise error

    def quote(self, body: bytes) -> str:
        """An excerpt of a response for a message, without secrets that a publisher may echo."""
        return excerpt(body, self.hide)

    def hide(self, text: str) -> str:
        """The text without the secrets of the URL, the client and the requests sent last."""
        return hide_secrets(text, self.secrets())

    def secrets(self) -> frozenset[str]:
        """Return the texts that `hide` removes."""
        # A list, whatever other threads send.
        sent = [request for each in self._sent.keyrefs() if (request := each()) is not None]
        values = {
            value
            for request in sent
            for name, value in request.headers.items()
            if name not in _PLAIN_HEADERS
        }
        queries = {request.url.query for request in sent}
        params = query_secrets(str(self.client.params))
        return self._url.secrets.union(
            params, *map(_header_secrets, values), *map(foreign_secrets, queries)
        )

    def _note(self, request: httpx.Request) -> None:
        self._sent[request] = None
        self._last = request

    def bounded(self, body: bytes, limit: int) -> bytes:
        """The body itself. Raises `NegotiationError` when it is longer than `limit`."""
        if len(body) <= limit:
            return body
        raise NegotiationError(
            f"the discovery is longer than {limit} bytes: raise Limits.max_discovery_bytes if that "
            "is to be expected",
            feed=self.feed,
        )

    def _unanswered(self, error: BaseException, partition: int | None) -> NoReturn:
        """Raise our error for what came out of the client before the response began."""
        where, fault = self._where(partition), fault_of(error)
        if self.client.is_closed:
            text = "the http client is closed: close it after the consumer"
            raise TransportError(text, **where) from error
        # Texts may quote a header of ours, credentials included: not shown, not chained.
        if fault is RequestFault.UNSENDABLE:
            raise _final_on_entry(FeedUnavailableError(_UNSENDABLE, **where)) from None
        if fault is RequestFault.POOL:
            raise FeedUnavailableError(
                "no connection came free in time: give the http client a larger pool, or lower "
                "Limits.max_concurrent_fetches",
                **where,
            ) from error
        shown, cause = self._shown(error), chainable(error, self.hide)
        if fault is not RequestFault.NETWORK:
            look = (
                f"the http client failed with {shown}: look at its auth, event hooks and transport"
            )
            if isinstance(error, _URL_ERRORS):
                look += ", and at where the feed redirects"
            failed = FeedUnavailableError(look, **where)
            raise (_final_on_entry(failed) if fault is RequestFault.BUG else failed) from cause
        if (problem := host_problem(error)) is not None:
            raise HostError(f"no answer: {problem}", **where) from cause
        if partition is None and self.feed.startswith("https:") and _hung_up(error):
            # Of one that is refused for its certificate often no more arrives than this.
            shown += ". A server that wants a client certificate (--cert) may end a connection so"
        raise FeedUnavailableError(f"no answer: {shown}", **where) from cause

    def _shown(self, error: BaseException) -> str:
        return self.quote(described(error).encode("utf-8", "backslashreplace"))

    def _where(self, partition: int | None) -> dict[str, Any]:
        return {"feed": self.feed, "partition": partition}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.feed}>"


@lru_cache(128)
def _header_secrets(value: str) -> frozenset[str]:
    """What a publisher might echo of a header: words, values of cookies, a password."""
    words = [*value.split(), *re.split(r"[\s,;]+", value)]
    words += [word.partition("=")[2].strip('"') for word in words]
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):
            pair = b64decode(encoded).decode()
            words += [pair, pair.partition(":")[2]]
    return decoded(words)


def _hung_up(error: BaseException) -> bool:
    return isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError, ssl.SSLError))


def _final_on_entry(error: FeedUnavailableError) -> FeedUnavailableError:
    error.final_on_entry = True
    return error


@cache
def _user_agent() -> str:
    from feedapi_client import __version__

    return f"feedapi-client/{__version__}"


@lru_cache(16)
def _timeout(
    connect: float | None, read: float | None, write: float | None, pool: float | None
) -> httpx.Timeout:
    return httpx.Timeout(connect=connect, read=read, write=write, pool=pool)


def coding_of(response: httpx.Response) -> Decompressor:
    """What undoes the content coding of a body. Raises `UnsupportedCodingError`.

    A response that is in memory already, as those of `httpx.MockTransport` are, was decoded by
    httpx. Its raw bytes can't be had again: read `iter_bytes` or `aiter_bytes` then.
    """
    encoding = "" if response.is_stream_consumed else response.headers.get("content-encoding", "")
    return decompressor(encoding)


def too_slow(seconds: float) -> httpx.ReadTimeout:
    """The error of an exchange that goes on for too long although it is never silent."""
    return httpx.ReadTimeout(f"not complete after {seconds:g} s")


def check_client(http: object, kind: type) -> None:
    """Raise TypeError unless the caller's client is of the right kind, or None."""
    if http is not None and not isinstance(http, kind):
        raise TypeError(f"http must be an httpx.{kind.__name__}, not {type(http).__name__}")


def client_settings(url: str, limits: Limits) -> dict[str, Any]:
    """The settings of a client of our own."""
    size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
    pool = httpx.Limits(
        max_connections=size,
        max_keepalive_connections=size,
        # An idle partition's connection lives until its next poll. The floor keeps httpcore from a
        # race of its own: it may close a connection that expires after a request took it.
        keepalive_expiry=max(_MIN_KEEPALIVE_EXPIRY, 2 * limits.max_poll_interval),
    )
    # Load balancers set cookies under ever new names with each response: none is kept.
    cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
    settings: dict[str, Any] = {
        "limits": pool,
        "timeout": httpx.Timeout(limits.request_timeout, connect=SHARE * limits.request_timeout),
        "cookies": cookies,
    }
    if url.lower().startswith("http:"):
        # Another origin is refused, so TLS is never spoken. A context without certificates
        # saves the time to load them, some 20 ms.
        settings["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return settings
