"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import httpx

from feedapi_client.model import public_url

_SHORTEST_SECRET = 4
_CHANGED = r"(?i:\\+u[0-9a-f]{4}|\\+x[0-9a-f]{2}|%(?:25)*[0-9a-f]{2}|&(?:amp;)*#?\w+;|[^a-z0-9])"
"""What stands for a character that is no ASCII letter or digit: itself, or an escape."""
_HTTP_LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
    "hpack.hpack",
    "hpack.table",
)


# As httpcore logs the headers of a response: pairs of bytes.
_SECRET_RESPONSE_HEADER = re.compile(
    r"""(?i)(\(b'(?:set-cookie|location)', )b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)


class SecretHolder(Protocol):
    """A feed in use, whose requests other libraries log."""

    def owns(self, url: httpx.URL) -> bool:
        """Whether a request to the URL is one of this feed's."""
        ...

    def secrets(self) -> frozenset[str]:
        """What must not be shown: of the URL, the client, and the headers of requests under way."""
        ...


_feeds_in_use: weakref.WeakSet[SecretHolder] = weakref.WeakSet()


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """Replace the secrets in a text by ``***``, also where an encoder has escaped parts of them.

    Secrets of fewer than four characters are left.
    """
    chosen = frozenset(secret for secret in secrets if len(secret) >= _SHORTEST_SECRET)
    return _pattern(chosen).sub("***", text) if chosen else text


@lru_cache(maxsize=128)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    # The longest first, so that no rest of one stays when another is a part of it.
    longest_first = sorted(secrets, key=lambda secret: (-len(secret), secret))
    return re.compile("|".join(map(_any_form, longest_first)))


def _any_form(secret: str) -> str:
    """The regular expression of a secret, with what encoders change taken for any such thing."""
    words = re.split(r"([^A-Za-z0-9]+)", secret)
    if sum(map(len, words[::2])) < _SHORTEST_SECRET:
        return re.escape(secret)
    words[1::2] = [f"{_CHANGED}{{1,{8 * len(changed)}}}?" for changed in words[1::2]]
    return "".join(words)


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
        hidden = _SECRET_RESPONSE_HEADER.sub(r"\1b'***'", hidden)
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
    and from the values of Set-Cookie and Location, whose records do not name the request.
    """
    for name in _HTTP_LOGGERS:
        logging.getLogger(name).addFilter(_redact)


def _without_query(argument: object, feeds: list[SecretHolder]) -> object:
    if isinstance(argument, httpx.URL) and any(feed.owns(argument) for feed in feeds):
        return public_url(str(argument))
    return argument
