"""GET requests of one feed: what is sent, redirects, and which error a status means.

`Endpoint` is written once, with coroutines. Its `io` sends the requests: `AsyncIO`, or
`BlockingIO`, with which no coroutine suspends, so that `run_now` runs it.
"""

from __future__ import annotations

import itertools
import math
import re
import ssl
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache
from typing import Any, NoReturn, Self, TypeVar
from weakref import WeakKeyDictionary

import httpx

from feedapi_client.arguments import OneProcess
from feedapi_client.causes import failure_of
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
    ACCEPT_ENCODING,
    CodingError,
    Decompressor,
    UnsupportedCodingError,
)
from feedapi_client.http.environment import proxy_of
from feedapi_client.http.http_errors import (
    RequestFault,
    chainable,
    described,
    fault_of,
    host_problem,
    request_of_location,
    response_in,
    the_error,
)
from feedapi_client.http.io import SHARE, AsyncIO, BlockingIO, Body, Deadline
from feedapi_client.http.redaction import hide_secrets, register
from feedapi_client.http.urls import (
    FeedURL,
    decoded,
    origin,
    query_secrets,
    query_values,
    shown_origin,
)
from feedapi_client.protocol.dialects import Params
from feedapi_client.protocol.text import excerpt

T = TypeVar("T")
_MAX_REDIRECTS = 5
_EXCERPT_BYTES = 1600
_RECENT = 64
"""Texts that were sent and are hidden although their request is over: a token may live for long."""
_PLAIN_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "user-agent"}
)
_FIXED = {"Accept": "*/*", "Accept-Encoding": ACCEPT_ENCODING, "Connection": "keep-alive"}
"""What a connection of our own sends with each request."""
_LONGEST_URL = 64 * 1024
_USER_AGENT_OF_HTTPX = f"python-httpx/{httpx.__version__}"
_UNSENDABLE = "the request can't be sent: check the http client's headers, proxies and auth"
_URL_ERRORS = (httpx.InvalidURL, UnicodeError)
_REFUSED = frozenset({400, 404, 409, 410})
_LATER = frozenset({408, 425, 429})
_LONGEST_DATE = 100
_SOME_REDIRECT = 302
"""Stands for the status of a redirect to a URL that httpx can't read: its error has none."""


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not suspend, as those over `BlockingIO`.

    Raises RuntimeError if it does.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine of the synchronous client waits for an event loop")


