"""HTTP/1.1 for fetches of a client of our own: llhttp reads responses, anyio has the connections.

llhttp, by httptools, judges the framing and reads a body without a Python call for each chunk.
What it lets pass is refused here: see `Connection`. Errors are those of httpx.
"""

from __future__ import annotations

import select
import ssl
from collections import deque
from functools import partial
from typing import Any

import anyio
import httpx
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# Bytes in a row that bring nothing of a body: heads, 1xx responses, chunk lines, trailers.
_MAX_OVERHEAD = 64 * 1024
_PART = 64 * 1024  # bytes of a read that are worked on at once: what a processor has at hand
_SMALL_PART = 8 * 1024
_MANY = 1000  # pieces of a part, from which on the next one is small: each takes its time
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class _SecondResponseError(Exception):
    """Bytes behind a response: they must not get into its body."""


class Connection:
    """One connection, for one request at a time. Of a response llhttp knows neither a limit of its
    size nor what its end means. So there is one for all that is no body, and a body that is framed
    by the connection's end, and no other, may end with it. Other Transfer-Encodings than one
    ``chunked``, and statuses below 200 that promise no other response, are refused.
    """

    def __init__(self, stream: ByteStream, read_bytes: int) -> None:
        self._stream, self._read_bytes = stream, read_bytes
        extra = stream.extra
        self._tls: ssl.SSLObject | None = extra(TLSAttribute.ssl_object, None)
        self._socket = extra(SocketAttribute.raw_socket)
        self._pieces: list[bytes] = []
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_reusable = False  # the response is complete, and another may come behind it
        self._complete = self._to_close = False
        self._fault: httpx.RemoteProtocolError | None = None
        self._rest = memoryview(b"")
        self._overhead, self._part = 0, _SMALL_PART
        self.on_body = self._pieces.append
        self._parser: Any = HttpResponseParser(self)
        # Some publishers write a space between the size of a chunk and the end of its line.
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)

    async def request(self, head: bytes) -> None:
        self.status, self.headers, self.is_reusable = 0, [], False
        self._complete = self._to_close = False
        self._fault, self._overhead = None, 0
        self._pieces.clear()
        try:
            await self._stream.send(head)
        except _BROKEN as error:
            raise httpx.WriteError(str(error)) from error
        while not self.status:
            await self._receive()
            self._feed()
        if self.status < 200 or self._parser.get_http_version() not in ("1.0", "1.1"):
            raise httpx.RemoteProtocolError("the response has a status or version that is none")
        codings = self.values(b"transfer-encoding")
        if codings and [value.strip().lower() for value in codings] != [b"chunked"]:
            raise httpx.RemoteProtocolError("the response has an unknown Transfer-Encoding")
        framed = codings or self.values(b"content-length") or self.status in (204, 304)
        self._to_close = not framed

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    async def read(self, silence: float) -> bytes | None:
        """What came of the body, joined; None at its end. No wait is longer than `silence`."""
        while not self._pieces:
            if self._complete and self._fault is None:
                return None
            if not self._rest:  # else a scope for each part would take 3 % of the whole
                with anyio.move_on_after(silence) as scope:
                    await self._receive()
                if scope.cancelled_caught:
                    raise httpx.ReadTimeout(f"nothing came for {silence:g} s")
            self._feed()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return data

    async def _receive(self) -> None:
        """Wait for what comes next, where all of it was taken; nothing at the end of a body that
        may end so.
        """
        if self._rest or self._fault is not None:
            return
        try:
            self._rest = memoryview(await self._stream.receive(self._read_bytes))
        except anyio.EndOfStream:
            if not self._to_close:
                text = "the connection ended before the response was complete"
                raise httpx.RemoteProtocolError(text) from None
            self._complete = True
        except _BROKEN as error:
            raise httpx.ReadError(str(error)) from error

    def _feed(self) -> None:
        """Take a part of what has come."""
        if self._fault is not None:
            raise self._fault
        part, self._rest = self._rest[: self._part], self._rest[self._part :]
        try:
            self._parser.feed_data(part)
        except (HttpParserError, HttpParserUpgrade) as error:
            if error.__context__ is not None and not isinstance(error.__context__, Exception):
                raise error.__context__ from None  # a KeyboardInterrupt in one of the methods below
            self.is_reusable = False
            if not self._complete:
                self._fault = httpx.RemoteProtocolError(f"the response is not HTTP/1.1: {error}")
        self._part = _PART if len(self._pieces) < _MANY else _SMALL_PART
        self._overhead = 0 if self._pieces else self._overhead + len(part)
        if self._overhead > _MAX_OVERHEAD and not self._complete:
            self._fault = httpx.RemoteProtocolError("more than 64 KiB that are no body")
        if self._rest and self._complete:
            self.is_reusable = False

    # ------------------------------------------------------------------ what the parser calls

    def on_message_begin(self) -> None:
        if self.status:
            raise _SecondResponseError

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:  # another response follows
            self.headers.clear()
        else:
            self.status = status

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self.is_reusable = self._parser.should_keep_alive()

    # ------------------------------------------------------------------ between requests

    def is_usable(self) -> bool:
        """Whether nothing has come since the last response, not even the connection's end. What
        came together with the response, an end of TLS as a rule, is no longer in the socket.
        """
        try:
            if self._tls is not None:
                self._tls.read(1)
                return False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            return False
        place = self._socket.fileno()
        if place < 0 or not hasattr(select, "poll"):  # on Windows
            return place >= 0 and not select.select([place], [], [], 0)[0]
        poll = select.poll()
        poll.register(place, select.POLLIN)
        return not poll.poll(0)

    async def aclose(self) -> None:
        """Close the connection at once, also where the task is cancelled."""
        with anyio.CancelScope(shield=True) as scope:
            scope.cancel()
            await self._stream.aclose()


