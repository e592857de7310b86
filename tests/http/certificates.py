"""Certificates of servers in tests, signed by themselves, and a publisher that shows one."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from feedapi_client.testing import Publisher


@dataclass(frozen=True)
class Certificate:
    path: Path
    key: Path

    def server(self) -> ssl.SSLContext:
        """The context of a server that shows it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.show(context)
        return context

    def show(self, context: ssl.SSLContext) -> None:
        """Have a server show it from its next connection on."""
        context.load_cert_chain(self.path, self.key)

    def client(self) -> ssl.SSLContext:
        """The context of a client that trusts it and nothing else."""
        return ssl.create_default_context(cafile=str(self.path))


def self_signed(folder: Path, name: str) -> Certificate:
    """A certificate for a subject alternative name such as ``IP:127.0.0.1``."""
    stem = name.replace(":", "-")
    made = Certificate(folder / f"{stem}.pem", folder / f"{stem}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={name}"),
            *("-keyout", made.key, "-out", made.path),
        ],
        check=True,
        capture_output=True,
    )
    return made


@contextmanager
def serve_https(publisher: Publisher, certificate: Certificate) -> Iterator[str]:
    """Serve the publisher in a thread, and give its URL. Connections have to be closed before."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(
                publisher.asgi,
                ssl_certfile=certificate.path,
                ssl_keyfile=str(certificate.key),
                log_level="error",
                lifespan="off",
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"https://127.0.0.1:{listening.getsockname()[1]}/feed"
        finally:
            server.should_exit = True
            thread.join()