class Endpoint:
    """GET requests of one feed. Several tasks, or threads, may use it at once.

    Raises `NegotiationError` for a URL that can't be a feed's.
    """

    def __init__(self, url: str, io: AsyncIO | BlockingIO) -> None:
        self.io = io
        self.limits = io.limits
        self._url = FeedURL.parse(url)
        self._basic = httpx.BasicAuth(*self._url.basic_auth) if self._url.basic_auth else None
        self._secrets, self._via = self._url.secrets, ""
        headers = {
            **_FIXED,
            "Host": self._url.site.partition("://")[2],
            "User-Agent": _user_agent(),
        }
        if self._url.basic_auth is not None:
            headers["Authorization"] = _basic(*self._url.basic_auth)
            self._secrets |= _header_secrets(headers["Authorization"])
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        trusting = io.owned or io.client.trust_env
        if trusting and (named := proxy_of(httpx.URL(self._url.site))) is not None:
            variable, proxy = named
            self._via = f", asked through {shown_origin(proxy.url)}, which {variable} names"
            if proxy.auth is not None:
                self._secrets |= _header_secrets(_basic(*proxy.auth))
        self._sent: WeakKeyDictionary[httpx.Request, set[str]] = WeakKeyDictionary()
        """The requests under way, and what an auth has sent with each."""
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._used_in: OneProcess | None = None
        register(self)

    @property
    def feed(self) -> str:
        """The feed's URL for messages."""
        return self._url.public

    async def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """Return status and body of a response, for negotiation.

        Headers and body together may take `Limits.request_timeout`. Raises `AuthenticationError`,
        `FeedUnavailableError`, `TornResponseError`, `ProtocolError` for a content coding that was
        not asked for, and `NegotiationError` for a body over `max_bytes` or a redirect to another
        origin.
        """
        exchange = Exchange(self, suffix, params, discovery=True)
        response, body = await exchange.discovery(max_bytes)
        if len(body) > max_bytes:
            raise NegotiationError(
                f"the discovery is longer than {max_bytes} bytes: raise Limits.max_discovery_bytes "
                "if that is to be expected",
                feed=self.feed,
            )
        return response.status_code, body

    def request(
        self, suffix: str, params: Params, *, partition: int | None = None
    ) -> httpx.Request:
        """A fetch as httpx takes it, or without a partition a discovery, which no cache answers.

        Raises `ProtocolError` for a cursor that makes the URL too long.
        """
        return Exchange(self, suffix, params, partition, discovery=partition is None).request

    def target(self, suffix: str, params: Params, partition: int | None) -> str:
        """Path and query of a request. Raises what `request` does."""
        self._used_in = self._used_in or OneProcess()
        self._used_in.check("the http client")  # its connections would be shared
        target = self._url.target(suffix, params, str(self.io.client.params or ""))
        if len(self._url.site) + len(target) > _LONGEST_URL:
            raise ProtocolError(
                "the request's URL is over 64 KiB: the cursor or the filters are too long",
                **self.where(partition),
            )
        return target

    async def ask(self, exchange: Exchange) -> Body:
        """Send a request, and return its response."""
        if (wire := self.io.wire) is not None:
            fresh = "Cache-Control: no-cache\r\n" if exchange.is_discovery else ""
            head = f"GET {exchange.target} HTTP/1.1\r\n{self._headers}{fresh}\r\n"
            return await wire.get(head.encode("ascii"), exchange.silence)
        request = exchange.request
        self.note(request, request, target_of(request))
        return self.io.body(await self.io.send(request, self.auth(request)))

    def built(self, target: str, silence: Any, *, fresh: bool) -> httpx.Request:
        """A request as httpx takes it.

        Its timeouts are the client's own, unless they come after ours. An HTTP/2 connection that is
        dead is used again and again where a request on it is only given up: httpx drops it once a
        timeout of its own was over.
        """
        client: Any = self.io.client
        headers = {"Accept-Encoding": ACCEPT_ENCODING}
        if client.headers.get("user-agent") == _USER_AGENT_OF_HTTPX:
            headers["User-Agent"] = _user_agent()  # the caller has named no other
        if fresh:
            headers["Cache-Control"] = "no-cache"
        own, write = client.timeout, self.no_longer(client.timeout.write)
        timeout = httpx.Timeout(connect=own.connect, read=silence, write=write, pool=own.pool)
        url = self._url.request_url(target)
        request: httpx.Request = client.build_request("GET", url, headers=headers, timeout=timeout)
        # build_request merges the client's parameters once more and encodes the query anew.
        request.url = url
        return request

    def no_longer(self, seconds: float | None) -> float:
        """A timeout of the client, or one that comes before ours."""
        whole = self.limits.request_timeout
        return SHARE * whole if seconds is None or seconds >= whole else seconds

    def auth(self, request: httpx.Request) -> httpx.Auth | None:
        """The auth of a request: the client's own, otherwise the credentials in the feed's URL."""
        own = self.io.client.auth
        return self._basic if own is None else _Noting(own, self, request)

    # ------------------------------------------------------------------ what is not shown (R19)

    def quote(self, body: bytes) -> str:
        """An excerpt of a response for a message, without secrets that a publisher may echo."""
        return excerpt(body, self.hide)

    def hide(self, text: str) -> str:
        """The text without the secrets of the URL, the client and the requests sent last."""
        return hide_secrets(text, self.secrets())

    def is_of_feed(self, url: httpx.URL) -> bool:
        """Whether a URL has the feed's origin. Raises ValueError for a host that IDNA refuses."""
        return origin(url) == self._url.origin

    def owns(self, url: httpx.URL) -> bool:
        """Whether a request to the URL is one of this feed's."""
        return self.is_of_feed(url) and url.path.startswith(self._url.path.rstrip("/"))

    def secrets(self) -> frozenset[str]:
        """Return the texts that `hide` removes."""
        texts = set(self._recent)
        # A list, whatever other threads send.
        for request in [each for ref in self._sent.keyrefs() if (each := ref()) is not None]:
            texts.update(_header_values(request), self._sent.get(request, ()))
        params = query_secrets(str(self.io.client.params))
        return self._secrets.union(params, *map(_header_secrets, texts))

    def note(self, request: httpx.Request, sent: httpx.Request, target: frozenset[str]) -> None:
        """Remember what is sent with a request, by an auth perhaps, which may change it again.

        `target`: the values of the query before that: the protocol's, or a redirect's.
        """
        values = query_values(sent.url.query.decode("ascii", "replace"))
        texts = _header_values(sent) | {v for v in values if not decoded([v]) <= target}
        self._sent.setdefault(request, set()).update(texts)
        self._recent.extend(texts.difference(self._recent))

    # ------------------------------------------------------------------ errors

    def where(self, partition: int | None) -> dict[str, Any]:
        """Where something has happened, for an error."""
        return {"feed": self.feed, "partition": partition}

    def broke_off(self, failed: BaseException, partition: int | None) -> NoReturn:
        """Raise our error for whatever came while the body was read."""
        where = self.where(partition)
        if isinstance(failed, UnsupportedCodingError):
            raise ProtocolError(f"the response can't be read: {failed}", **where) from None
        if isinstance(failed, CodingError):
            raise TornResponseError(f"the response broke off: {failed}", **where) from None
        error = the_error(failed)
        shown = self.shown(error)
        if fault_of(error) is not RequestFault.NETWORK:
            shown = f"the http client failed with {shown}"
        raise TornResponseError(f"the response broke off: {shown}", **where) from chainable(
            error, self.hide
        )

    def unanswered(self, error: BaseException, partition: int | None) -> NoReturn:
        """Raise our error for what came out of the client before the response began."""
        where, fault = self.where(partition), fault_of(error)
        if self.io.client.is_closed:
            text = "the http client is closed: close it after the consumer"
            raise TransportError(text, **where) from error
        if fault is RequestFault.PROCESS_ENDS:
            raise TransportError(
                "no name can be resolved any more, since the program's main thread is over: let it "
                "wait for the thread that consumes, with join()",
                **where,
            ) from error
        # Texts may quote a header of ours, credentials included: not shown, not chained.
        if fault is RequestFault.UNSENDABLE:
            raise _final_on_entry(FeedUnavailableError(_UNSENDABLE, **where)) from None
        if fault is RequestFault.POOL:
            raise FeedUnavailableError(
                "no connection came free in time: give the http client a larger pool, or lower "
                "Limits.max_concurrent_fetches",
                **where,
            ) from error
        shown, cause = self.shown(error), chainable(error, self.hide)
        if fault is not RequestFault.NETWORK:
            look = (
                f"the http client failed with {shown}: look at its auth, event hooks and transport"
            )
            if isinstance(error, _URL_ERRORS):
                look += ", and at where the feed redirects"
            failed = FeedUnavailableError(look, **where)
            raise (_final_on_entry(failed) if fault is RequestFault.BUG else failed) from cause
        asked = self._elsewhere(error) or self._via
        if (problem := host_problem(error)) is not None:
            raise HostError(f"no answer{asked}: {problem}", **where) from cause
        if partition is None and self.feed.startswith("https:") and _hung_up(error):
            # Of one that is refused for its certificate often no more arrives than this.
            shown += ". A server that wants a client certificate (--cert) may end a connection so"
        raise FeedUnavailableError(f"no answer{asked}: {shown}", **where) from cause

    def _elsewhere(self, error: BaseException) -> str:
        """Where the connection was to go, if that is not the feed: an auth's token endpoint."""
        try:
            url = error.request.url if isinstance(error, httpx.RequestError) else None
        except RuntimeError:  # it names no request
            url = None
        same = url is None or origin(url) == self._url.origin
        return "" if same or url is None else f" from {shown_origin(url)}, which the client asks"

    def shown(self, error: BaseException) -> str:
        """The error for a message."""
        return self.quote(described(error).encode("utf-8", "backslashreplace"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.feed}>"


class _Noting(httpx.Auth):
    """The auth of the client; what it sends is noted, since a publisher may echo it later."""

    def __init__(self, auth: httpx.Auth, endpoint: Endpoint, request: httpx.Request) -> None:
        self._auth, self._endpoint = auth, endpoint
        self._request, self._target = request, target_of(request)

    def _note(self, sent: httpx.Request) -> httpx.Request:
        self._endpoint.note(self._request, sent, self._target)
        return sent

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        flow = self._auth.sync_auth_flow(request)
        try:
            sent = next(flow)
            while True:
                response = yield self._note(sent)
                try:
                    sent = flow.send(response)
                except StopIteration:
                    return
        finally:
            flow.close()

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        flow = self._auth.async_auth_flow(request)
        try:
            sent = await anext(flow)
            while True:
                response = yield self._note(sent)
                try:
                    sent = await flow.asend(response)
                except StopAsyncIteration:
                    return
        finally:
            await flow.aclose()


class Exchange:
    """One request, redirects included, up to the response that counts.

    Entered it is a response of status 2xx, while that is open, and an asynchronous iterator of its
    chunks. Entering raises what `Endpoint.get` does, and `RequestRefusedError` and `ProtocolError`
    for the other statuses. Iterating raises `TornResponseError` when the body breaks off. Leaving
    closes the connection if the body was not read to its end.

    Arguments:
        idle: seconds that the response may be silent, that its headers may take, or an error's
            headers and body together; `Limits.request_timeout` for None.
        discovery: whether an answer has to be new, and no cache's.

    Raises what `Endpoint.request` does.
    """

    __slots__ = (
        *("_body", "_coding", "_deadline", "_endpoint", "_io", "_partition", "_pieces", "_request"),
        *("_seconds", "is_discovery", "silence", "target"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        suffix: str,
        params: Params,
        partition: int | None = None,
        idle: float | None = None,
        *,
        discovery: bool = False,
    ) -> None:
        self._endpoint, self._io, self._partition = endpoint, endpoint.io, partition
        self.target, self.is_discovery = endpoint.target(suffix, params, partition), discovery
        own = idle or endpoint.no_longer(endpoint.io.client.timeout.read)
        self.silence: Any = endpoint.io.read_timeout(own)
        self._seconds = endpoint.limits.request_timeout if idle is None else idle / SHARE
        self._request: httpx.Request | None = None
        self._pieces: Iterator[bytes] = iter(())

    @property
    def request(self) -> httpx.Request:
        """The request as httpx takes it, made only where httpx has to do with it."""
        if self._request is None:
            new = self.is_discovery
            self._request = self._endpoint.built(self.target, self.silence, fresh=new)
        return self._request

    async def discovery(self, limit: int) -> tuple[httpx.Response, bytes]:
        """The response to a discovery, and its body up to a little over `limit` bytes."""
        answer = await self._run(limit)
        assert isinstance(answer, tuple)
        return answer

    async def __aenter__(self) -> Self:
        answer = await self._run(_EXCERPT_BYTES)
        assert not isinstance(answer, tuple)
        self._body = answer
        try:
            self._coding = Decompressor(answer.coding)
        except UnsupportedCodingError as error:
            await answer.aclose()
            self._endpoint.broke_off(error, self._partition)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._body.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        failed: BaseException
        try:
            piece = next(self._pieces, None)
            if piece is not None:
                # A chunk may inflate a thousandfold: the other tasks get their turn within it.
                await self._io.others()
            while piece is None:
                chunk = await self._body.read()
                if chunk is None:
                    self._coding.finish()
                    raise StopAsyncIteration
                self._pieces = self._coding.feed(chunk)
                piece = next(self._pieces, None)
            return piece
        except StopAsyncIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            failed = failure_of(error)
            self._endpoint.broke_off(failed, self._partition)

    async def _run(self, limit: int) -> Body | tuple[httpx.Response, bytes]:
        """A response whose body is still to be read, or one that was read up to a limit."""
        self._deadline = Deadline(self._io.now() + self._seconds, self._seconds)
        for redirects in itertools.count():
            call = self._endpoint.ask(self)
            answer = await self._io.attempt(call, self.silence, self._deadline)
            # Outside a handler, so that what is raised for an error does not quote it (R19).
            if isinstance(answer, Exception):
                response = self._answer_in(answer)
                received: Body | None = None if response.is_closed else self._io.body(response)
            elif 200 <= answer.status < 300 and not self.is_discovery:
                return answer
            else:
                response, received = answer.response(self.request), answer
            body = await self._body_of(response, received, limit)
            onward = self._onward(response)
            if onward is None:
                self._classify(response, body)
                return response, body
            if redirects == _MAX_REDIRECTS:
                text = f"more than {redirects} redirects, one after the other"
                status = response.status_code
                raise self._redirect_error(f"{text} (status {status})", status)
            self._request, self.target = onward, onward.url.raw_path.decode("ascii")
        raise AssertionError

    def _answer_in(self, error: Exception) -> httpx.Response:
        """The answer that a hook of the caller's client has raised for.

        Raises our error where there is none. httpx's own names the URL with its query, so that it
        is not chained (R19).
        """
        endpoint, request = self._endpoint, self.request
        if isinstance(error, FeedError):  # of an auth of ours
            error.feed = error.feed or endpoint.feed
            error.partition = error.partition or self._partition
            raise error
        response = response_in(error)
        if response is None:
            where = request_of_location(error)
            # A client of ours has no code of the caller's that makes URLs.
            if where == request.url or (self._io.owned and isinstance(error, _URL_ERRORS)):
                raise self._unreadable_location(_SOME_REDIRECT) from None
            endpoint.unanswered(the_error(error), self._partition)
        asked = response.request
        if asked.url.path == request.url.path and endpoint.is_of_feed(asked.url):
            return response
        status, place = response.status_code, shown_origin(asked.url)
        if status in (401, 403):
            raise AuthenticationError(
                f"{place}, which the http client asks, answers status {status}. "
                "Check the credentials",
                **self._where(),
            ) from None
        raise FeedUnavailableError(
            f"the http client failed with {type(the_error(error)).__name__}: {place}, which it "
            f"asks, answers status {status}",
            **self._where(),
        ) from None

    async def _body_of(self, response: httpx.Response, received: Body | None, limit: int) -> bytes:
        """The body of an error or a discovery, unless the caller's hook has closed it."""
        if received is None:
            return response.content[:limit] if response.is_stream_consumed else b""
        body = await self._io.attempt(_read(received, limit), self.silence, self._deadline)
        if not isinstance(body, Exception):
            return body
        if response.status_code == 200:
            self._endpoint.broke_off(body, self._partition)
        return b""

    def _onward(self, response: httpx.Response) -> httpx.Request | None:
        """Return the request that follows a redirect; None for any other response."""
        request = response.next_request
        if request is None and not response.has_redirect_location:
            return None
        try:
            if request is None:  # of a connection of our own, or the caller's hook was first
                sent, location = response.request, httpx.URL(response.headers["location"])
                if location.scheme and not location.host:
                    raise self._unreadable_location(response.status_code)
                request = httpx.Request(
                    "GET",
                    sent.url.join(location),
                    headers=sent.headers,
                    extensions=sent.extensions,
                )
            same = self._endpoint.is_of_feed(request.url)
        except (httpx.InvalidURL, ValueError):  # such as a host name that idna refuses
            raise self._unreadable_location(response.status_code) from None
        if same:
            return request
        place = self._endpoint.quote(shown_origin(request.url).encode())
        raise self._redirect_error(
            f"the feed redirects (status {response.status_code}) to another origin, {place}, which "
            "is refused: no credentials are sent there. If the feed has moved, use its new URL",
            response.status_code,
        )

    def _where(self) -> dict[str, Any]:
        return self._endpoint.where(self._partition)

    def _unreadable_location(self, status: int) -> FeedError:
        return self._redirect_error("the feed redirects to a URL that can't be read", status)

    def _redirect_error(self, message: str, status: int) -> FeedError:
        if self.is_discovery:
            return NegotiationError(message, **self._where())
        error = TransportError(message, **self._where())
        error.status = status
        return error

    def _classify(self, response: httpx.Response, body: bytes) -> None:
        """Raise the error for a status, unless negotiation classifies it."""
        status, headers = response.status_code, response.headers
        said = f": '{self._endpoint.quote(body)}'" if body.strip() else ""
        error: ProtocolError | TransportError
        if status in _LATER or status >= 500:
            raise FeedUnavailableError(
                f"the publisher answers status {status}{said}",
                status=status,
                retry_after=retry_after(headers.get("retry-after"), headers.get("date")),
                **self._where(),
            )
        message = f"the publisher answers a fetch with status {status}{said}"
        if status in (401, 403):
            text = f"the publisher answers status {status}{said}. Check the credentials"
            error = AuthenticationError(text, **self._where())
        elif self.is_discovery:
            return
        elif status in _REFUSED:
            raise RequestRefusedError(message, status=status, **self._where())
        else:
            error = ProtocolError(f"{message}. Check the URL", **self._where())
        error.status = status
        raise error


async def _read(received: Body, limit: int) -> bytes:
    body = bytearray()
    try:
        coding = Decompressor(received.coding)
        while (chunk := await received.read()) is not None:
            for piece in coding.feed(chunk):
                body += piece
                if len(body) > limit:
                    return bytes(body)
        coding.finish()
    finally:
        await received.aclose()
    return bytes(body)


def target_of(request: httpx.Request) -> frozenset[str]:
    """The values in the query of a request."""
    return decoded(query_values(request.url.query.decode("ascii", "replace")))


def _header_values(request: httpx.Request) -> set[str]:
    return {value for name, value in request.headers.items() if name not in _PLAIN_HEADERS}


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


def _basic(user: str, password: str) -> str:
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


def _hung_up(error: BaseException) -> bool:
    return isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError, ssl.SSLError))


def _final_on_entry(error: FeedUnavailableError) -> FeedUnavailableError:
    error.final_on_entry = True
    return error


@cache
def _user_agent() -> str:
    from feedapi_client import __version__

    return f"feedapi-client/{__version__}"


def retry_after(value: str | None, now: str | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for (RFC 9110, 10.2.3), in either form.

    `now` is the response's Date: taken together, the two do not depend on how the publisher's clock
    differs from ours. Returns None without a header, or for one that can't be read.
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
    if not date or len(date) > _LONGEST_DATE:
        return None
    try:
        moment = parsedate_to_datetime(date)
        # The oldest of the three formats names no zone; all of them are in GMT.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None
