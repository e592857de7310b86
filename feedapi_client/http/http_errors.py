"""What comes out of an HTTP client instead of a response, classified by type in one table (R14).

An asynchronous and a synchronous client, ours and the caller's: its auth, event hooks, transport
and TLS. Told in words of ours: what happened, without secrets and received bytes (R19).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any

import httpx

from feedapi_client.causes import StrayCancellationError, causes, is_unknown_host, network_problem
from feedapi_client.errors import (
    FeedError,
    FeedUnavailableError,
    HostError,
    ProtocolError,
    TornResponseError,
    TransportError,
)
from feedapi_client.http.decompression import CodingError, UnsupportedCodingError
from feedapi_client.protocol.text import printable

Hide = Callable[[str], str]
URL_ERRORS = (httpx.InvalidURL, UnicodeError)
_LONGEST_TEXT = 2000
# What OpenSSL calls an answer that is none of TLS, depending on its version.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_CLIENT_CERTIFICATE = (  # alerts of a server about the certificate that it was shown, or was not
    *("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED"),
    *("CERTIFICATE_REVOKED", "UNSUPPORTED_CERTIFICATE", "UNKNOWN_CA"),
)
# Libraries whose texts hold no URL, token or value of a header.
_TELLING = frozenset({"h11", "h2", "hpack", "httpcore", "httptools", "httpx", "hyperframe"})
# What httpcore does not translate comes out of it as it is.
_BENEATH = (_TELLING | {"aiohttp", "anyio", "socksio", "trio"}) - {"httpx"}
# Whose OSErrors are the network's. Those of requests and urllib are the caller's code's.
_SYSTEM = frozenset({"builtins", "socket", "ssl"})
_FILE_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_BUGS = (AssertionError, AttributeError, ImportError, NameError, NotImplementedError, TypeError)
_HUNG_UP = (httpx.ReadError, httpx.RemoteProtocolError, ssl.SSLError)


def _is_unsendable(error: BaseException) -> bool:
    """HTTP/2 calls the regular end of a connection a header's error, too: h2 raises that."""
    local = isinstance(error, httpx.LocalProtocolError) or _library(error) == "h11"
    return isinstance(error, httpx.UnsupportedProtocol) or (
        local
        and any(
            type(each).__name__ == "LocalProtocolError" and _library(each) == "h11"
            for each in causes(error)
        )
    )


def _is_of_network(error: BaseException) -> bool:
    """TLS and timeouts, too, are an OSError of the system."""
    if isinstance(error, httpx.RequestError | EOFError) or _library(error) in _BENEATH:
        return True
    return isinstance(error, OSError) and _library(error) in _SYSTEM


def _is_of_ended_program(error: BaseException) -> bool:
    """Executors take no more work then, asyncio's for names included."""
    return isinstance(error, RuntimeError) and not threading.main_thread().is_alive()


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


_NETWORK = "no answer{asked}: {shown}"
_CLIENT = "the http client failed with {shown}: look at its auth, event hooks and transport"
# Texts beneath may quote a header of ours, credentials included: not shown, not chained.
_UNSENDABLE = "the request can't be sent: check the http client's headers, proxies and auth"
_POOL = (
    "no connection came free in time: give the http client a larger pool, or lower "
    "Limits.max_concurrent_fetches"
)
_PROCESS_ENDS = (
    "no name can be resolved any more, since the program's main thread is over: let it wait for "
    "the thread that consumes, with join()"
)
# What fits an error, what it is called, and whether the first discovery ends with it.
_ROWS: tuple[tuple[Any, str, bool], ...] = (
    ((httpx.PoolTimeout,), _POOL, False),
    (_is_unsendable, _UNSENDABLE, True),
    (_FILE_ERRORS, _CLIENT, False),  # a token or a certificate that is not there
    (_is_of_network, _NETWORK, False),
    (_is_of_ended_program, _PROCESS_ENDS, True),
    (_BUGS, _CLIENT, True),
    (URL_ERRORS, f"{_CLIENT}, and at where the feed redirects", False),
    ((BaseException,), _CLIENT, False),
)


def _row_of(error: BaseException) -> tuple[str, bool]:
    return next(
        (text, final)
        for fits, text, final in _ROWS
        if (isinstance(error, fits) if isinstance(fits, tuple) else fits(error))
    )


