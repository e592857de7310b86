"""A feed of fixed pages, served from memory by a process of its own.

That way a benchmark measures the client.
"""

from __future__ import annotations

import gzip
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import orjson

from tests.benchmarks.serving import serving

PAYLOAD_PAD = 62
_BARE_LINE = len(b'{"data":{"id":"000000000000","n":""}}\n')
Encoding = Literal["gzip"]
_ROUND = 8
"""Digits of a cursor that count how often an endless feed has begun again."""


def payload(number: int, line_bytes: int | None = None) -> bytes:
    """Return an event. Its line takes about 150 bytes, or `line_bytes`, which are 45 or more."""
    if line_bytes is not None:
        return b'{"id":"%012d","n":"%s"}' % (number, b"x" * (line_bytes - _BARE_LINE))
    fields = (number, number % 1000, 1000 + number % 9000, b"x" * PAYLOAD_PAD)
    return (
        b'{"id":"%012d","type":"order.created","entity":"e-%06d","amount":%d,"note":"%s"}' % fields
    )


def build_pages(
    events: int,
    page_size: int,
    *,
    dialect: str,
    partition: int = 0,
    checkpoint_every: int = 100,
    line_bytes: int | None = None,
) -> dict[str, bytes]:
    """Return the bodies of pages by the cursor of the request. The last one repeats its cursor."""
    name = b'"event"' if dialect == "v2-draft" else b'"data"'
    start = b'{"partition":%d,' % partition if dialect == "v1" else b"{"
    pages: dict[str, bytes] = {}
    asked = "_first"
    for first in range(0, events, page_size):
        lines: list[bytes] = []
        end = min(first + page_size, events)
        for number in range(first, end):
            lines.append(start + name + b":" + payload(number, line_bytes) + b"}\n")
            if (number + 1) % checkpoint_every == 0 or number + 1 == end:
                lines.append(start + b'"cursor":"%020d"}\n' % (number + 1))
        pages[asked] = b"".join(lines)
        asked = f"{end:020d}"
    pages[asked] = start + b'"cursor":"%s"}\n' % asked.encode()
    return pages


def _compressed(body: bytes, encoding: Encoding | None) -> bytes:
    return body if encoding is None else gzip.compress(body, 6)


def _framed(body: bytes, chunk: int | None) -> bytes:
    """The body behind the header that says its length, or that it comes in chunks."""
    if chunk is None:
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    pieces = (body[at : at + chunk] for at in range(0, len(body), chunk))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunks


def _again(built: dict[str, bytes], last: str, cursor: str) -> bytes:
    """The page from a cursor of an endless feed that has begun again. Cursors begin with the number
    of the round: one that comes again would be a cycle.
    """
    number, place = int(cursor[:_ROUND]), "0" * _ROUND + cursor[_ROUND:]
    if place == last:
        number, place = number + 1, "_first"
    first, present = (b'"cursor":"%0*d' % (_ROUND, each) for each in (0, number))
    return built[place].replace(first, present)


def _serve(
    out: Connection,
    dialect: str,
    partitions: int,
    events: int,
    page_size: int,
    endless: bool,
    line_bytes: int | None,
    encoding: Encoding | None,
    chunk: int | None,
    certificate: tuple[Path, Path] | None,
) -> None:
    built = build_pages(events, page_size, dialect=dialect, line_bytes=line_bytes)
    pages = {cursor: _framed(_compressed(body, encoding), chunk) for cursor, body in built.items()}
    coding = f"Content-Encoding: {encoding}\r\n".encode() if encoding else b""
    last = list(pages)[-1]
    pages["_last"] = pages[last]
    if endless:  # the last cursor leads to the first page again
        pages.pop(last)

    def page(cursor: str) -> bytes:
        again = partial(_again, built, last, cursor)
        return pages.get(cursor) or _framed(_compressed(again(), encoding), chunk)

    discovery: dict[str, object] = {"partitions": [{"id": str(p)} for p in range(partitions)]}
    if dialect == "v2-token":
        discovery["token"] = "t"
    listing = orjson.dumps(discovery)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            cursor = next(
                (values[0] for name, values in query.items() if name.startswith("cursor")), None
            )
            if cursor is not None:
                self._respond(200, page(cursor), coding)
            elif dialect == "v1":
                self._respond(400, _framed(b"handshake error: partition count missing", None))
            else:
                self._respond(200, _framed(listing, None))

        def _respond(self, status: int, framed: bytes, headers: bytes = b"") -> None:
            self.wfile.write(b"HTTP/1.1 %d X\r\n%s" % (status, headers))
            self.wfile.write(framed)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256
        address_family = socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a client has read enough
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    out.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def static_feed(
    *,
    dialect: str = "v2-token",
    partitions: int = 1,
    events: int = 1_000_000,
    page_size: int = 20_000,
    endless: bool = False,
    line_bytes: int | None = None,
    encoding: Encoding | None = None,
    chunk: int | None = None,
    tls: bool = False,
    in_thread: bool = False,
) -> Iterator[str]:
    """Serve a feed and give its URL.

    Each partition has the same `events`. With `endless` they come again and again, with new
    cursors. A line takes about 150 bytes, or `line_bytes`. Pages come in chunks of `chunk` bytes,
    or with their length. With `tls` the environment names the certificate for the clients.
    `in_thread` is as of `serving`.
    """
    with ExitStack() as stack:
        certificate = None
        if tls:
            from tests.http.certificates import self_signed  # which takes long to import

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = self_signed(folder, "127.0.0.1")
            certificate = made.path, made.key
            before = os.environ.get("SSL_CERT_FILE")
            os.environ["SSL_CERT_FILE"] = str(made.path)
            stack.callback(_restore, "SSL_CERT_FILE", before)
        arguments = (dialect, partitions, events, page_size, endless, line_bytes, encoding)
        port = stack.enter_context(
            serving(_serve, *arguments, chunk, certificate, in_thread=in_thread)
        )
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/feed"


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value
