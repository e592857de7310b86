"""A real S3-compatible server (moto's) with one bucket, with and without conditional writes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import ThreadedMotoServer
from werkzeug.serving import make_server


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


@contextmanager
def old_s3_server(bucket: str = "lake") -> Iterator[str]:
    """The same, but it overwrites whatever is there, as stores did before conditional writes."""
    application: Any = DomainDispatcherApplication(create_backend_app)

    def unconditional(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, unconditional, threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        create = urllib.request.Request(f"{url}/{bucket}", method="PUT")
        urllib.request.urlopen(create, timeout=60).close()
        yield url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
