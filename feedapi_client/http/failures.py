"""httpx's errors in words of ours: what happened, without secrets and received bytes."""

from __future__ import annotations

import ssl

import httpx

from feedapi_client.causes import causes, is_unknown_host, network_problem


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
    """What is wrong with the host: it is unknown, or its certificate can't be verified.

    None for all else. A resolver that is not reachable (`EAI_AGAIN`) says nothing about the host.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate can't be verified: {cause.verify_message}"
        if is_unknown_host(cause):
            return "its host, or the proxy's, is unknown"
    return None


def is_about_location(error: httpx.HTTPError) -> bool:
    """Whether httpx could not read the Location of a redirect."""
    return isinstance(error.__context__, httpx.InvalidURL)
