"""A feed that grows by the clock, served by a process of its own, for latencies.

Event number n is published n intervals after the start. Its payload says when that was, by the
clock that all processes of a machine share. So nothing has to be kept: what a response holds
follows from its cursor and the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from urllib.parse import parse_qs, urlsplit

from tests.benchmarks.serving import serving

DISCOVERY = b'{"token":"t","stream":true,"partitions":[{"id":"0"}]}'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    started: float
    interval: float

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        cursor = query.get("cursor")
        if cursor is None:
            self._page(DISCOVERY)
            return
        first = self._published() if cursor.startswith("_") else int(cursor)
        if "stream" in query:
            self._stream(first)
        else:
            self._page(self._lines(first))

    def _published(self) -> int:
        """Return the number of events that are published now."""
        return math.floor((time.monotonic() - self.started) / self.interval)

    def _lines(self, first: int) -> bytes:
        """Return the events from number `first` on that are published, and a checkpoint."""
        last = max(first, self._published())
        lines = [
            b'{"data":{"at":%.9f,"pad":"%s"}}\n'
            % (self.started + (n + 1) * self.interval, b"x" * 100)
            for n in range(first, last)
        ]
        return b"".join((*lines, b'{"cursor":"%d"}\n' % last))

    def _page(self, body: bytes) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def _stream(self, first: int) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                due = self.started + (first + 1) * self.interval
                time.sleep(max(0.0, due - time.monotonic()))
                body = self._lines(first)
                first = int(body.rsplit(b'"', 2)[1])
                self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        except OSError:  # the client left
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def _serve(out: Connection, interval: float) -> None:
    handler = type("Handler", (_Handler,), {"interval": interval, "started": time.monotonic()})
    server = _Server(("127.0.0.1", 0), handler)
    out.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def live_feed(interval: float, *, in_thread: bool = False) -> Iterator[str]:
    """Serve a feed with an event every `interval` seconds, and give its URL."""
    with serving(_serve, interval, in_thread=in_thread) as port:
        yield f"http://127.0.0.1:{port}/feed"
