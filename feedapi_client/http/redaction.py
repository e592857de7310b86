"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import quote, quote_plus

import httpx

from feedapi_client.model import public_url

_SHORTEST_SECRET = 4
LONGEST_TEXT = 16 * 1024
"""Characters of a text that are searched, and shown."""
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
    """Replace the secrets in a text by ``***``, plain or percent-encoded.

    The text is cut to `LONGEST_TEXT` first. Secrets of fewer than four characters are left.
    """
    text = text[:LONGEST_TEXT]
    forms = {form for each in secrets if len(each) >= _SHORTEST_SECRET for form in _forms(each)}
    # The longest first, so that no rest of one stays when another is a part of it.
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def _forms(secret: str) -> set[str]:
    safe = secret.encode("utf-8", "replace")
    return {secret, quote(safe), quote(safe, safe=""), quote_plus(safe)}


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
