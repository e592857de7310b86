"""GET requests of one feed: what is sent, redirects, and which error a status means.

`Endpoint` is written once, with coroutines. Its `io` sends the requests: `AsyncIO`, or
`BlockingIO`, with which no coroutine suspends, so that `io.run_now` runs it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing, suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Self

import httpx

from feedapi_client.arguments import OneProcess
from feedapi_client.causes import failure_of
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TransportError,
)
from feedapi_client.http.decompression import ACCEPT_ENCODING, Decompressor, UnsupportedCodingError
from feedapi_client.http.environment import proxy_of
from feedapi_client.http.http_errors import (
    URL_ERRORS,
    broke_off,
    request_of_location,
    response_in,
    the_error,
    unanswered,
)
from feedapi_client.http.io import SHARE, AsyncIO, BlockingIO, Body, Deadline, basic
from feedapi_client.http.redaction import Secrets, decoded, header_secrets, query_of, query_values
from feedapi_client.http.urls import FeedURL, origin, shown_origin
from feedapi_client.model import __version__
from feedapi_client.protocol.dialects import Params
from feedapi_client.protocol.text import LONGEST_BYTES, excerpt

_MAX_REDIRECTS = 5
_LONGEST_URL = 64 * 1024
_LONGEST_LOCATION = 8 * 1024
_USER_AGENT = f"feedapi-client/{__version__}"
_USER_AGENT_OF_HTTPX = f"python-httpx/{httpx.__version__}"
_REFUSED = frozenset({400, 404, 409, 410})
_LATER = frozenset({408, 425, 429})
_UNAUTHORIZED = frozenset({401, 403})
_OF_PROXY = 407
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LONGEST_DATE = 100
_IN_A_TURN = 8  # chunks until others get their turn: one read from a socket may bring thousands
_SOME_REDIRECT = 302  # for one to a URL that httpx can't read: its error has no status


class Endpoint:
    """GET requests of one feed. Several tasks, or threads, may use it at once. Raises
    `NegotiationError` for a URL that can't be a feed's.
    """

    def __init__(self, url: str, io: AsyncIO | BlockingIO) -> None:
        self.io, self.limits = io, io.limits
        self._url = FeedURL.parse(url)
        self.feed = self._url.public
        self._auth, self._via = httpx.Auth(), ""
        self._used_in: OneProcess | None = None
        headers = {
            "Host": self._url.site.partition("://")[2],
            "Accept": "*/*",
            "Accept-Encoding": ACCEPT_ENCODING,
            "Connection": "keep-alive",
            "User-Agent": _USER_AGENT,
        }
        secrets = self._url.secrets
        if (pair := self._url.basic_auth) is not None:
            self._auth = httpx.BasicAuth(*pair)
            headers["Authorization"] = basic(*pair)
            secrets |= header_secrets(headers["Authorization"])
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        trusting = io.owned or io.client.trust_env
        if trusting and (named := proxy_of(httpx.URL(self._url.site))) is not None:
            variable, proxy = named
            self._via = f", asked through {shown_origin(proxy.url)}, which {variable} names"
            if proxy.auth is not None:
                secrets |= header_secrets(basic(*proxy.auth))
        self.url: Callable[[str], httpx.URL] = self._url.request_url
        self.secrets = Secrets(self._url.site, secrets, io.client)
        self.hide: Callable[[str], str] = self.secrets.hide

    def target(self, suffix: str, params: Params, where: dict[str, Any]) -> str:
        """Path and query. Raises `ProtocolError` for a cursor that makes them too long."""
        self._used_in = self._used_in or OneProcess()
        self._used_in.check("the http client")  # its connections would be shared
        target = self._url.target(suffix, params, str(self.io.client.params or ""))
        if len(self._url.site) + len(target) > _LONGEST_URL:
            raise ProtocolError(
                "the request's URL is over 64 KiB: the cursor or the filters are too long", **where
            )
        return target

    async def send(self, exchange: Exchange) -> Body:
        if (wire := self.io.wire) is not None:
            fresh = "Cache-Control: no-cache\r\n" if exchange.is_discovery else ""
            head = f"GET {exchange.target} HTTP/1.1\r\n{self._headers}{fresh}\r\n"
            return await wire.get(head.encode("ascii"), exchange.silence)
        request, own = self._request(exchange), self.io.client.auth
        auth = _Noting(self._auth if own is None else own, request, self.secrets)
        return await self.io.send(request, auth)

    def _request(self, exchange: Exchange) -> httpx.Request:
        """A request as httpx takes it. Its timeouts are the client's own, unless they come after
        ours. An HTTP/2 connection that is dead is used again and again where a request on it is
        only given up: httpx drops it once a timeout of its own was over.
        """
        client: Any = self.io.client
        headers = {"Accept-Encoding": ACCEPT_ENCODING}
        if client.headers.get("user-agent") == _USER_AGENT_OF_HTTPX:
            headers["User-Agent"] = _USER_AGENT  # the caller has named no other
        if exchange.is_discovery:
            headers["Cache-Control"] = "no-cache"
        own, read = client.timeout, exchange.silence
        write = self.no_longer(own.write)
        timeout = httpx.Timeout(connect=own.connect, read=read, write=write, pool=own.pool)
        url = self.url(exchange.target)
        request: httpx.Request = client.build_request("GET", url, headers=headers, timeout=timeout)
        # build_request merges the client's parameters once more and encodes the query anew.
        request.url = url
        return request

    def no_longer(self, seconds: float | None) -> float:
        """A timeout of the client, or one that comes before ours."""
        whole = self.limits.request_timeout
        return SHARE * whole if seconds is None or seconds >= whole else seconds

    def is_of_feed(self, url: httpx.URL) -> bool:
        """Whether a URL has the feed's origin. Raises ValueError for a host that IDNA refuses."""
        return origin(url) == self._url.origin

    def unanswered(self, error: BaseException, where: dict[str, Any]) -> FeedError:
        asked = self._via
        if self.io.client.is_closed:
            closed = "the http client is closed: close it after the consumer"
            failed = TransportError(closed, **where)
            failed.__cause__ = error
            return failed
        with suppress(AttributeError, RuntimeError, ValueError):  # it names no request
            url: httpx.URL = error.request.url  # type: ignore[attr-defined]
            if not self.is_of_feed(url):
                asked = f" from {shown_origin(url)}, which the client asks"
        return unanswered(error, self.hide, asked, where)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.feed}>"


