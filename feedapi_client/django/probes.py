"""What tells an orchestrator how a command does: a file that is kept fresh, or a port."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from feedapi_client.status import Health

_WRITE_SECONDS = 5.0
_MAX_PORT = 65535


class ProbeError(Exception):
    """The health can't be shown there."""


@contextmanager
def health_file(path: str, health: Callable[[], Health]) -> Iterator[None]:
    """Write the health into a file every five seconds, for as long as it is live.

    A probe compares the time of the file's last change. The file is removed at the end.

    Raises:
        ProbeError: it can't be written.
    """
    file, over = Path(path), threading.Event()
    try:
        _write(file, health())
    except OSError as error:
        raise ProbeError(f"--health-file {path}: {error.strerror}") from error

    def keep() -> None:
        while not over.wait(_WRITE_SECONDS):
            with suppress(OSError):  # the file grows old, which is what a probe looks at
                _write(file, health())

    thread = threading.Thread(target=keep, name="feedapi health file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.unlink(missing_ok=True)


def _write(file: Path, health: Health) -> None:
    if health.live:
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_bytes(_as_json(health))
        new.replace(file)


@contextmanager
def health_server(address: str, health: Callable[[], Health]) -> Iterator[str]:
    """Answer ``/healthz`` and ``/readyz`` with 200 or 503. Gives the URL.

    Raises:
        ProbeError: it can't listen there, or it is no address.
    """

    class Probe(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = health()
            states = {"/healthz": now.live, "/readyz": now.ready}
            if self.path not in states:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            body = _as_json(now)
            ok = HTTPStatus.OK if states[self.path] else HTTPStatus.SERVICE_UNAVAILABLE
            self.send_response(ok)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: a probe comes every few seconds."""

    host, port = _parsed(address)
    try:
        server = ThreadingHTTPServer((host, port), Probe)
    except OSError as error:
        raise ProbeError(f"--health-port {address}: {error.strerror}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="feedapi probes", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ProbeError(f"--health-port takes PORT or HOST:PORT, not {address!r}")
    return host or "127.0.0.1", int(port)


def _as_json(health: Health) -> bytes:
    problems = [{"name": str(each.name), "partition": each.partition} for each in health.problems]
    return orjson.dumps({"live": health.live, "ready": health.ready, "problems": problems})
