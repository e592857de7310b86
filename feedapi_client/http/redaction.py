"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import httpx

from feedapi_client.model import public_url

_SHORTEST_SECRET = 4
LONGEST_TEXT = 16 * 1024
"""Characters of a text that are searched, and shown."""
_WORDS = re.compile(r"([A-Za-z0-9]+)([^A-Za-z0-9]*)")
_ESCAPED = re.compile(
    r"(?i:\\+u[0-9a-f]{4}|\\+x[0-9a-f]{2}|%(?:25)*[0-9a-f]{2}|&(?:amp;)*#?\w{1,8};|[^a-z0-9])+"
)
"""What encoders write for what is between two words of a secret."""
_LONGEST_ESCAPE = 24
_HTTP_LOGGERS = (
    "httpx",
    *(f"httpcore.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")),
    "hpack.hpack",
    "hpack.table",
)
_BYTES = r"""b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
# As httpcore logs the headers of a response, the reason of a proxy that refuses its credentials,
# and the credentials of a SOCKS proxy.
_SECRET_BYTES = re.compile(
    rf"(?i)(\(b'(?:set-cookie|location)', |\(b'HTTP/[0-9.]+', 407, |auth=\({_BYTES}, ){_BYTES}"
)


class SecretHolder(Protocol):
    """A feed in use, whose requests other libraries log."""

    def owns(self, url: httpx.URL) -> bool:
        """Whether a request to the URL is one of this feed's."""
        ...

    def secrets(self) -> frozenset[str]:
        """What must not be shown: of the URL, the client, the proxy, and of what was sent."""
        ...


_feeds_in_use: weakref.WeakSet[SecretHolder] = weakref.WeakSet()


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """Replace the secrets in a text by ``***``, also where an encoder has escaped parts of them.

    The text is cut to `LONGEST_TEXT` first. Secrets of fewer than four characters are left.
    """
    text = text[:LONGEST_TEXT]
    # The longest first, so that no rest of one stays when another is a part of it.
    for secret in sorted({s for s in secrets if len(s) >= _SHORTEST_SECRET}, key=len, reverse=True):
        parts = _WORDS.findall(secret)
        if sum(len(word) for word, _ in parts) < _SHORTEST_SECRET:
            text = text.replace(secret, "***")
            continue
        at = 0
        while (at := text.find(parts[0][0], at)) >= 0:
            end = _end(text, at, parts)
            text = text if end is None else f"{text[:at]}***{text[end:]}"
            at += 1 if end is None else 3
    return text


def _end(text: str, at: int, parts: list[tuple[str, str]]) -> int | None:
    """Where a secret ends whose first word is there; None if it goes on otherwise.

    No pattern is made of a secret or of the text: both may be long, and chosen by others.
    """
    end = at + len(parts[0][0])
    for (_, between), (word, _) in pairwise(parts):
        most = end + _LONGEST_ESCAPE * len(between) + len(word)
        start = text.find(word, end, most)
        while start > end and not _ESCAPED.fullmatch(text, end, start):
            start = text.find(word, start + 1, most)
        if start <= end:
            return None
        end = start + len(word)
    return end


def register(holder: SecretHolder) -> None:
    """Have the secrets of a feed redacted for as long as `holder` lives."""
    _feeds_in_use.add(holder)


class _Redact(logging.Filter):
    """Takes secrets of feeds in use out of records; other requests are left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        feeds = list(_feeds_in_use)
        if isinstance(record.args, tuple):
            record.args = tuple(_without_query(arg, feeds) for arg in record.args)
        text = record.getMessage()
        hidden = hide_secrets(text, {secret for feed in feeds for secret in feed.secrets()})
        hidden = _SECRET_BYTES.sub(r"\1b'***'", hidden)
        if hidden != text:
            record.msg, record.args = hidden, ()
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


def _without_query(argument: object, feeds: list[SecretHolder]) -> object:
    if isinstance(argument, httpx.URL) and any(feed.owns(argument) for feed in feeds):
        return public_url(str(argument))
    return argument