class Fetcher:
    """The connections to one origin: one for each request under way, at most `places`, others wait
    for `seconds`. A request takes the connection that was used last, and makes one where none is
    idle: a pool that looks at all of its connections takes most of the time of a small answer. An
    idle one is kept for `expiry` seconds.
    """

    def __init__(
        self,
        url: httpx.URL,
        verify: ssl.SSLContext,
        *,
        places: int,
        seconds: float,
        expiry: float,
        read_bytes: int,
    ) -> None:
        host, is_tls = url.raw_host.decode("ascii"), url.scheme == "https"
        # anyio's types know TLS with a context, or none.
        self._connect: Any = partial(anyio.connect_tcp, host, url.port or (443 if is_tls else 80))
        if is_tls:
            verify.set_alpn_protocols(["http/1.1"])
            self._connect = partial(self._connect, ssl_context=verify, tls_hostname=host)
        self._places = anyio.Semaphore(places, fast_acquire=True)
        self._seconds, self._expiry, self._read_bytes = seconds, expiry, read_bytes
        # Connections, the newest last, and until when each is kept.
        self._idle: deque[tuple[float, Connection]] = deque()

    async def get(self, head: bytes, silence: float) -> WireBody:
        """Send a request; its body may be silent for `silence` seconds."""
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(self._seconds) as scope:
                await self._places.acquire()
            if scope.cancelled_caught:
                raise httpx.PoolTimeout("") from None
        connection: Connection | None = None
        try:
            connection = await self._take()
            await connection.request(head)
        except BaseException:
            await self.release(connection)
            raise
        return WireBody(self, connection, silence)

    async def release(self, connection: Connection | None) -> None:
        """Take back what a request has used. No cancellation interrupts it."""
        self._places.release()
        if connection is not None and connection.is_reusable:
            self._idle.append((anyio.current_time() + self._expiry, connection))
        elif connection is not None:
            await connection.aclose()

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()

    async def _take(self) -> Connection:
        now = anyio.current_time()
        # With fewer requests under way nobody else would notice those that were idle for too long.
        while self._idle and self._idle[0][0] < now:
            await self._idle.popleft()[1].aclose()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_usable():
                return connection
            await connection.aclose()
        try:
            with anyio.fail_after(self._seconds):
                return Connection(await self._connect(), self._read_bytes)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"not connected after {self._seconds:g} s") from error
        except (*_BROKEN, anyio.EndOfStream) as error:
            raise httpx.ConnectError(str(error)) from error


class WireBody:
    """A response and its body, which gives the connection back when it is closed."""

    def __init__(self, fetcher: Fetcher, connection: Connection, silence: float) -> None:
        self._fetcher, self._silence = fetcher, silence
        self._connection: Connection | None = connection
        self.status, self._headers = connection.status, connection.headers
        self.coding = b",".join(connection.values(b"content-encoding")).decode("latin-1")

    @property
    def headers(self) -> httpx.Headers:
        return httpx.Headers(self._headers)

    async def read(self) -> bytes | None:
        connection = self._connection
        return None if connection is None else await connection.read(self._silence)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._fetcher.release(connection)
