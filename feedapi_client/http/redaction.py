"""Secrets that must not be shown: in our messages always, in httpx's own logs on request (R19)."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from functools import lru_cache
from html.entities import html5
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
    """Replace the secrets in a text by ``***``, also where they are escaped.

    Found in any case: plain, percent-encoded, and as JSON, Python or HTML write them, also several
    times over. Secrets of fewer than four characters are left.
    """
    chosen = frozenset(secret for secret in secrets if len(secret) >= _SHORTEST_SECRET)
    return _pattern(chosen).sub("***", text) if chosen else text


@lru_cache(maxsize=128)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    # The longest first, so that no rest of one stays when another is a part of it.
    longest_first = sorted(secrets, key=lambda secret: (-len(secret), secret))
    return re.compile("|".join("".join(map(_any_form, secret)) for secret in longest_first))


@lru_cache(maxsize=1024)
def _any_form(character: str) -> str:
    """The regular expression of a character in every form that an encoder gives it."""
    if character.isascii() and character.isalnum():
        return character
    plain = r"\\+" if character == "\\" else r"\\*" + re.escape(character)
    encoded = character.encode("utf-8", "surrogatepass")
    units = character.encode("utf-16-be", "surrogatepass")
    forms = [
        plain,
        "".join(rf"%(?:25)*(?i:{byte:02x})" for byte in encoded),
        "".join(rf"\\+u(?i:{units[at : at + 2].hex()})" for at in range(0, len(units), 2)),
        "".join(rf"\\+x(?i:{byte:02x})" for byte in encoded),
        rf"\\+x(?i:{ord(character):02x})",
        rf"&(?:amp;)*#(?:0*{ord(character)}|[xX]0*(?i:{ord(character):x}));",
        *(rf"&(?:amp;)*{name}" for name in _html_names(character)),
    ]
    if character == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(forms)})"


def _html_names(character: str) -> list[str]:
    return [name for name, value in html5.items() if value == character and name.endswith(";")]


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
