"""A feed without events, served by nginx: every poll is answered at once."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import orjson

from feedapi_client.testing.liftbridge import free_ports
from tests import nginx
from tests.http.certificates import Certificate, self_signed

_HTTP = """\
access_log off;
    keepalive_requests 1000000000;
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{secure} ssl http2;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        location = /feed {{ default_type application/json; alias {folder}/discovery.json; }}
        location = /feed/events {{ return 200 '{{"cursor":"c"}}\\n'; }}
        location = /polls {{ stub_status; }}
    }}"""


class IdleFeed(NamedTuple):
    """Where the feed is: over HTTP/1.1, and over TLS with HTTP/2 as well."""

    url: str
    secure_url: str
    certificate: Certificate


@contextmanager
def idle_feed(partitions: int) -> Iterator[IdleFeed]:
    """Serve the feed. Raises `FileNotFoundError` without nginx."""
    program = nginx.program()
    if program is None:
        raise FileNotFoundError("nginx is not installed (apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="feedapi-nginx-") as name:
        folder = Path(name)
        certificate = self_signed(folder, "127.0.0.1")
        listing = {"token": "t", "partitions": [{"id": str(n)} for n in range(partitions)]}
        (folder / "discovery.json").write_bytes(orjson.dumps(listing))
        plain, secure = free_ports(2)
        http = _HTTP.format(
            folder=folder,
            plain=plain,
            secure=secure,
            certificate=certificate.path,
            key=certificate.key,
        )
        nginx.configure(folder, http)
        feed = IdleFeed(
            f"http://127.0.0.1:{plain}/feed", f"https://127.0.0.1:{secure}/feed", certificate
        )
        with subprocess.Popen(nginx.command(program, folder)) as process:
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
