"""How a handler failed, in words that may be logged: never with words of a payload (R19)."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator

import orjson

from feedapi_client.errors import FeedError
from feedapi_client.model import Batch
from feedapi_client.protocol.text import printable

_CHARACTERS = 500
"""Characters of an exception's text that are looked at. The rest is cut."""
_SHORTEST_PART = 4
"""A word of at least so many characters is hidden also where it is a part of a payload's word."""
_FRAMES = 20
_LINKS = 5
"""Exceptions of a chain of causes that are shown."""
_WORD = re.compile(r"[^\W_]+")
_URL_SECRETS = (
    (re.compile(r"(://)[^/\s@'\"]+@"), r"\1***@"),
    (re.compile(r"(https?://[^\s?#'\"]*)[?#][^\s'\"]*"), r"\1?***"),
    (
        re.compile(r"(?i)\b(pass(?:word|wd)?|pwd|secret|token|api[_-]?key)(\s*[=:]\s*)\S+"),
        r"\1\2***",
    ),
)
_MASKS = re.compile(r"\*\*\*(?:[^\w<>]*\*\*\*)+")


class FailureText:
    """Describes the errors of a handler with one batch.

    An exception's text may quote the event that it is about: every word that also stands in a
    payload of the batch is replaced by ``***``. So are credentials and queries of URLs.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._payloads: str | None = None

    def line(self, error: BaseException) -> str:
        """Return the type of the error and its text, on one line."""
        name = type(error).__qualname__
        message = self._message(error)
        return f"{name}: {message}" if message else name

    def traceback(self, error: BaseException) -> str:
        """Return the error with its traceback, and those of its causes, the first one first."""
        parts = []
        for each, quoted in reversed(list(_chain(error))):
            frames = "".join(traceback.format_tb(each.__traceback__, limit=-_FRAMES))
            name = type(each).__qualname__
            parts.append(
                f"Traceback (most recent call last):\n{frames}{self.line(each) if quoted else name}"
            )
        return "\n\nThen:\n\n".join(parts)

    def _message(self, error: BaseException) -> str:
        if isinstance(error, FeedError):
            return str(error)
        text = text_of(error)
        for pattern, replacement in _URL_SECRETS:
            text = pattern.sub(replacement, text)
        text = _WORD.sub(lambda word: "***" if self._quotes(word[0]) else word[0], text)
        return printable(_MASKS.sub("***", text))

    def _quotes(self, word: str) -> bool:
        if self._payloads is None:
            self._payloads = "\n".join(_texts(self._batch)).casefold()
        word = word.casefold()
        if len(word) >= _SHORTEST_PART:
            return word in self._payloads
        return bool(re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", self._payloads))


def text_of(error: BaseException) -> str:
    """Return the beginning of an exception's text, which may hold anything, or nothing."""
    try:
        return str(error)[:_CHARACTERS]
    except Exception:  # noqa: BLE001 - an exception without a text is described by its type
        return ""


def _texts(batch: Batch) -> Iterable[str]:
    """The payloads and headers of the events, also with their escapes undone."""
    for event in batch.events:
        raw = event.raw
        yield raw.decode("utf-8", "replace")
        if b"\\" in raw:
            try:
                yield str(orjson.loads(raw))
            except ValueError:
                yield raw.decode("unicode_escape", "replace")
        if event.headers:
            yield str(event.headers)


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """The error and its causes, and whether the text of each may be shown.

    What is below an error of this library comes from a database driver or an HTTP client. This
    library has put into words of its own what of it may be shown.
    """
    quoted, each = True, error
    for _ in range(_LINKS):
        yield each, quoted
        if isinstance(each, BaseExceptionGroup):
            below: BaseException | None = each.exceptions[0]
        else:
            hidden = each.__suppress_context__ and each.__cause__ is None
            below = None if hidden else each.__cause__ or each.__context__
        if below is None:
            return
        quoted = quoted and not isinstance(each, FeedError)
        each = below
