"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Protocol

import httpx

from feedapi_client.model import public_url

_SHORTEST_SECRET = 4
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


class SecretHolder(Protocol):
    """A feed in use, whose requests other libraries log."""

    def owns(self, url: httpx.URL) -> bool:
        """Whether a request to the URL is one of this feed's."""
        ...

    def secrets(self) -> set[str]:
        """What must not be shown: of the URL, and of the headers that were sent last."""
        ...


_feeds_in_use: weakref.WeakSet[SecretHolder] = weakref.WeakSet()


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """Replace the secrets in a text by ``***``; those of fewer than four characters are left."""
    # The longest first, so that no rest of one stays when another is a part of it.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


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
        if hidden != text:
            record.msg, record.args = hidden, ()
        return True


_redact = _Redact()


def redact_http_logs() -> None:
    """Redact what httpx, httpcore and hpack log about requests to feeds.

    httpx logs the URL of each request at INFO, the layers below log headers at DEBUG. Call this
    once at the start of an application that shows these logs: queries, credentials and values of
    sent headers of the feeds in use are replaced by ``***``. Calling it again changes nothing.
    Records about other requests are left as they are, apart from values that are secrets of a feed.
    """
    for name in _HTTP_LOGGERS:
        logging.getLogger(name).addFilter(_redact)


def _without_query(argument: object, feeds: list[SecretHolder]) -> object:
    if isinstance(argument, httpx.URL) and any(feed.owns(argument) for feed in feeds):
        return public_url(str(argument))
    return argument
