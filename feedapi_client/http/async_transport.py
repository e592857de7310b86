"""GET requests of one feed over `httpx.AsyncClient`, on asyncio and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, Self
from urllib.request import getproxies

import anyio
import anyio.lowlevel
import httpx

from feedapi_client.arguments import check_instance
from feedapi_client.causes import failure_of
from feedapi_client.errors import FeedError
from feedapi_client.http.connections import ConnectionPerRequest
from feedapi_client.http.decompression import CodingError
from feedapi_client.http.exchange import (
    SHARE,
    Endpoint,
    Exchange,
    check_client,
    client_settings,
    coding_of,
    too_slow,
)
from feedapi_client.http.urls import parse_url
from feedapi_client.options import Limits
from feedapi_client.protocol.dialects import Params

AsyncHTTP = httpx.AsyncClient

_SEND = httpx.AsyncHTTPTransport.handle_async_request
"""httpx's own method, which pytest-httpx replaces."""


class Transport(Endpoint[httpx.AsyncClient]):
    """GET requests of one feed. Several tasks may use it at once.

    `http` is the caller's client: used as it is, and never closed. Without it the transport makes
    one of its own, and `aclose` closes that. Raises `NegotiationError` for a URL that can't be a
    feed's.
    """

    def __init__(
        self, url: str, *, http: httpx.AsyncClient | None = None, limits: Limits | None = None
    ) -> None:
        check_instance("limits", limits, Limits, "Limits or None")
        limits = limits or Limits()
        parse_url(url)
        check_client(http, httpx.AsyncClient)
        super().__init__(url, http or _own_client(url, limits), limits)
        self._owned = http is None

    async def aclose(self) -> None:
        """Close the client, unless it is the caller's."""
        if self._owned:
            await self.client.aclose()

    async def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """Return status and body of a response, for negotiation.

        Headers and body together may take `Limits.request_timeout`. Raises `AuthenticationError`,
        `FeedUnavailableError`, `TornResponseError`, `ProtocolError` for a content coding that was
        not asked for, and `NegotiationError` for a body over `max_bytes` or a redirect to another
        origin.
        """
        request = self.request(suffix, params)
        exchange = self.exchange(request, None, discovery=True, limit=max_bytes)
        response, body = await self.drive(exchange, self.limits.request_timeout)
        return response.status_code, self.bounded(body, max_bytes)

    def stream(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> ResponseStream:
        """A fetch, to be entered.

        Its headers, or an error's headers and body together, may take `idle_timeout` (seconds;
        `Limits.request_timeout` without it).

        ``async with transport.stream(...) as response: async for chunk in response: ...``
        """
        request = self.request(suffix, params, partition=partition, idle_timeout=idle_timeout)
        whole = self.limits.request_timeout if idle_timeout is None else idle_timeout / SHARE
        return ResponseStream(self, request, partition, whole)

    @staticmethod
    async def drive(exchange: Exchange, seconds: float) -> tuple[httpx.Response, bytes]:
        """Do an exchange's I/O, which may take so many seconds as a whole."""
        deadline = anyio.current_time() + seconds
        try:
            step = next(exchange)
            while True:
                result: Any = None
                failed: Exception | None = None
                try:
                    with anyio.CancelScope(deadline=deadline) as scope:
                        result = await step
                    if scope.cancelled_caught:
                        failed = too_slow(seconds)
                except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
                    failed = failure_of(error)
                # Outside the handler, so that what is raised for it does not quote it (R19).
                step = exchange.send(result) if failed is None else exchange.throw(failed)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _send(self, request: httpx.Request) -> Awaitable[httpx.Response]:
        return self.client.send(request, stream=True, auth=self.auth, follow_redirects=False)

    async def _read(self, response: httpx.Response, limit: int) -> bytes:
        body = bytearray()
        chunks = _received(response)
        try:
            inflated = coding_of(response)
            async for chunk in chunks:
                for piece in inflated.feed(chunk):
                    body += piece
                    if len(body) > limit:
                        await _abandon(chunks)
                        return bytes(body)
            inflated.finish()
        except CodingError:
            await _abandon(chunks)
            raise
        finally:
            await close(response)
        return bytes(body)


class ResponseStream:
    """A response of status 2xx, while it is entered: an asynchronous iterator of its chunks.

    Entering sends the request and raises what `Transport.get` does, and `RequestRefusedError` and
    `ProtocolError` for the other statuses. Iterating raises `TornResponseError` when the body
    breaks off. Leaving closes the connection if the body was not read to its end.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_partition",
        "_pieces",
        "_request",
        "_response",
        "_seconds",
        "_transport",
        "_under_way",
    )

    def __init__(
        self, transport: Transport, request: httpx.Request, partition: int | None, seconds: float
    ) -> None:
        self._transport = transport
        self._seconds = seconds
        self._request = request
        self._partition = partition
        self._under_way = False
        self._pieces: Iterator[bytes] = iter(())

    async def __aenter__(self) -> Self:
        exchange = self._transport.exchange(self._request, self._partition)
        self._response, _ = await self._transport.drive(exchange, self._seconds)
        self._chunks = _received(self._response)
        try:
            self._body = self._transport.body(self._response, self._partition)
        except FeedError:
            await close(self._response)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            if self._under_way:
                await _abandon(self._chunks)
        finally:
            await close(self._response)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = next(self._pieces, None)
            if piece is not None:
                # A chunk may inflate a thousandfold: the other tasks get their turn within it.
                await anyio.lowlevel.checkpoint()
            while piece is None:
                self._under_way = False  # until there is a chunk: an exception ends the iteration
                chunk = await anext(self._chunks, None)
                if chunk is None:
                    self._body.finish()
                    raise StopAsyncIteration
                self._under_way = True
                self._pieces = self._body.feed(chunk)
                piece = next(self._pieces, None)
        except StopAsyncIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            self._transport.broke_off(failure_of(error), self._partition)
        return piece


def _own_client(url: str, limits: Limits) -> httpx.AsyncClient:
    settings = client_settings(url, limits)
    # With a transport of its own, httpx asks no proxy of the environment, and no test's mock.
    if not getproxies() and httpx.AsyncHTTPTransport.handle_async_request is _SEND:
        pool, verify = settings.pop("limits"), settings.pop("verify", None)
        settings["transport"] = ConnectionPerRequest(
            verify or httpx.create_ssl_context(), pool, read_bytes=limits.read_bytes
        )
    return httpx.AsyncClient(**settings)


def _received(response: httpx.Response) -> AsyncIterator[bytes]:
    """The chunks that `coding_of` is for."""
    return response.aiter_bytes() if response.is_stream_consumed else response.aiter_raw()


async def close(response: httpx.Response) -> None:
    """Close a response. Of one that was received, an error at its end says nothing (R14)."""
    try:
        await response.aclose()
    except BaseException as error:  # noqa: BLE001 - raised where it ends the caller
        failure_of(error)


async def _abandon(chunks: AsyncIterator[bytes]) -> None:
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
