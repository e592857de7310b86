"""Which certificates a client trusts."""

from __future__ import annotations

import ssl


def showing(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Let the clients of a context show a certificate, for mutual TLS.

    Raises ValueError when the files hold no certificate and its key that can be read.
    """
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError):
        files = cert if key is None else f"{cert} and {key}"
        raise ValueError(
            f"{files}: no certificate with its key, without a password, can be read from there"
        ) from None


def _no_password() -> str:
    """Called for a key that needs a password: OpenSSL would ask the terminal."""
    raise ValueError("the key needs a password")


def trusted(ca_file: str) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a file only, for `verify` of httpx.

    Raises ValueError when the file holds no certificates that can be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else ""
        raise ValueError(
            f"{ca_file} holds no certificates that can be read{f' ({reason})' if reason else ''}"
        ) from None
