"""Certificates that a feed's server is verified with. Imports no Spark."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from feedapi_client.http.auth import trusted

_CERTIFICATE = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.ASCII | re.DOTALL
)


def parse_certificates(value: str) -> str:
    """Return the certificates of option ``caCertificates``, in PEM.

    Raises:
        ValueError: there is none, one can't be read, or there is a private key, which would show in
            query plans.
    """
    if "PRIVATE KEY-----" in value:
        raise ValueError("must hold certificates only, and it holds a private key")
    found = "\n".join(_CERTIFICATE.findall(value))
    try:
        trusting(found)
    except ValueError:
        raise ValueError("must be certificates in PEM, as a file of them holds") from None
    return found


def certificates_in(path: str) -> str:
    """Return the certificates of a PEM file, and nothing else of it. Raises `ValueError`."""
    trusted(path)
    return "\n".join(_CERTIFICATE.findall(Path(path).read_text("ascii", "replace")))


def trusting(certificates: str) -> ssl.SSLContext:
    """Return what trusts these certificates and no others. Raises `ValueError`."""
    try:
        return ssl.create_default_context(cadata=certificates or "-")
    except ssl.SSLError:
        raise ValueError("not certificates in PEM") from None