class _Noting(httpx.Auth):
    """An auth; what it sends is noted, since a publisher may echo it later."""

    def __init__(self, auth: httpx.Auth, request: httpx.Request, secrets: Secrets) -> None:
        self._auth, self._request, self._secrets = auth, request, secrets
        self._known = decoded(query_values(query_of(request)))

    def _note(self, sent: httpx.Request) -> httpx.Request:
        self._secrets.note(self._request, sent, self._known)
        return sent

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        with closing(self._auth.sync_auth_flow(request)) as flow, suppress(StopIteration):
            sent = next(flow)
            while True:
                sent = flow.send((yield self._note(sent)))

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        async with aclosing(self._auth.async_auth_flow(request)) as flow:
            with suppress(StopAsyncIteration):
                sent = await anext(flow)
                while True:
                    sent = await flow.asend((yield self._note(sent)))


class Exchange:
    """One request, redirects included, up to the response that counts; of a discovery where no
    partition is named. Entered it is a response of status 2xx, and an asynchronous iterator of its
    chunks. Entering raises what `discovery` does, and `RequestRefusedError` and `ProtocolError` for
    the other statuses. Leaving closes the connection if the body was not read to its end. The
    response may be silent for `idle` seconds, which its headers may take too, or an error's headers
    and body together.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        suffix: str,
        params: Params,
        partition: int | None = None,
        idle: float | None = None,
    ) -> None:
        self._endpoint, self._io, self.is_discovery = endpoint, endpoint.io, partition is None
        self._where: dict[str, Any] = {"feed": endpoint.feed, "partition": partition}
        self.target = endpoint.target(suffix, params, self._where)
        own = idle or endpoint.no_longer(endpoint.io.client.timeout.read)
        self.silence: Any = endpoint.io.read_timeout(own)
        self._seconds = endpoint.limits.request_timeout if idle is None else idle / SHARE
        self._pieces: Iterator[bytes] = iter(())
        self._chunks = 0

    async def discovery(self, limit: int) -> tuple[int, bytes]:
        """Return status and body of a response, for negotiation, within `Limits.request_timeout`.
        Raises `AuthenticationError`, `FeedUnavailableError`, `TornResponseError`, `ProtocolError`
        for a content coding that was not asked for, and `NegotiationError` for a body over `limit`
        bytes or a redirect to another origin.
        """
        answer, said = await self._run()
        if 200 <= answer.status < 300:
            said = await self._body_of(answer, limit)
            if len(said) > limit:
                raise NegotiationError(
                    f"the discovery is longer than {limit} bytes: raise "
                    "Limits.max_discovery_bytes if that is to be expected",
                    **self._where,
                )
        return answer.status, said

    async def __aenter__(self) -> Self:
        self._body, _ = await self._run()
        try:
            self._coding = Decompressor(self._body.coding)
        except UnsupportedCodingError as error:
            await self._body.aclose()
            raise self._broke_off(error) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._body.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = next(self._pieces, None)
            if piece is not None:
                # A chunk may inflate a thousandfold: the other tasks get their turn within it.
                await self._io.others()
            while piece is None:
                chunk = await self._chunk(self._body)
                if chunk is None:
                    self._coding.finish()
                    raise StopAsyncIteration
                self._pieces = self._coding.feed(chunk)
                piece = next(self._pieces, None)
            return piece
        except StopAsyncIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            failed = self._broke_off(failure_of(error))
        raise failed

    async def _chunk(self, body: Body) -> bytes | None:
        self._chunks += 1
        if self._chunks % _IN_A_TURN == 0:
            await self._io.others()
        return await body.read()

    async def _run(self) -> tuple[Body, bytes]:
        """A response whose body is still to be read, or one that was read, for an excerpt."""
        self._deadline = Deadline(self._io.now() + self._seconds, self._seconds)
        for redirects in itertools.count():
            call = self._endpoint.send(self)
            answer = await self._io.attempt(call, self.silence, self._deadline)
            # Outside a handler, so that what is raised for an error does not quote it (R19).
            if isinstance(answer, Exception):
                answer = self._io.body(self._answer_in(answer))
            if 200 <= answer.status < 300:
                return answer, b""
            said = await self._body_of(answer, LONGEST_BYTES)
            if answer.status == _OF_PROXY:
                said = b""  # which may echo credentials that only the caller's client has
            onward = self._onward(answer)
            if onward is None:
                error = self._error_of(answer, said)
                if error is not None:
                    raise error
                return answer, said
            if redirects == _MAX_REDIRECTS:
                text = f"more than {redirects} redirects, one after the other"
                raise self._redirect_error(f"{text} (status {answer.status})", answer.status)
            self.target = onward
        raise AssertionError

    def _answer_in(self, error: Exception) -> httpx.Response:
        """The answer that a hook of the caller's client has raised for. Raises our error where
        there is none; httpx's own names the URL with its query, so that it is not chained (R19).
        """
        endpoint, url = self._endpoint, self._endpoint.url(self.target)
        if isinstance(error, FeedError):  # of an auth of ours
            error.feed = error.feed or endpoint.feed
            error.partition = error.partition or self._where["partition"]
            raise error
        response = response_in(error)
        if response is None:
            # A client of ours has no code of the caller's that makes URLs.
            if request_of_location(error) == url or (
                self._io.owned and isinstance(error, URL_ERRORS)
            ):
                raise self._unreadable_location(_SOME_REDIRECT) from None
            raise endpoint.unanswered(the_error(error), self._where)
        asked, status = response.request, response.status_code
        if asked.url.path == url.path and endpoint.is_of_feed(asked.url):
            return response
        failed: FeedError
        place, answers = shown_origin(asked.url), f"answers status {status}"
        if status in _UNAUTHORIZED:
            text = f"{place}, which the http client asks, {answers}. Check the credentials"
            failed = AuthenticationError(text, **self._where)
        else:
            text = f"the http client failed with {type(the_error(error)).__name__}: "
            text += f"{place}, which it asks, {answers}"
            failed = FeedUnavailableError(text, **self._where)
        raise failed from None

    async def _body_of(self, answer: Body, limit: int) -> bytes:
        """The body of a discovery, or of an error, of which it may not be there."""
        call = self._read(answer, limit)
        body = await self._io.attempt(call, self.silence, self._deadline)
        if not isinstance(body, Exception):
            return body
        if answer.status == 200:
            raise self._broke_off(body)
        return b""

    async def _read(self, received: Body, limit: int) -> bytes:
        body = bytearray()
        try:
            coding = Decompressor(received.coding)
            while (chunk := await self._chunk(received)) is not None:
                for piece in coding.feed(chunk):
                    body += piece
                    if len(body) > limit:
                        return bytes(body)
            coding.finish()
        finally:
            await received.aclose()
        return bytes(body)

    def _onward(self, answer: Body) -> str | None:
        """The target that a redirect within the feed's origin names; None for other responses."""
        if answer.status not in _REDIRECTS or "location" not in answer.headers:
            return None
        location = answer.headers["location"]
        try:
            url = httpx.URL(location[: _LONGEST_LOCATION + 1])
            if len(location) > _LONGEST_LOCATION or (url.scheme and not url.host):
                raise self._unreadable_location(answer.status)
            url = self._endpoint.url(self.target).join(url)
            if self._endpoint.is_of_feed(url):
                return url.raw_path.decode("ascii")
            place = excerpt(shown_origin(url).encode())
        except (httpx.InvalidURL, ValueError):  # such as a host name that idna refuses
            raise self._unreadable_location(answer.status) from None
        raise self._redirect_error(
            f"the feed redirects (status {answer.status}) to another origin, {place}, which is "
            "refused: no credentials are sent there. If the feed has moved, use its new URL",
            answer.status,
        )

    def _broke_off(self, error: BaseException) -> FeedError:
        return broke_off(error, self._endpoint.hide, self._where)

    def _unreadable_location(self, status: int) -> FeedError:
        return self._redirect_error("the feed redirects to a URL that can't be read", status)

    def _redirect_error(self, message: str, status: int) -> FeedError:
        if self.is_discovery:
            return NegotiationError(message, **self._where)
        error = TransportError(message, **self._where)
        error.status = status
        return error

    def _error_of(self, answer: Body, body: bytes) -> FeedError | None:
        """The error that a status means; None where negotiation says it."""
        status, where = answer.status, self._where
        said = f" {status}: '{excerpt(body)}'" if body.strip() else f" {status}"
        if status in _LATER or status >= 500:
            headers = answer.headers
            later = retry_after(headers.get("retry-after"), headers.get("date"))
            text = f"the publisher answers status{said}"
            return FeedUnavailableError(text, status=status, retry_after=later, **where)
        error: ProtocolError | TransportError
        if status in _UNAUTHORIZED:
            text = f"the publisher answers status{said}. Check the credentials"
            error = AuthenticationError(text, **where)
        elif self.is_discovery:
            return None
        elif status in _REFUSED:
            text = f"the publisher answers a fetch with status{said}"
            return RequestRefusedError(text, status=status, **where)
        else:
            text = f"the publisher answers a fetch with status{said}. Check the URL"
            error = ProtocolError(text, **where)
        error.status = status
        return error


def retry_after(value: str | None, now: str | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for (RFC 9110, 10.2.3), by the Date of the
    response, whatever the clocks are.
    """
    try:
        seconds = float(value or "nan")
    except ValueError:
        seconds = (_timestamp(value) or math.nan) - (_timestamp(now) or time.time())
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
