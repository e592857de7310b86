"""A real S3-compatible server (moto's) with one bucket."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(bucket: str = "lake") -> Iterator[str]:
    """Serve the bucket and yield the URL of the server."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        create = urllib.request.Request(f"{url}/{bucket}", method="PUT")
        urllib.request.urlopen(create, timeout=60).close()
        yield url
    finally:
        server.stop()
