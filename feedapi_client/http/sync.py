"""GET requests of one feed over `httpx.Client`: the twin of `transport`."""

from __future__ import annotations

from typing import Self

import httpx

from feedapi_client.http.exchange import Endpoint, Exchange, check_client, client_settings
from feedapi_client.http.urls import parse_url
from feedapi_client.options import Limits
from feedapi_client.protocol.dialects import Params

SyncHTTP = httpx.Client


class SyncTransport(Endpoint[httpx.Client]):
    """`Transport` over `httpx.Client`. Several threads may use it at once."""

    def __init__(
        self, url: str, *, http: httpx.Client | None = None, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        parse_url(url)
        check_client(http, httpx.Client)
        super().__init__(url, http or httpx.Client(**client_settings(url, limits)))
        self._owned = http is None

    def close(self) -> None:
        """Close the client, unless it is the caller's."""
        if self._owned:
            self.client.close()

    def get(self, suffix: str, params: Params, *, max_bytes: int) -> tuple[int, bytes]:
        """See `Transport.get`."""
        request = self.request(suffix, params)
        exchange = self.exchange(request, None, discovery=True, limit=max_bytes)
        response, body = self.drive(exchange)
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


class SyncResponseStream:
    """See `ResponseStream`."""

    __slots__ = ("_chunks", "_partition", "_request", "_response", "_transport")

    def __init__(
        self, transport: SyncTransport, request: httpx.Request, partition: int | None
    ) -> None:
        self._transport = transport
        self._request = request
        self._partition = partition

    def __enter__(self) -> Self:
        exchange = self._transport.exchange(self._request, self._partition)
        self._response, _ = self._transport.drive(exchange)
        self._chunks = self._response.iter_bytes()
        return self

    def __exit__(self, *exc: object) -> None:
        self._response.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._chunks)
        except httpx.HTTPError as error:
            self._transport.torn(error, self._partition)
