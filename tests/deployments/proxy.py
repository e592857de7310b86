"""nginx before publishers, with routes that change while it runs."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from feedapi_client.testing.liftbridge import free_port
from tests import components, nginx

_SAFETY_LIMIT = 30.0


@dataclass(frozen=True)
class Routes:
    """Where requests go: the ports of publishers, in turn; or a page for all of them."""

    discovery: Sequence[int] = ()
    fetch: Sequence[int] = ()
    page: tuple[int, str] | None = None
    """Status and HTML of a gateway under maintenance."""


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


class Proxy:
    def __init__(self, program: str, folder: Path, routes: Routes) -> None:
        self._folder = folder
        self._port = free_port()
        self._generations = itertools.count()
        self._generation = -1
        self.url = f"http://127.0.0.1:{self._port}/feed"
        self._write(routes)
        self._process = subprocess.Popen(nginx.command(program, folder))

    def route(self, routes: Routes) -> None:
        """Send the requests that begin from now on elsewhere."""
        self._write(routes)
        subprocess.run(["kill", "-HUP", str(self._process.pid)], check=True)
        self.wait()

    def requests(self) -> int:
        """Return how many requests came so far."""
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
def proxy(routes: Routes) -> Iterator[Proxy]:
    """Run a proxy."""
    with tempfile.TemporaryDirectory(prefix="feedapi-nginx-") as folder:
        running = Proxy(components.require("nginx"), Path(folder), routes)
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
