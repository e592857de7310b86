"""GET requests of one feed over `httpx.Client`: the twin of `async_transport`."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self
from urllib.request import getproxies

import httpx

from feedapi_client.arguments import check_instance
from feedapi_client.causes import failure_of
from feedapi_client.errors import FeedError
from feedapi_client.http.connections import LargeReadsTransport
from feedapi_client.http.exchange import (
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

SyncHTTP = httpx.Client
_SEND = httpx.HTTPTransport.handle_request
"""httpx's own method, which pytest-httpx replaces."""
_LONGEST = 86_400.0
"""Seconds of a read that is not limited."""


class SyncTransport(Endpoint[httpx.Client]):
    """`Transport` over `httpx.Client`. Several threads may use it at once.

    `verify` says which certificates a client of its own trusts: by default the public ones.
    """

    def __init__(
        self,
        url: str,
        *,
        http: httpx.Client | None = None,
        limits: Limits | None = None,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        check_instance("limits", limits, Limits, "Limits or None")
        limits = limits or Limits()
        parse_url(url)
        check_client(http, httpx.Client)
        super().__init__(url, http or _own_client(url, limits, verify), limits)
        self._owned = http is None

    def close(self) -> None:
        """Close the client, unless it is the caller's."""
        if self._owned:
            self.client.close()

    def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """See `Transport.get`."""
        request = self.request(suffix, params)
        exchange = self.exchange(request, None, discovery=True, limit=max_bytes)
        response, body = self.drive(exchange, request)
        return response.status_code, self.bounded(body, max_bytes)

    def stream(
        self,
        suffix: str,
        params: Params,
        *,
        partition: int | None = None,
        idle_timeout: float | None = None,
    ) -> SyncResponseStream:
        """See `Transport.stream`."""
        request = self.request(suffix, params, partition=partition, idle_timeout=idle_timeout)
        return SyncResponseStream(self, request, partition)

    def timeout(self, idle: float | None) -> httpx.Timeout:
        """See `Endpoint.timeout`. The read timeout also bounds the exchange as a whole."""
        own = super().timeout(idle)
        read: Any = ReadTimeout(own.read, idle or self.limits.request_timeout)
        return httpx.Timeout(connect=own.connect, read=read, write=own.write, pool=own.pool)

    @staticmethod
    def drive(exchange: Exchange, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        """Do an exchange's I/O, which happens in its own calls here."""
        read: ReadTimeout = request.extensions["timeout"]["read"]
        read.begin()
        try:
            step = next(exchange)
            while True:
                step = exchange.send(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            read.end()

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self.client.send(request, stream=True, auth=self.auth, follow_redirects=False)
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            raise failure_of(error)  # noqa: B904 - its cause is set

    def _read(self, response: httpx.Response, limit: int) -> bytes:
        body = bytearray()
        try:
            inflated = coding_of(response)
            for chunk in _received(response):
                for piece in inflated.feed(chunk):
                    body += piece
                    if len(body) > limit:
                        return bytes(body)
            inflated.finish()
        finally:
            close(response)
        return bytes(body)


class ReadTimeout:
    """The read timeout of a request, which also bounds its exchange as a whole.

    httpx has no such bound, and a blocking read can't be cancelled. httpcore gives a request's read
    timeout to `socket.settimeout` before each read, which asks an object that is no float for an
    integer: so each read gets what is left, in whole seconds.

    Arguments:
        silence: seconds that one read may take; None: any number.
        whole: seconds from `begin` on until every further read fails.
    """

    def __init__(self, silence: float | None, whole: float) -> None:
        self._silence = _LONGEST if silence is None else silence
        self._whole = whole
        self._deadline: float | None = None

    def begin(self) -> None:
        """The exchange begins."""
        self._deadline = time.monotonic() + self._whole

    def end(self) -> None:
        """The exchange is over; from here on only silence counts."""
        self._deadline = None

    def __index__(self) -> int:
        seconds = self._silence
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
            if seconds <= 0:
                raise TimeoutError(str(too_slow(self._whole)))
        return math.ceil(min(seconds, _LONGEST))


class SyncResponseStream:
    """See `ResponseStream`."""

    __slots__ = (
        "_body",
        "_chunks",
        "_partition",
        "_pieces",
        "_request",
        "_response",
        "_transport",
    )

    def __init__(
        self, transport: SyncTransport, request: httpx.Request, partition: int | None
    ) -> None:
        self._transport = transport
        self._request = request
        self._partition = partition
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        exchange = self._transport.exchange(self._request, self._partition)
        self._response, _ = self._transport.drive(exchange, self._request)
        self._chunks = _received(self._response)
        try:
            self._body = self._transport.body(self._response, self._partition)
        except FeedError:
            close(self._response)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        close(self._response)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        try:
            while (piece := next(self._pieces, None)) is None:
                chunk = next(self._chunks, None)
                if chunk is None:
                    self._body.finish()
                    raise StopIteration
                self._pieces = self._body.feed(chunk)
        except StopIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - of the caller's client (R14, R20)
            self._transport.broke_off(failure_of(error), self._partition)
        return piece


def _own_client(url: str, limits: Limits, verify: ssl.SSLContext | None) -> httpx.Client:
    settings = client_settings(url, limits)
    if verify is not None:
        settings["verify"] = verify
    # With a transport of its own, httpx asks no proxy of the environment, and no test's mock.
    if not getproxies() and httpx.HTTPTransport.handle_request is _SEND:
        pool, verify = settings.pop("limits"), settings.pop("verify", None)
        settings["transport"] = LargeReadsTransport(
            verify or httpx.create_ssl_context(), pool, read_bytes=limits.read_bytes
        )
    return httpx.Client(**settings)


def close(response: httpx.Response) -> None:
    """See `async_transport.close`."""
    with suppress(Exception):
        response.close()


def _received(response: httpx.Response) -> Iterator[bytes]:
    """The chunks that `coding_of` is for."""
    return response.iter_bytes() if response.is_stream_consumed else response.iter_raw()
