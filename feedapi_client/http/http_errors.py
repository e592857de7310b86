"""What comes out of an HTTP client instead of a response, classified by type in one table (R14).

An asynchronous and a synchronous client, ours and the caller's: its auth, event hooks, transport
and TLS. Told in words of ours: what happened, without secrets and received bytes (R19).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from enum import Enum

import httpx

from feedapi_client.causes import StrayCancellationError, causes, is_unknown_host, network_problem

_LONGEST_TEXT = 2000
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that is none of TLS, depending on its version."""
_CLIENT_CERTIFICATE = (
    *("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED"),
    *("CERTIFICATE_REVOKED", "UNSUPPORTED_CERTIFICATE", "UNKNOWN_CA"),
)
"""Alerts of a server about the certificate that it was shown, or was not."""


class RequestFault(Enum):
    """What an error says about a request: who failed, and whether that can pass."""

    POOL = "no connection came free in time"
    NETWORK = "the network, the publisher's server, or a proxy"
    UNSENDABLE = "the client makes a request that can't be sent; its next one may be another"
    PROCESS_ENDS = "the program's main thread is over, and with it what resolves names"
    BUG = "code of the client's user is wrong, most likely"
    CLIENT = "the client's auth, event hooks or transport"


_TELLING = frozenset({"h11", "h2", "hpack", "httpcore", "httptools", "httpx", "hyperframe"})
"""Whose texts hold no URL, token or value of a header."""
_NETWORK_LIBRARIES = _TELLING | {"aiohttp", "anyio", "socksio", "trio"}
"""httpx and what is beneath it. What httpcore does not translate comes out of it as it is."""
_SYSTEM = frozenset({"builtins", "socket", "ssl"})
"""Whose OSErrors are the network's. Those of requests and urllib are the caller's code's."""
_FILE_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_BUGS = (*(AssertionError, AttributeError, ImportError, NameError, NotImplementedError, TypeError),)


def _is_header_error(error: BaseException) -> bool:
    """HTTP/2 calls the regular end of a connection so, too: h2 raises it then, and not h11."""
    local = isinstance(error, httpx.LocalProtocolError) or _library(error) == "h11"
    return local and any(
        type(each).__name__ == "LocalProtocolError" and _library(each) == "h11"
        for each in causes(error)
    )


def _is_network_error(error: BaseException) -> bool:
    """TLS and timeouts, too, are an OSError of the system."""
    library = _library(error)
    known = library in _NETWORK_LIBRARIES - {"httpx"}
    return known or (isinstance(error, OSError) and library in _SYSTEM)


def _is_of_ended_program(error: BaseException) -> bool:
    """Executors take no more work then, asyncio's for names included."""
    return isinstance(error, RuntimeError) and not threading.main_thread().is_alive()


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


_FAULTS: tuple[
    tuple[tuple[type[BaseException], ...] | Callable[[BaseException], bool], RequestFault], ...
] = (
    ((httpx.PoolTimeout,), RequestFault.POOL),
    ((httpx.UnsupportedProtocol,), RequestFault.UNSENDABLE),
    (_is_header_error, RequestFault.UNSENDABLE),
    (_FILE_ERRORS, RequestFault.CLIENT),  # a token or a certificate that is not there
    ((httpx.RequestError, EOFError), RequestFault.NETWORK),
    (_is_network_error, RequestFault.NETWORK),
    (_is_of_ended_program, RequestFault.PROCESS_ENDS),
    (_BUGS, RequestFault.BUG),
)
"""The first row that fits; all else is `RequestFault.CLIENT`."""


def fault_of(error: BaseException) -> RequestFault:
    """Classify what came out of a client instead of a response, or within its body."""
    for fits, fault in _FAULTS:
        if isinstance(error, fits) if isinstance(fits, tuple) else fits(error):
            return fault
    return RequestFault.CLIENT


def the_error(error: BaseException) -> BaseException:
    """The error itself, the only one of a group, or a cancellation that nobody asked for."""
    if isinstance(error, StrayCancellationError) and error.__cause__ is not None:
        return error.__cause__
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def described(error: BaseException) -> str:
    """The error's type, and why: its text, unless that quotes received bytes.

    Of a connection that failed it is what the operating system says, of a proxy that refuses the
    status. The text of an error that httpx and what it builds on don't raise may quote anything, a
    token included: it is left out.
    """
    name = type(error).__name__
    if isinstance(error, ssl.SSLError):
        return f"{name}: TLS: {error.reason or 'the connection failed'}"
    if fault_of(error) is not RequestFault.NETWORK:
        return name
    connecting = isinstance(error, (OSError, httpx.ConnectError, httpx.ReadError, httpx.WriteError))
    text = network_problem(error) if connecting else None
    if isinstance(error, httpx.ProxyError) and (status := _text(error)[:3]).isdecimal():
        text = f"the proxy answers status {status}"
    elif text is None and _library(error) in _TELLING:
        text = _text(error)
    return f"{name}: {text}" if text and not _quotes_bytes(error) else name


def chainable(error: BaseException, hide: Callable[[str], str]) -> BaseException | None:
    """The error itself, unless a text in its chain quotes a secret, a query or received bytes."""
    for each in causes(error):
        text = _text(each)
        proxy = isinstance(each, httpx.ProxyError) or type(each).__name__ == "ProxyError"
        if proxy or _quotes_bytes(each) or _quotes_query(text) or hide(text) != text:
            return None
    return error


def _quotes_query(text: str) -> bool:
    """Whether it holds a URL with its query, as requests and aiohttp quote a token endpoint's."""
    words = (word.partition("?") for word in text.split())
    return len(text) >= _LONGEST_TEXT or any("/" in url and "=" in query for url, _, query in words)


def _quotes_bytes(error: BaseException) -> bool:
    return "b'" in (text := _text(error)) or 'b"' in text


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception:  # noqa: BLE001 - an exception without a text says nothing
        return ""


def host_problem(error: BaseException) -> str | None:
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


def response_in(error: BaseException) -> httpx.Response | None:
    """The response that the client's own code has raised for, as `raise_for_status` does."""
    for each in causes(error):
        response = getattr(each, "response", None)
        if isinstance(response, httpx.Response) and not response.is_success:
            return response
    return None


def request_of_location(error: BaseException) -> httpx.URL | None:
    """The URL of a request that was redirected to a URL which httpx can't read; None for all else.

    For a few such Locations httpx raises an `InvalidURL` or a `UnicodeError` without the request,
    as the caller's auth may.
    """
    if isinstance(error, httpx.RemoteProtocolError) and "location header" in _text(error):
        return error.request.url
    return None
