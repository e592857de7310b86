"""A feed of fixed pages, served from memory by a process of its own.

That way a benchmark measures the client.
"""

from __future__ import annotations

import gzip
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import orjson

from tests.benchmarks.serving import serving

PAYLOAD_PAD = 62
_BARE_LINE = len(b'{"data":{"id":"000000000000","n":""}}\n')
Encoding = Literal["gzip"]


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


def _serve(
    out: Connection,
    dialect: str,
    partitions: int,
    events: int,
    page_size: int,
    endless: bool,
    line_bytes: int | None,
    encoding: Encoding | None,
) -> None:
    built = build_pages(events, page_size, dialect=dialect, line_bytes=line_bytes)
    pages = {cursor: _compressed(body, encoding) for cursor, body in built.items()}
    coding = f"Content-Encoding: {encoding}\r\n".encode() if encoding else b""
    again = next(iter(pages.values()))
    last = list(pages)[-1]
    pages["_last"] = pages[last]
    if endless:  # the last cursor is unknown, so it leads to the first page again
        pages.pop(last)
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
                self._respond(200, pages.get(cursor, again), coding)
            elif dialect == "v1":
                self._respond(400, b"handshake error: partition count missing")
            else:
                self._respond(200, listing)

        def _respond(self, status: int, body: bytes, headers: bytes = b"") -> None:
            self.wfile.write(
                b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n" % (status, headers, len(body))
            )
            self.wfile.write(body)

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
    in_thread: bool = False,
) -> Iterator[str]:
    """Serve a feed and give its URL.

    Each partition has the same `events`. With `endless` they come again and again. A line takes
    about 150 bytes, or `line_bytes`. `in_thread` is as of `serving`.
    """
    arguments = (dialect, partitions, events, page_size, endless, line_bytes, encoding)
    with serving(_serve, *arguments, in_thread=in_thread) as port:
        yield f"http://127.0.0.1:{port}/feed"
