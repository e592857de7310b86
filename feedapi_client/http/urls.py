"""The feed's URL: taken apart, compared, and shown without secrets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

import httpx

from feedapi_client.errors import NegotiationError
from feedapi_client.http.redaction import decoded, query_secrets
from feedapi_client.model import public_url
from feedapi_client.protocol.dialects import Params

PORTS = {"http": 80, "https": 443}
_LONGEST_REMEMBERED = 1024

Origin = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class FeedURL:
    """A feed's URL in the parts that requests are made of. The query is sent with every request."""

    site: str
    path: str
    query: str
    origin: Origin
    basic_auth: tuple[str, str] | None
    secrets: frozenset[str]  # what a publisher might echo: query, its values, credentials
    public: str  # without credentials, query and fragment, for messages

    @classmethod
    def parse(cls, url: str) -> FeedURL:
        base = parse_url(url)
        path, _, query = base.raw_path.decode("ascii").partition("?")
        try:
            public = public_url(url)
        except ValueError as error:
            raise _unreadable(error) from None
        return cls(
            site=f"{base.scheme}://{base.netloc.decode('ascii')}",
            path=path,
            query=query,
            origin=origin(base),
            basic_auth=(base.username, base.password) if base.userinfo else None,
            secrets=query_secrets(query) | decoded([base.password, base.userinfo.decode("ascii")]),
            public=public,
        )

    def target(self, suffix: str, params: Params, client_params: str = "") -> str:
        """Path and query of one request: the feed's, the client's parameters, then `params`."""
        path = self.path.rstrip("/") + suffix if suffix else self.path
        own = [f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in params]
        query = "&".join(filter(None, [self.query, client_params, *own]))
        return f"{path}?{query}" if query else path

    def request_url(self, target: str) -> httpx.URL:
        # A partition at its end is asked with the same URL again and again, and httpx takes about
        # 30 microseconds to read one: the last few thousand short ones are remembered.
        url = self.site + target
        return _remembered(url) if len(url) <= _LONGEST_REMEMBERED else httpx.URL(url)


_remembered = lru_cache(4096)(httpx.URL)


@lru_cache(4)
def parse_url(url: str) -> httpx.URL:
    """The parsed URL. Raises `NegotiationError` for one that can't be a feed's."""
    if not isinstance(url, str):
        raise NegotiationError(f"the feed's URL must be a string, not {type(url).__name__}")
    try:
        parsed = httpx.URL(url)
        host = parsed.host
        # What the resolver does with the name: it fails for an empty label, or one that is too
        # long, with an error that httpx lets through.
        name = parsed.raw_host.decode("ascii")
        name.encode("idna")
    except (httpx.InvalidURL, ValueError) as error:
        raise _unreadable(error) from None
    if parsed.scheme not in PORTS or not host or ("%" in name and ":" not in name):
        raise NegotiationError("the feed's URL must begin with http:// or https:// and name a host")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise NegotiationError("the feed's URL names a port that is not from 1 to 65535")
    return parsed


def _unreadable(error: Exception) -> NegotiationError:
    # The reason may quote a part of the URL, which may be a part of a password.
    return NegotiationError(f"the feed's URL can't be read ({type(error).__name__})")


def origin(url: httpx.URL) -> Origin:
    """Scheme, host and port, which together decide what credentials may be sent to."""
    return url.scheme, url.host, url.port or PORTS.get(url.scheme)


def shown_origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"
