"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import re
from base64 import b64decode
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import httpx

from feedapi_client.protocol.text import hidden, hide_secrets, in_use

_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")
_RECENT = 64
"""Texts that were sent and are hidden although their request is over: a token may live for long."""
_PLAIN_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "user-agent"}
)
_HTTP_LOGGERS = (
    *("httpx", "hpack.hpack", "hpack.table"),
    *(f"httpcore.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")),
)
_BYTES = r"""b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
# As httpcore logs the headers of a response, the reason of a proxy that refuses its credentials,
# and the credentials of a SOCKS proxy.
_SECRET_BYTES = re.compile(
    rf"(?i)(\(b'(?:set-cookie|location)', |\(b'HTTP/[0-9.]+', 407, |auth=\({_BYTES}, ){_BYTES}"
)


class Secrets:
    """What must not be shown of a feed in use: what its URL and the client hold, and what is sent.

    Arguments:
        site: scheme, host and port of the feed: httpx logs URLs that begin so, with their query.
        fixed: of the URL and the proxy.
        client: the `httpx.Client` or `httpx.AsyncClient`, whose parameters may change.
    """

    def __init__(self, site: str, fixed: Iterable[str], client: Any) -> None:
        self.site, self._fixed, self._client = site, frozenset(fixed), client
        self._sent: WeakKeyDictionary[httpx.Request, set[str]] = WeakKeyDictionary()
        """The requests under way, and what an auth has sent with each."""
        self._recent: deque[str] = deque(maxlen=_RECENT)
        in_use.add(self)

    def note(self, request: httpx.Request, sent: httpx.Request, known: frozenset[str]) -> None:
        """Remember what is sent with a request, by an auth perhaps, which may change it again.

        `known`: the values of the query before that: the protocol's, or a redirect's.
        """
        texts = _header_values(sent)
        texts.update(v for v in query_values(query_of(sent)) if not decoded([v]) <= known)
        self._sent.setdefault(request, set()).update(texts)
        self._recent.extend(texts.difference(self._recent))

    def texts(self) -> frozenset[str]:
        """The texts that `hide` removes."""
        sent = set(self._recent)
        # A list, whatever other threads send.
        for request in [each for ref in self._sent.keyrefs() if (each := ref()) is not None]:
            sent.update(_header_values(request), self._sent.get(request, ()))
        params = query_secrets(str(self._client.params))
        return self._fixed.union(params, *map(header_secrets, sent))

    def hide(self, text: str) -> str:
        """A text that comes from outside, without the secrets."""
        return hide_secrets(text, self.texts())


def _header_values(request: httpx.Request) -> set[str]:
    return {value for name, value in request.headers.items() if name not in _PLAIN_HEADERS}


def query_of(request: httpx.Request) -> str:
    """The query of a request."""
    return request.url.query.decode("ascii", "replace")


def query_values(query: str) -> list[str]:
    """The values of a query as they are sent, and what stands there without a name."""
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [value if equals else name for name, equals, value in pairs]


@lru_cache(8)
def query_secrets(query: str) -> frozenset[str]:
    """A query, and its values. A key without a name is a value, too."""
    return decoded([query, *query_values(query)])


@lru_cache(128)
def header_secrets(value: str) -> frozenset[str]:
    """What a publisher might echo of a header: words, values of cookies, a password."""
    words = [*value.split(), *re.split(r"[\s,;]+", value)]
    words += [word.partition("=")[2].strip('"') for word in words]
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):
            pair = b64decode(encoded).decode()
            words += [pair, pair.partition(":")[2]]
    return decoded(words)


def decoded(texts: Iterable[str]) -> frozenset[str]:
    """The texts, and what they are without percent-encoding, but for empty ones."""
    forms = (form for v in texts for form in (v, unquote(v), unquote(v.replace("+", " "))))
    return frozenset(form for form in forms if form)


class _Redact(logging.Filter):
    """Takes secrets of feeds in use out of records; other requests are left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        text, feeds = record.getMessage(), list(in_use)
        sites = tuple(each.site for each in feeds)
        shown = _QUERY.sub(lambda m: f"{m[1]}?***" if m[1].startswith(sites) else m[0], text)
        redacted = _SECRET_BYTES.sub(r"\1b'***'", hidden(shown))
        if redacted != text:
            record.msg, record.args = redacted, ()
        return True


_redact = _Redact()


def redact_http_logs() -> None:
    """Redact what httpx, httpcore and hpack log about requests to feeds.

    httpx logs the URL of each request at INFO, the layers below log headers at DEBUG. Call this
    once at the start of an application that shows these logs: queries, credentials and values of
    sent headers of the feeds in use are replaced by ``***``. Calling it again changes nothing.
    Records about other requests are left as they are, apart from values that are secrets of a feed,
    from what does not name the request (the values of Set-Cookie and Location, a proxy's reason for
    status 407, the credentials for a SOCKS proxy), and from texts over 16,384 characters: cut.
    """
    for name in _HTTP_LOGGERS:
        logging.getLogger(name).addFilter(_redact)
