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

from feedapi_client.protocol.text import LONGEST_TEXT, hidden, hide_secrets, in_use

_QUERY = re.compile(r"(https?://[^\s?'\"]++)(\?[^\s'\"]++)?")
# Of a refusal, as httpx logs it: a proxy that only the client knows may echo its credentials.
_REASON = re.compile(r'("HTTP/[0-9.]++ [45][0-9]{2} )[^\n]++')
_RECENT = 32  # values of a header, hidden although their request is over: a token may live for long
_MOST_WORDS = 32  # of a header
_PLAIN_HEADERS = frozenset(
    {"host", "accept", "accept-encoding", "cache-control", "connection", "user-agent"}
)
_HTTP_LOGGERS = (
    *("httpx", "hpack.hpack", "hpack.table"),
    *(f"httpcore.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")),
)


class Secrets:
    """What must not be shown of a feed in use: what its URL, the proxy and the client hold, and
    what is sent. httpx logs URLs that begin with `site` with their query.
    """

    def __init__(self, site: str, fixed: Iterable[str], client: Any) -> None:
        self.site, self._fixed, self._client = site, frozenset(fixed), client
        # The requests under way, and what an auth has sent with each.
        self._sent: WeakKeyDictionary[httpx.Request, set[tuple[str, str]]] = WeakKeyDictionary()
        self._recent: dict[str, deque[tuple[str, str]]] = {}
        in_use.add(self)

    def note(self, request: httpx.Request, sent: httpx.Request, known: frozenset[str]) -> None:
        """Remember what is sent with a request, by an auth perhaps, which may change it again;
        `known` are the values of the query before that: the protocol's, or a redirect's.
        """
        texts = _headers(sent)
        texts.update(("", v) for v in query_values(query_of(sent)) if not decoded([v]) <= known)
        self._sent.setdefault(request, set()).update(texts)
        for text in texts:  # of each header apart: another one may have a new value each time
            recent = self._recent.setdefault(text[0], deque(maxlen=_RECENT))
            with suppress(ValueError):
                recent.remove(text)
            recent.append(text)

    def texts(self) -> frozenset[str]:
        sent = set[tuple[str, str]]().union(*self._recent.copy().values())
        # A list, whatever other threads send.
        for request in [each for ref in self._sent.keyrefs() if (each := ref()) is not None]:
            sent.update(_headers(request), self._sent.get(request, ()))
        params = query_secrets(str(self._client.params))
        return self._fixed.union(params, *(header_secrets(value, name) for name, value in sent))

    def hide(self, text: str) -> str:
        return hide_secrets(text, self.texts())


def _headers(request: httpx.Request) -> set[tuple[str, str]]:
    return {each for each in request.headers.items() if each[0] not in _PLAIN_HEADERS}


def query_of(request: httpx.Request) -> str:
    return request.url.query.decode("ascii", "replace")


def query_values(query: str) -> list[str]:
    """The values of a query as they are sent, and what stands there without a name."""
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [value if equals else name for name, equals, value in pairs]


@lru_cache(8)
def query_secrets(query: str) -> frozenset[str]:
    """A query, and its values. A key without a name is a value, too."""
    return decoded([query, *query_values(query)])


@lru_cache(256)
def header_secrets(value: str, name: str = "authorization") -> frozenset[str]:
    """What a publisher might echo of a header: words, values of cookies, a password. It may have
    chosen them: a cookie's value is one secret, however many words it has, and no more of them are
    looked at than could be found in a text.
    """
    value = value[:LONGEST_TEXT]
    if name == "cookie":
        pairs = (pair.partition("=") for pair in value.split(";", _MOST_WORDS)[:_MOST_WORDS])
        return decoded(cookie.strip().strip('"') for _, _, cookie in pairs)
    words = [*value.split(None, _MOST_WORDS), *re.split(r"[\s,;]+", value, maxsplit=_MOST_WORDS)]
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
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name == "httpx":
            sites = tuple(each.site for each in list(in_use))
            shown = _QUERY.sub(
                lambda m: f"{m[1]}?***" if m[2] and m[1].startswith(sites) else m[0], text
            )
            shown = _REASON.sub(r'\1***"', hidden(shown))
        else:
            shown = text.partition(" ")[0]  # all else is headers
        if shown != text:
            record.msg, record.args = shown, ()
        return True


_redact = _Redact()


def redact_http_logs() -> None:
    """Redact what httpx, httpcore and hpack log about requests.

    httpx logs the URL of each request at INFO: queries, credentials and values of sent headers of
    the feeds in use are replaced by ``***``. The layers below log headers at DEBUG: only what
    happened is left. Call this once at the start of an application that shows these logs.
    """
    for name in _HTTP_LOGGERS:
        logging.getLogger(name).addFilter(_redact)
