"""A reverse proxy over publishers whose routes change while it runs: nginx, or a small one here.

nginx is used where it is installed.
"""

from __future__ import annotations

import http.client
import itertools
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import httpx

from feedapi_client.testing.liftbridge import free_port
from tests import nginx

_SAFETY_LIMIT = 30.0


@dataclass(frozen=True)
class Routes:
    """Where requests go: the ports of publishers, in turn; or a page for all of them."""

    discovery: Sequence[int] = ()
    fetch: Sequence[int] = ()
    page: tuple[int, str] | None = None
    """Status and HTML of a gateway under maintenance."""


class Proxy(Protocol):
    """What the scenarios use of a proxy."""

    url: str

    def route(self, routes: Routes) -> None:
        """Send the requests that begin from now on elsewhere."""
        ...

    def requests(self) -> int:
        """Return how many requests came so far."""
        ...


@contextmanager
def proxy(routes: Routes) -> Iterator[Proxy]:
    """Run a proxy."""
    program = nginx.program()
    with _nginx(program, routes) if program else _own_proxy(routes) as running:
        yield running


# ---------------------------------------------------------------------------------- nginx

_HTTP = """\
access_log {folder}/access.log;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_next_upstream off;
    {upstreams}
    map $args $group {{ "" discovery; default fetch; }}
    server {{
        listen 127.0.0.1:{port};
        location = /generation {{ access_log off; return 200 "{generation}"; }}
        location / {{ {answer} }}
    }}"""


class _Nginx:
    def __init__(self, program: str, folder: Path, routes: Routes) -> None:
        self._folder = folder
        self._port = free_port()
        self._generations = itertools.count()
        self._generation = -1
        self.url = f"http://127.0.0.1:{self._port}/feed"
        self._write(routes)
        self._process = subprocess.Popen(nginx.command(program, folder))

    def route(self, routes: Routes) -> None:
        self._write(routes)
        subprocess.run(["kill", "-HUP", str(self._process.pid)], check=True)
        self.wait()

    def requests(self) -> int:
        log = self._folder / "access.log"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def wait(self) -> None:
        """Wait until the last configuration is in use."""
        address = f"http://127.0.0.1:{self._port}/generation"
        deadline = time.monotonic() + _SAFETY_LIMIT
        while _text(address) != str(self._generation):
            assert self._process.poll() is None, (self._folder / "error.log").read_text()
            assert time.monotonic() < deadline, "nginx does not take its configuration"
            time.sleep(0.01)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(_SAFETY_LIMIT)

    def _write(self, routes: Routes) -> None:
        self._generation = next(self._generations)
        groups = {"discovery": routes.discovery, "fetch": routes.fetch}
        upstreams = "\n    ".join(
            f"upstream {name} {{ {' '.join(f'server 127.0.0.1:{port};' for port in ports)} }}"
            for name, ports in groups.items()
            if ports
        )
        answer = "proxy_pass http://$group;"
        if routes.page is not None:
            status, html = routes.page
            answer = f"default_type text/html; return {status} '{html}';"
        http = _HTTP.format(
            folder=self._folder,
            port=self._port,
            generation=self._generation,
            upstreams=upstreams,
            answer=answer,
        )
        nginx.configure(self._folder, http)


@contextmanager
def _nginx(program: str, routes: Routes) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="feedapi-nginx-") as folder:
        running = _Nginx(program, Path(folder), routes)
        try:
            running.wait()
            yield running
        finally:
            running.stop()


def _text(address: str) -> str | None:
    try:
        return httpx.get(address).text
    except httpx.HTTPError:
        return None


# ---------------------------------------------------------------------------------- without nginx


class _OwnProxy(ThreadingHTTPServer):
    """Forwards one request a connection."""

    daemon_threads = True

    def __init__(self, routes: Routes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/feed"
        self._lock = threading.Lock()
        self._count = 0
        self.route(routes)

    def route(self, routes: Routes) -> None:
        with self._lock:
            self._page = routes.page
            self._discovery = itertools.cycle(routes.discovery)
            self._fetch = itertools.cycle(routes.fetch)

    def requests(self) -> int:
        return self._count

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        with self._lock:
            self._count += 1
            if self._page is not None:
                return self._page[0], self._page[1].encode()
            port = next(self._fetch if "?" in path else self._discovery)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    server: _OwnProxy

    def do_GET(self) -> None:
        status, body = self.server.answer(self.path, {"Accept": "*/*"})
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _own_proxy(routes: Routes) -> Iterator[Proxy]:
    with _OwnProxy(routes) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()
