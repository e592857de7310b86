"""Certificates of servers in tests, signed by themselves."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


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
