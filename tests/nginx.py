"""nginx, where it is installed (``apt-get install -y nginx-light``)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from feedapi_client.testing.liftbridge import free_port
from tests import components

_SAFETY_LIMIT = 30.0
_SERVER = """\
{before}
    access_log off;
    server {{
        listen 127.0.0.1:{port};
        location = /is-ready {{ return 204; }}
        {locations}
    }}"""

_CONFIGURATION = """\
{user}daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
}}
"""


def program() -> str | None:
    """Return nginx's path; None where it is not installed."""
    return components.available("nginx")


def command(nginx: str, folder: Path) -> list[str | Path]:
    """Return the command that serves what was configured, until its process is terminated."""
    return [nginx, "-c", folder / "nginx.conf", "-p", folder]


def configure(folder: Path, http: str) -> None:
    """Write a configuration whose files all lie in the folder.

    Arguments:
        http: what stands in its block ``http``.
    """
    user = "user root;\n" if os.geteuid() == 0 else ""
    text = _CONFIGURATION.format(user=user, folder=folder, http=http)
    (folder / "nginx.conf").write_text(text, encoding="utf-8")


@contextmanager
def serve(folder: Path, locations: str, *, before: str = "") -> Iterator[str]:
    """Run one server with these locations, and yield its URL. Skips the test without nginx.

    Arguments:
        before: what stands before the block ``server``: upstreams, zones, maps.
    """
    program, port = components.require("nginx"), free_port()
    configure(folder, _SERVER.format(port=port, locations=locations, before=before))
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command(program, folder)) as process:
        try:
            deadline = time.monotonic() + _SAFETY_LIMIT
            while not _is_ready(url):
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < deadline, "nginx does not answer"
                time.sleep(0.01)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/is-ready").is_success
    except httpx.HTTPError:
        return False
