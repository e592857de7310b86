"""httpx's errors in words of ours: what happened, without secrets and received bytes."""

from __future__ import annotations

import ssl

import httpx

from feedapi_client.causes import causes, is_unknown_host, network_problem

_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that is none of TLS, depending on its version."""
_CLIENT_CERTIFICATE = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REVOKED",
    "UNSUPPORTED_CERTIFICATE",
    "UNKNOWN_CA",
)
"""Alerts of a server about the certificate that it was shown, or was not."""
ERRORS = (httpx.HTTPError, ssl.SSLError)
"""What a request raises. httpcore's backend of anyio lets an alert of TLS through as it is."""


def as_httpx(error: httpx.HTTPError | ssl.SSLError) -> httpx.HTTPError:
    """Return the error as one of httpx."""
    if isinstance(error, httpx.HTTPError):
        return error
    made = httpx.ReadError(f"TLS: {error.reason or 'the connection failed'}")
    made.__cause__ = error
    return made


def described(error: httpx.HTTPError) -> str:
    """The error's name, and why: its text, unless that quotes received bytes.

    Of a connection that failed it is what the operating system says.
    """
    connecting = isinstance(error, (httpx.ConnectError, httpx.ReadError, httpx.WriteError))
    text = (network_problem(error) if connecting else None) or str(error)
    name = type(error).__name__
    return f"{name}: {text}" if text and chainable(error) is not None else name


def chainable(error: httpx.HTTPError) -> httpx.HTTPError | None:
    """The error itself, unless its text quotes received bytes, which may be a payload."""
    return None if "b'" in str(error) or 'b"' in str(error) else error


def host_problem(error: httpx.HTTPError) -> str | None:
    """What is wrong with the host: it is unknown, or it and we don't agree about TLS.

    None for all else. A resolver that is not reachable (`EAI_AGAIN`) says nothing about the host.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate can't be verified: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            return "the server does not speak TLS at this port: is http:// meant, not https://?"
        if isinstance(cause, ssl.SSLError) and str(cause.reason).endswith(_CLIENT_CERTIFICATE):
            return f"the server wants another client certificate, or one at all ({cause.reason})"
        if is_unknown_host(cause):
            return "its host, or the proxy's, is unknown"
    return None


def is_about_location(error: httpx.HTTPError) -> bool:
    """Whether httpx could not read the Location of a redirect."""
    return isinstance(error.__context__, httpx.InvalidURL)
