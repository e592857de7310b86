"""Certificates of servers in tests, signed by themselves, and a publisher that shows one."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme
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
    """A certificate for a subject alternative name such as ``127.0.0.1``.

    Its file also holds the authority that signed it, so that a client can trust the file.
    """
    authority = trustme.CA()
    issued = authority.issue_cert(name)
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    made.path.write_bytes(
        b"".join(part.bytes() for part in [*issued.cert_chain_pems, authority.cert_pem])
    )
    made.key.write_bytes(issued.private_key_pem.bytes())
    return made


@contextmanager
def serve_https(
    publisher: Publisher, certificate: Certificate, *, clients: Certificate | None = None
) -> Iterator[str]:
    """Serve the publisher in a thread, and give its URL. Connections have to be closed before.

    With `clients` every client has to show that certificate.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(
                publisher.asgi,
                ssl_certfile=certificate.path,
                ssl_keyfile=str(certificate.key),
                ssl_cert_reqs=ssl.CERT_NONE if clients is None else ssl.CERT_REQUIRED,
                ssl_ca_certs=None if clients is None else str(clients.path),
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
