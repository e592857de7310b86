"""An HTTP server that sends exactly the bytes that a test gives it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute
from anyio.streams.tls import TLSListener


@dataclass
class Request:
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        pairs = self.target.partition("?")[2].split("&")
        return {
            unquote_plus(name): unquote_plus(value)
            for name, _, value in (pair.partition("=") for pair in pairs)
            if name
        }


@dataclass
class Reply:
    """Raw bytes to send.

    `drip` is sent piece by piece, ten a second. `close` closes the connection then, `hold` keeps it
    open and silent. Without either the connection takes the next request.
    """

    raw: bytes
    close: bool = False
    hold: bool = False
    drip: Iterable[bytes] = ()


def ok(body: bytes, *headers: str, status: str = "200 OK") -> Reply:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return Reply("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def start(body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """The beginning of a response: chunked, or with a length that may never be reached."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    sent = body if length is not None else chunk(body) if body else b""
    return "\r\n".join(["HTTP/1.1 200 OK", framing, *headers]).encode() + b"\r\n\r\n" + sent


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


@dataclass
class Wire:
    reply_to: Callable[[Request], Reply]
    port: int = 0
    scheme: str = "http"
    requests: list[Request] = field(default_factory=list)
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set once the client has closed a connection."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/feed"

    async def _serve(self, stream: ByteStream) -> None:
        async with stream:
            received = b""
            try:
                while True:
                    while b"\r\n\r\n" not in received:
                        received += await stream.receive()
                    head, _, received = received.partition(b"\r\n\r\n")
                    if not await self._reply(stream, head.decode("ascii")):
                        return
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.closed.set()

    async def _reply(self, stream: ByteStream, head: str) -> bool:
        first, *lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        self.requests.append(Request(first.split(" ")[1], headers))
        reply = self.reply_to(self.requests[-1])
        await stream.send(reply.raw)
        for piece in reply.drip:
            await anyio.sleep(0.1)
            await stream.send(piece)
        if reply.hold:
            await stream.receive()
        return not reply.close


@asynccontextmanager
async def wire(
    reply_to: Callable[[Request], Reply], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Wire]:
    listener: Listener[Any] = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    if tls is not None:
        listener = TLSListener(listener, tls, standard_compatible=False)
    async with listener, anyio.create_task_group() as tasks:
        server = Wire(reply_to, port, "http" if tls is None else "https")
        tasks.start_soon(listener.serve, server._serve)
        yield server
        tasks.cancel_scope.cancel()


DISCOVERY = b'{"token":"t","partitions":[{"id":"0"},{"id":"1"}],"stream":true}'


def feed(page: Callable[[Request], Reply] | bytes) -> Callable[[Request], Reply]:
    """A feed of dialect v2-token: replies to a discovery, and with `page` to fetches."""

    def reply_to(request: Request) -> Reply:
        if "/events" not in request.path:
            return ok(DISCOVERY)
        return ok(page) if isinstance(page, bytes) else page(request)

    return reply_to
