"""httpcore's pool with large reads, for the synchronous client.

See `connections`, which says what large reads are for. Its own pool is not needed here: threads are
few, and a pool of few connections has little to look at.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore
import httpx

from feedapi_client.http.httpcore_bridge import HTTPCORE_ERRORS, to_httpcore, translated


class LargeReadsTransport(httpx.BaseTransport):
    """A transport of httpx that reads up to `read_bytes` at a time. Thread-safe.

    Arguments:
        verify, limits: as of httpx.
        read_bytes: the bytes of one read.
    """

    def __init__(self, verify: ssl.SSLContext, limits: httpx.Limits, *, read_bytes: int) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=verify,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Network(read_bytes),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises what httpx's own transport does."""
        try:
            answer = self._pool.handle_request(to_httpcore(request))
        except HTTPCORE_ERRORS as error:
            raise translated(error) from error
        return httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=_Body(answer),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


class _Body(httpx.SyncByteStream):
    """The body of a response."""

    def __init__(self, answer: httpcore.Response) -> None:
        assert isinstance(answer.stream, Iterable)
        self._answer = answer
        self._chunks = answer.stream

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._chunks
        except HTTPCORE_ERRORS as error:
            raise translated(error) from error

    def close(self) -> None:
        self._answer.close()


class _Network(httpcore.NetworkBackend):
    """Connects to streams with large reads."""

    def __init__(self, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _LargeReads(stream, self._read_bytes)


class _LargeReads(httpcore.NetworkStream):
    """A stream that reads up to `read_bytes` at a time."""

    def __init__(self, stream: httpcore.NetworkStream, read_bytes: int) -> None:
        self._stream = stream
        self._read_bytes = read_bytes

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max(max_bytes, self._read_bytes), timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _LargeReads(stream, self._read_bytes)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
