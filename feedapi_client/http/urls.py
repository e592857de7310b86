"""The feed's URL: taken apart, compared, and shown without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

import httpx

from feedapi_client.errors import NegotiationError
from feedapi_client.model import public_url
from feedapi_client.protocol.dialects import OWN_PARAMS, Params

_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class FeedURL:
    """A feed's URL in the parts that requests are made of. The query is sent with every request."""

    site: str
    path: str
    query: str
    origin: Origin
    basic_auth: tuple[str, str] | None
    secrets: frozenset[str]
    """What a publisher might echo of the URL: the query, its values, the credentials."""
    public: str
    """Without credentials, query and fragment, for messages."""

    @classmethod
    def parse(cls, url: str) -> FeedURL:
        """Take the URL apart. Raises `NegotiationError` for one that can't be a feed's."""
        base = parse_url(url)
        path, _, query = base.raw_path.decode("ascii").partition("?")
        return cls(
            site=f"{base.scheme}://{base.netloc.decode('ascii')}",
            path=path,
            query=query,
            origin=origin(base),
            basic_auth=(base.username, base.password) if base.userinfo else None,
            secrets=query_secrets(query) | decoded([base.password, base.userinfo.decode("ascii")]),
            public=_public(url),
        )

    def request_url(
        self, suffix: str, params: Sequence[tuple[str, str]], client_params: str = ""
    ) -> httpx.URL:
        """The URL of one request: the feed's query, the client's parameters, then `params`.

        Raises httpx.InvalidURL when it is longer than 64 KiB.
        """
        path = self.path.rstrip("/") + suffix if suffix else self.path
        own = [f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in params]
        query = "&".join(filter(None, [self.query, client_params, *own]))
        return httpx.URL(f"{self.site}{path}?{query}" if query else self.site + path)


_REMEMBERED = 4096
_LONGEST_REMEMBERED = 512
_FEEDS_REMEMBERED = 4


class RequestURLs:
    """The URLs of one feed's requests. Several threads may use it.

    A partition at its end is asked with the same URL again and again, and httpx takes about 30
    microseconds to read one. So the last few thousand short ones are remembered.
    """

    def __init__(self, feed: FeedURL) -> None:
        self.feed = feed
        self._remembered = lru_cache(_REMEMBERED)(feed.request_url)

    def url(self, suffix: str, params: Params, client_params: str) -> httpx.URL:
        """Return what `FeedURL.request_url` does. Raises httpx.InvalidURL."""
        length = 0
        for _, value in params:
            length += len(value)
        read = self._remembered if length <= _LONGEST_REMEMBERED else self.feed.request_url
        return read(suffix, tuple(params), client_params)


@lru_cache(_FEEDS_REMEMBERED)
def feed_urls(url: str) -> RequestURLs:
    """The URLs of the feed at `url`, the same ones for all clients that read it.

    An application that makes a new client for each run reads the URLs of before. Only the last few
    feeds are remembered. Raises `NegotiationError` for a URL that can't be a feed's.
    """
    return RequestURLs(FeedURL.parse(url))


def parse_url(url: str) -> httpx.URL:
    """The parsed URL. Raises `NegotiationError` for one that can't be a feed's."""
    if not isinstance(url, str):
        raise NegotiationError(f"the feed's URL must be a string, not {type(url).__name__}")
    return _parsed(url)


@lru_cache(_FEEDS_REMEMBERED)
def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
        host = parsed.host
        # What the resolver does with the name: it fails for an empty label, or one that is too
        # long, with an error that httpx lets through.
        name = parsed.raw_host.decode("ascii")
        name.encode("idna")
    except (httpx.InvalidURL, ValueError) as error:
        raise _unreadable(error) from None
    if parsed.scheme not in _PORTS or not host or ("%" in name and ":" not in name):
        raise NegotiationError("the feed's URL must begin with http:// or https:// and name a host")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise NegotiationError("the feed's URL names a port that is not from 1 to 65535")
    return parsed


def _public(url: str) -> str:
    try:
        return public_url(url)
    except ValueError as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> NegotiationError:
    # The reason may quote a part of the URL, which may be a part of a password.
    return NegotiationError(f"the feed's URL can't be read ({type(error).__name__})")


def origin(url: httpx.URL) -> Origin:
    """Scheme, host and port, which together decide what credentials may be sent to."""
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def shown_origin(url: httpx.URL) -> str:
    """The origin for a message."""
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"


@lru_cache(_FEEDS_REMEMBERED)
def query_secrets(query: str) -> frozenset[str]:
    """The query and its values."""
    return decoded([query, *(pair.partition("=")[2] for pair in query.split("&"))])


@lru_cache(128)
def foreign_secrets(query: bytes) -> frozenset[str]:
    """The values of all parameters but the protocol's own, as an auth may add them."""
    pairs = (pair.partition("=") for pair in query.decode("ascii", "replace").split("&"))
    return decoded(value for name, _, value in pairs if not OWN_PARAMS.fullmatch(unquote(name)))


def decoded(texts: Iterable[str]) -> frozenset[str]:
    """The texts, and what they are without percent-encoding, but for empty ones."""
    forms = (form for v in texts for form in (v, unquote(v), unquote(v.replace("+", " "))))
    return frozenset(form for form in forms if form)
