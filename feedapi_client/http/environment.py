"""What the environment says about connections: proxies, hosts without one, certificates.

httpx reads `NO_PROXY` into patterns, which fail for some of what is written there, and know no
networks. Here each host is looked up. A variable that can't be used is named, with its value.
"""

from __future__ import annotations

import os
import ssl
import sys
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from types import FunctionType
from typing import Any
from urllib.request import getproxies

import httpx

from feedapi_client.errors import NegotiationError
from feedapi_client.http.urls import PORTS
from feedapi_client.protocol.text import printable

_OF_TRUST = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")


def proxy_of(url: httpx.URL) -> tuple[str, httpx.Proxy] | None:
    """The proxy that the environment names for a URL, and the variable; None without one. Raises
    `NegotiationError` where no proxy can have such a URL.
    """
    found = getproxies()
    value = found.get(url.scheme) or found.get("all")
    if not value or any(_holds(entry, url) for entry in found.get("no", "").lower().split(",")):
        return None
    names = (f"{url.scheme}_proxy", f"{url.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if os.environ.get(name) == value), "the system")
    with suppress(httpx.InvalidURL, ValueError):
        proxy = httpx.Proxy(value if "://" in value else f"http://{value}")
        if proxy.url.host:
            return variable, proxy
    shown = printable(value.rpartition("@")[2].partition("?")[0])  # without credentials
    raise NegotiationError(f"{variable} names no proxy that can be asked: '{shown}'")


def _holds(entry: str, url: httpx.URL) -> bool:
    """Whether an entry of `NO_PROXY` names a host, a domain above it, its address or network."""
    scheme, _, name = entry.strip().rpartition("://")
    port = ""
    if name.startswith("["):
        name, _, port = name[1:].partition("]")
    elif name.count(":") == 1:
        name, _, port = name.partition(":")
    if scheme not in ("", "all", url.scheme):
        return False
    if port.lstrip(":") not in ("", str(url.port or PORTS.get(url.scheme))):
        return False
    if name in ("*", url.host):
        return True
    try:
        address = ip_address(url.host)
    except ValueError:
        return bool(name) and url.host.endswith(f".{name.lstrip('*.')}")
    with suppress(ValueError):
        return address in ip_network(name, strict=False)
    return False


def public_certificates() -> ssl.SSLContext:
    """What trusts the public certificates, or those that the environment names. Raises
    `NegotiationError` where these can't be read.
    """
    try:
        return httpx.create_ssl_context()
    except (OSError, ValueError) as error:
        set_to = [f"{name}={os.environ[name]}" for name in _OF_TRUST if os.environ.get(name)]
        raise NegotiationError(
            f"what the environment names for TLS can't be used: {printable(', '.join(set_to))} "
            f"({getattr(error, 'strerror', None) or type(error).__name__})"
        ) from error


class ByEnvironment(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Sends each request as the environment says for its host: directly, or through a proxy, by
    httpx's transports of a `kind` with `settings`.
    """

    def __init__(self, kind: Any, **settings: Any) -> None:
        self._new: Any = partial(kind, **settings)
        self._made: dict[httpx.URL | None, Any] = {}

    def _for(self, url: httpx.URL) -> Any:
        variable, proxy = proxy_of(url) or ("", None)
        place = None if proxy is None else proxy.url
        if place not in self._made:
            try:
                self._made[place] = self._new(proxy=proxy)
            except ImportError:  # of what speaks SOCKS
                raise NegotiationError(
                    f"{variable} names a SOCKS proxy: pip install 'httpx[socks]'"
                ) from None
        return self._made[place]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._for(request.url).handle_request(request)
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._for(request.url).handle_async_request(request)
        return response

    def close(self) -> None:
        for transport in self._made.values():
            transport.close()

    async def aclose(self) -> None:
        for transport in self._made.values():
            await transport.aclose()


_LIBRARIES = frozenset({"httpx", "httpcore", "contextlib"})
_as_made: dict[type, dict[str, Any]] = {}


def is_patched(client: type) -> bool:
    """Whether somebody has replaced a method of httpx or of what sends its requests.

    pytest-httpx, respx and tracers do. The methods are compared with those found to be the
    libraries' own, and not with those of the import, which may come when they are replaced already.
    """
    classes, core = [client, httpx.AsyncHTTPTransport], sys.modules.get("httpcore")
    # Another thread may be importing it at this moment.
    made = (getattr(core, name, None) for name in ("AsyncConnectionPool", "AsyncHTTPConnection"))
    classes += filter(None, made)
    for kind in classes:
        if _as_made.get(kind) != vars(kind):
            if not all(map(_is_their_own, vars(kind).values())):
                return True
            _as_made[kind] = dict(vars(kind))
    return False


def _is_their_own(value: object) -> bool:
    """Whether a member of a class is no method, or one that the libraries have written."""
    if type(value) is FunctionType:  # a wrapper may pass for the function that it wraps
        return value.__globals__["__name__"].partition(".")[0] in _LIBRARIES
    return not callable(value)
