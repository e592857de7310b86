"""A feed without events, served by nginx: every poll is answered at once."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import orjson

from tests.http.certificates import Certificate, self_signed

_CONFIGURATION = """\
{user}daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{secure} ssl http2;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        location = /feed {{ default_type application/json; alias {folder}/discovery.json; }}
        location = /feed/events {{ return 200 '{{"cursor":"c"}}\\n'; }}
        location = /polls {{ stub_status; }}
    }}
}}
"""


class IdleFeed(NamedTuple):
    """Where the feed is: over HTTP/1.1, and over TLS with HTTP/2 as well."""

    url: str
    secure_url: str
    certificate: Certificate


def program() -> str | None:
    """Return nginx's path, None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def idle_feed(partitions: int) -> Iterator[IdleFeed]:
    """Serve the feed. Raises `FileNotFoundError` without nginx."""
    nginx = program()
    if nginx is None:
        raise FileNotFoundError("nginx is not installed (apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="feedapi-nginx-") as name:
        folder = Path(name)
        certificate = self_signed(folder, "IP:127.0.0.1")
        listing = {"token": "t", "partitions": [{"id": str(n)} for n in range(partitions)]}
        (folder / "discovery.json").write_bytes(orjson.dumps(listing))
        plain, secure = _free_ports(2)
        configuration = _CONFIGURATION.format(
            user="user root;\n" if os.geteuid() == 0 else "",
            folder=folder,
            plain=plain,
            secure=secure,
            certificate=certificate.path,
            key=certificate.key,
        )
        (folder / "nginx.conf").write_text(configuration, encoding="utf-8")
        feed = IdleFeed(
            f"http://127.0.0.1:{plain}/feed", f"https://127.0.0.1:{secure}/feed", certificate
        )
        with subprocess.Popen([nginx, "-c", folder / "nginx.conf", "-p", folder]) as process:
            try:
                while not _answers(feed.url):
                    if process.poll() is not None:
                        raise RuntimeError((folder / "error.log").read_text())
                    time.sleep(0.01)
                yield feed
            finally:
                process.terminate()


def polls_served(url: str) -> int:
    """Return how many requests nginx has answered."""
    status = httpx.get(url.replace("/feed", "/polls")).text.split()
    return int(status[status.index("requests") + 3])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def _free_ports(count: int) -> list[int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in found]
    finally:
        for each in found:
            each.close()
