"""Connections of our own under httpx: the only module that uses httpcore.

The asynchronous client has one connection for each request under way, in place of httpx's pool.

httpcore's pool looks at all of its connections whenever a request begins and whenever one ends:
with 64 of them that takes most of the processor time of a small answer. Here a request takes the
connection that was used last, and makes one where none is idle.

A connection may read more at a time than httpcore's 64 KiB, such as the 256 that the event loop of
asyncio has ready: what a read costs on its way through h11, httpcore and httpx hardly depends on
how much it brings. An event of 150 bytes takes 0.6 of the time so.

The synchronous client has large reads and httpcore's pool: threads are few, and a pool of few
connections has little to look at.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple

import anyio
import httpcore
import httpx

_ERRORS: dict[type[Exception], type[httpx.TransportError]] = {
    httpcore.TimeoutException: httpx.TimeoutException,
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.PoolTimeout: httpx.PoolTimeout,
    httpcore.NetworkError: httpx.NetworkError,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.UnsupportedProtocol: httpx.UnsupportedProtocol,
    httpcore.ProtocolError: httpx.ProtocolError,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
}
_HTTPCORE_ERRORS = tuple(_ERRORS)
"""What httpcore raises."""


def _translated(error: Exception) -> httpx.TransportError:
    """Return httpx's error for one of `_HTTPCORE_ERRORS`. Raise it from that."""
    return _ERRORS[type(error)](str(error))


def _to_httpcore(request: httpx.Request) -> httpcore.Request:
    """Return a request as httpcore takes it."""
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions=request.extensions,
    )


class _Idle(NamedTuple):
    """A connection that no request uses, and since when."""

    connection: httpcore.AsyncHTTPConnection
    since: float


class ConnectionPerRequest(httpx.AsyncBaseTransport):
    """A transport with a connection for each request under way. Any number of tasks may use it.

    Arguments:
        verify: as of httpx.
        limits: as of httpx. `max_connections` is the number of requests under way at once; others
            wait, for at most the pool timeout of their request. Without `keepalive_expiry` idle
            connections are kept until the publisher closes them.
        read_bytes: the bytes of one read.
    """

    def __init__(
        self, verify: ssl.SSLContext, limits: httpx.Limits, *, read_bytes: int = 64 * 1024
    ) -> None:
        self._verify = verify
        self._expiry = limits.keepalive_expiry
        self._places = anyio.Semaphore(limits.max_connections or 1, fast_acquire=True)
        self._network = _AsyncNetwork(read_bytes)
        self._idle: deque[_Idle] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises what httpx's own transport does."""
        await self._wait_for_place(request)
        sent = _to_httpcore(request)
        connection: httpcore.AsyncHTTPConnection | None = None
        try:
            await self._close_expired()
            connection = await self._take(sent.url.origin)
            answer = await connection.handle_async_request(sent)
        except BaseException as error:
            await self.release(connection)
            if isinstance(error, _HTTPCORE_ERRORS):
                raise _translated(error) from error
            raise
        return httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=_AsyncBody(answer, self, connection),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close the idle connections. Those of responses are closed with their response."""
        while self._idle:
            await self._idle.pop().connection.aclose()

    async def release(self, connection: httpcore.AsyncHTTPConnection | None) -> None:
        """Take back what a request has used. No cancellation interrupts it."""
        self._places.release()
        if connection is None:
            return
        if connection.is_available():
            self._idle.append(_Idle(connection, anyio.current_time()))
            return
        with anyio.CancelScope(shield=True):  # also what a cancellation left in between
            await connection.aclose()

    async def _wait_for_place(self, request: httpx.Request) -> None:
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            seconds = request.extensions.get("timeout", {}).get("pool")
            try:
                with anyio.fail_after(seconds):
                    await self._places.acquire()
            except TimeoutError:
                raise httpx.PoolTimeout("", request=request) from None

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            connection = self._idle.pop().connection
            if connection.can_handle_request(origin) and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            origin,
            ssl_context=self._verify,
            keepalive_expiry=self._expiry,
            network_backend=self._network,
        )

    async def _close_expired(self) -> None:
        """Close what was idle for too long: with fewer requests under way nobody would notice."""
        if self._expiry is None or not self._idle:
            return
        if anyio.current_time() - self._idle[0].since > self._expiry:
            await self._idle.popleft().connection.aclose()


class _AsyncBody(httpx.AsyncByteStream):
    """The body of a response, which gives the connection back when it is closed."""

    def __init__(
        self,
        answer: httpcore.Response,
        transport: ConnectionPerRequest,
        connection: httpcore.AsyncHTTPConnection,
    ) -> None:
        assert isinstance(answer.stream, AsyncIterable)
        self._answer = answer
        self._chunks = answer.stream
        self._transport = transport
        self._connection: httpcore.AsyncHTTPConnection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except _HTTPCORE_ERRORS as error:
            raise _translated(error) from error

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await self._answer.aclose()
        finally:
            await self._transport.release(connection)


class _AsyncNetwork(httpcore.AsyncNetworkBackend):
    """Connects by anyio, to streams with large reads."""

    def __init__(self, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        # httpcore has a stand-in without any method, too, for environments without anyio.
        self._backend: Any = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _AsyncLargeReads(stream, self._read_bytes)


class _AsyncLargeReads(httpcore.AsyncNetworkStream):
    """A stream that reads up to `read_bytes` at a time."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, read_bytes: int) -> None:
        self._stream = stream
        self._read_bytes = read_bytes

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max(max_bytes, self._read_bytes), timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _AsyncLargeReads(stream, self._read_bytes)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


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
            network_backend=_SyncNetwork(read_bytes),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises what httpx's own transport does."""
        try:
            answer = self._pool.handle_request(_to_httpcore(request))
        except _HTTPCORE_ERRORS as error:
            raise _translated(error) from error
        return httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=_SyncBody(answer),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


class _SyncBody(httpx.SyncByteStream):
    """The body of a response."""

    def __init__(self, answer: httpcore.Response) -> None:
        assert isinstance(answer.stream, Iterable)
        self._answer = answer
        self._chunks = answer.stream

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._chunks
        except _HTTPCORE_ERRORS as error:
            raise _translated(error) from error

    def close(self) -> None:
        self._answer.close()


class _SyncNetwork(httpcore.NetworkBackend):
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
        return _SyncLargeReads(stream, self._read_bytes)


class _SyncLargeReads(httpcore.NetworkStream):
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
        return _SyncLargeReads(stream, self._read_bytes)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