def unanswered(error: BaseException, hide: Hide, asked: str, where: dict[str, Any]) -> FeedError:
    """Our error for what came out of the client before the response began. `asked` says whom the
    client has asked, if that is not the feed, `where` has feed and partition.
    """
    row, is_final = _row_of(error)
    text, of_network = row.format(asked=asked, shown=_shown(error, hide)), row is _NETWORK
    kind: type[FeedError] = TransportError if row is _PROCESS_ENDS else FeedUnavailableError
    is_discovery = where["partition"] is None and where["feed"].startswith("https:")
    if of_network and (problem := _host_problem(error)) is not None:
        kind, text = HostError, f"no answer{asked}: {problem}"
    elif of_network and is_discovery and isinstance(error, _HUNG_UP):
        # Of one that is refused for its certificate often no more arrives than this.
        text += ". A server that wants a client certificate (--cert) may end a connection so"
    failed = kind(text, **where)
    if isinstance(failed, FeedUnavailableError) and is_final:
        failed.final_on_entry = True
    failed.__cause__ = None if row is _UNSENDABLE else _chainable(error, hide)
    return failed


def broke_off(error: BaseException, hide: Hide, where: dict[str, Any]) -> FeedError:
    """Our error for what came while the body was read. See `unanswered`."""
    if isinstance(error, UnsupportedCodingError):
        return ProtocolError(f"the response can't be read: {error}", **where)
    if isinstance(error, CodingError):
        return TornResponseError(f"the response broke off: {error}", **where)
    error = the_error(error)
    by = "" if _row_of(error)[0] is _NETWORK else "the http client failed with "
    failed = TornResponseError(f"the response broke off: {by}{_shown(error, hide)}", **where)
    failed.__cause__ = _chainable(error, hide)
    return failed


def the_error(error: BaseException) -> BaseException:
    """The error itself, the only one of a group, or a cancellation that nobody asked for."""
    if isinstance(error, StrayCancellationError) and error.__cause__ is not None:
        return error.__cause__
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _shown(error: BaseException, hide: Hide) -> str:
    """The error's type, and why, where that can be quoted: a text of other libraries may hold a
    token.
    """
    name, text = printable(type(error).__name__), ""
    if isinstance(error, ssl.SSLError):
        text = f"TLS: {error.reason or 'the connection failed'}"
    elif _row_of(error)[0] is _NETWORK:
        if isinstance(error, OSError | httpx.ConnectError | httpx.ReadError | httpx.WriteError):
            text = network_problem(error) or ""
        if isinstance(error, httpx.ProxyError) and (status := _text(error)[:3]).isdecimal():
            text = f"the proxy answers status {status}"
        elif not text and _library(error) in _TELLING and _is_quotable(error, hide):
            text = printable(_text(error))
    return f"{name}: {text}" if text else name


def _chainable(error: BaseException, hide: Hide) -> BaseException | None:
    """The error itself, unless a text in its chain can't be quoted."""
    return error if all(_is_quotable(each, hide) for each in causes(error)) else None


def _is_quotable(error: BaseException, hide: Hide) -> bool:
    """Whether a text holds no secret, no received bytes, and no URL with its query."""
    text, is_of_proxy = _text(error), type(error).__name__ == "ProxyError"
    words = (word.partition("?") for word in text.split())
    has_query = any("/" in url and "=" in query for url, _, query in words)
    has_bytes = "b'" in text or 'b"' in text or len(text) >= _LONGEST_TEXT
    return not (is_of_proxy or has_query or has_bytes or hide(text) != text)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception:  # noqa: BLE001 - an exception without a text says nothing
        return ""


def _host_problem(error: BaseException) -> str | None:
    """What is wrong with the host. A resolver that is not reachable (`EAI_AGAIN`) says nothing
    about it.
    """
    for cause in causes(error):
        reason = str(cause.reason) if isinstance(cause, ssl.SSLError) else ""
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate can't be verified: {cause.verify_message}"
        if reason in _NO_TLS:
            return "the server does not speak TLS at this port: is http:// meant, not https://?"
        if reason.endswith(_CLIENT_CERTIFICATE):
            return f"the server wants another client certificate, or one at all ({reason})"
        if is_unknown_host(cause):
            return "its host, or the proxy's, is unknown"
    return None


def response_in(error: BaseException) -> httpx.Response | None:
    """The response that the client's own code has raised for, as `raise_for_status` does."""
    found = (getattr(each, "response", None) for each in causes(error))
    return next((r for r in found if isinstance(r, httpx.Response) and not r.is_success), None)


def request_of_location(error: BaseException) -> httpx.URL | None:
    """The URL of a request that was redirected to a URL which httpx can't read."""
    if isinstance(error, httpx.RemoteProtocolError) and "location header" in _text(error):
        return error.request.url
    return None
