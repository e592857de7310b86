"""httpx's errors in words of ours: what happened, without secrets and received bytes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import httpx

_UNKNOWN_HOST = {
    code
    for name in ("EAI_NONAME", "EAI_NODATA")
    if (code := getattr(socket, name, None)) is not None
}


def described(error: httpx.HTTPError) -> str:
    """The error's name, and its text unless that quotes received bytes."""
    text = str(error)
    name = type(error).__name__
    return f"{name}: {text}" if text and chainable(error) is not None else name


def chainable(error: httpx.HTTPError) -> httpx.HTTPError | None:
    """The error itself, unless its text quotes received bytes, which may be a payload."""
    return None if "b'" in str(error) or 'b"' in str(error) else error


def host_problem(error: httpx.HTTPError) -> str | None:
    """What is wrong with the host: it is unknown, or its certificate can't be verified.

    None for all else. A resolver that is not reachable (`EAI_AGAIN`) says nothing about the host.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate can't be verified: {cause.verify_message}"
        if isinstance(cause, socket.gaierror) and cause.errno in _UNKNOWN_HOST:
            return "its host, or the proxy's, is unknown"
    return None


def is_about_location(error: httpx.HTTPError) -> bool:
    """Whether httpx could not read the Location of a redirect."""
    return isinstance(error.__context__, httpx.InvalidURL)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
