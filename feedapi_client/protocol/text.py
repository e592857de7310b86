"""What a publisher sends: in messages of ours (R19, R21), and as a cursor (R18)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol
from weakref import WeakSet

from feedapi_client.model import FIRST, LAST

MAX_CURSOR = 16 * 1024
"""Characters of the longest cursor or token. Encoded for a URL it may take three times as much,
and httpx sends no URL over 64 KiB."""
SPECIAL = frozenset((FIRST, LAST))
"""What a consumer asks with and a publisher never answers with (R3)."""
_QUOTED = 200
_SHOWN = 8
_CURSOR_SHOWN = 80
_SHORTEST_SECRET = 4
LONGEST_TEXT = 16 * 1024
"""Characters of a text that are searched for secrets, and shown."""
_WORDS = re.compile(r"([A-Za-z0-9]+)([^A-Za-z0-9]*)")
_ESCAPED = re.compile(
    r"(?i:\\+u[0-9a-f]{4}|\\+x[0-9a-f]{2}|%(?:25)*[0-9a-f]{2}|&(?:amp;)*#?\w{1,8};|[^a-z0-9])+"
)
"""What encoders write for what is between two words of a secret."""
_LONGEST_ESCAPE = 24


class KnownSecrets(Protocol):
    """What must not be shown of a feed in use, and what it can be told from."""

    site: str

    def texts(self) -> frozenset[str]:
        """Return the texts that are hidden."""
        ...


in_use: WeakSet[KnownSecrets] = WeakSet()
"""Of all feeds in use. A publisher may echo what it was sent anywhere, in a cursor or an id too."""


def hidden(text: str) -> str:
    """Return what a publisher sent without the secrets of the feeds in use."""
    return hide_secrets(text, frozenset().union(*(each.texts() for each in list(in_use))))


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


def excerpt(body: bytes, hide: Callable[[str], str] = hidden) -> str:
    """Return the first 200 characters of a response, printable and on one line.

    `hide` gets more than 200 characters, so that no part of a secret is left that reaches beyond
    the cut.
    """
    return printable(hide(body[: 8 * _QUOTED].decode("utf-8", "backslashreplace")))


def quoted(text: str) -> str:
    """Return a value that a publisher sent, without secrets, printable and cut."""
    return excerpt(text[: 8 * _QUOTED].encode("utf-8", "backslashreplace"))


def printable(text: str, length: int = _QUOTED) -> str:
    """Return the text with its unprintable characters escaped, once, and cut to `length`."""
    if text.isprintable():
        return text[:length]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:length]
    )[:length]


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number of things, in the right form: "1 event", "2,000 events"."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def names(partitions: Iterable[int]) -> str:
    """Return "partition 4" or "partitions 4, 5", at most 8 of them, for a message."""
    listed = sorted(partitions)
    shown = ", ".join(map(str, listed[:_SHOWN]))
    others = " and others" if len(listed) > _SHOWN else ""
    return f"partition{'s' if len(listed) > 1 else ''} {shown}{others}"


def cycle_text(cycle: Sequence[int]) -> str:
    """Return a cycle as "1 → 2 → 1" for a message, its middle left out when it is long."""
    if len(cycle) <= _SHOWN + 1:
        return " → ".join(map(str, cycle))
    left_out = len(cycle) - _SHOWN
    shown = (*cycle[: _SHOWN - 1], f"... {left_out} more ...", cycle[-1])
    return " → ".join(map(str, shown))


# A cursor or token is printable ASCII of at most 16 KiB. Anything else can't be sent in a URL, or
# not be stored by every database. It is refused where it is decoded, before it can be committed.


def are_valid(*cursors: str) -> bool:
    """Return whether all of these can be stored and sent back."""
    text = "".join(cursors)
    short = len(text) <= MAX_CURSOR or max(map(len, cursors)) <= MAX_CURSOR
    return short and all(cursors) and text.isascii() and text.isprintable()


def problem(cursor: str) -> str:
    """Return what is wrong with a cursor that is not valid, for "... is ..."."""
    if not cursor:
        return "empty"
    if len(cursor) > MAX_CURSOR:
        return f"{len(cursor)} characters long: at most {MAX_CURSOR} are accepted"
    return f"not printable ASCII: {shown(cursor)}"


def shown(cursor: str) -> str:
    """Return a cursor for a message: without secrets, quoted, escaped, and cut."""
    whole = ascii(hidden(cursor)[: _CURSOR_SHOWN + 1])
    cut = len(whole) > _CURSOR_SHOWN + 2
    return f"{whole[: _CURSOR_SHOWN + 1]}...{whole[0]}" if cut else whole
