"""What a publisher sends: in messages of ours (R19, R21), and as a cursor (R18)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise
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
LONGEST_BYTES = 4 * LONGEST_TEXT + 4
"""Bytes that are more characters than these, of whatever text."""
_WORDS = re.compile(r"([A-Za-z0-9]+)([^A-Za-z0-9]*)")
_ESCAPED = re.compile(
    r"[^a-z0-9]++|(?<=\\)u[0-9a-f]{4}|(?<=\\)x[0-9a-f]{2}|(?:(?<=%)|(?<=25))[0-9a-f]{2}"
    r"|(?<=[&#;])\w{1,8};",
    re.IGNORECASE | re.ASCII,
)
"""A piece of what encoders write for what is between two words of a secret. Where one piece ends is
never in doubt: a text can't be cut in two ways."""
_LONGEST_ESCAPE = 24
_MOST_STEPS = 1 << 15
"""Pieces that are looked at in one text. One that was made to take longer is hidden from there."""


class KnownSecrets(Protocol):
    """What must not be shown of a feed in use, and what it can be told from."""

    site: str

    def texts(self) -> frozenset[str]:
        """Return the texts that are hidden."""
        ...


in_use: WeakSet[KnownSecrets] = WeakSet()
"""Of all feeds in use. A publisher may echo what it was sent anywhere, in a cursor or an id too."""


def hidden(text: str, *, cut: bool = False) -> str:
    """Return what a publisher sent without the secrets of the feeds in use."""
    secrets = frozenset[str]().union(*(each.texts() for each in list(in_use)))
    return hide_secrets(text, secrets, cut=cut)


def hide_secrets(text: str, secrets: Iterable[str], *, cut: bool = False) -> str:
    """Replace the secrets in a text by ``***``, also where an encoder has escaped parts of them.

    The text is cut to `LONGEST_TEXT` first, unless it is `cut` already, and what may be the
    beginning of a secret at the cut is hidden, too. Secrets of fewer than four characters are left.
    """
    cut, text = cut or len(text) > LONGEST_TEXT, text[:LONGEST_TEXT]
    steps = count()
    # The longest first, so that no rest of one stays when another is a part of it.
    for secret in sorted({s for s in secrets if len(s) >= _SHORTEST_SECRET}, key=len, reverse=True):
        first = _WORDS.search(secret)
        if first and first[1] not in text and not cut:
            continue
        parts = _WORDS.findall(secret)
        if sum(len(word) for word, _ in parts) < _SHORTEST_SECRET:
            parts = [(secret, "")]
        at = 0
        while (at := text.find(parts[0][0], at)) >= 0:
            end = _end(text, at, parts, steps, cut=cut)
            text = text if end is None else f"{text[:at]}***{text[end:]}"
            at += 1 if end is None else 3
        if cut:
            text = _without_beginning(text, parts[0][0])
    return text


def _end(
    text: str, at: int, parts: list[tuple[str, str]], steps: Iterator[int], *, cut: bool
) -> int | None:
    """Where a secret ends whose first word is there; None if it goes on otherwise.

    No pattern is made of a secret or of the text: both may be long, and chosen by others.
    """
    end = at + len(parts[0][0])
    for (_, between), (word, _) in pairwise(parts):
        start, most = end, end + _LONGEST_ESCAPE * len(between)
        while start == end or not text.startswith(word, start):
            if next(steps) > _MOST_STEPS:
                return len(text)
            found = _ESCAPED.match(text, start, most)
            if found is None:
                rest = text[start:]
                goes_on = cut and (len(rest) < _LONGEST_ESCAPE or word.startswith(rest))
                return len(text) if goes_on else None
            start = found.end()
        end = start + len(word)
    return end


def _without_beginning(text: str, word: str) -> str:
    """Return a text that was cut without the beginning of a word that may have gone on there."""
    for length in range(min(len(word), len(text)), _SHORTEST_SECRET - 1, -1):
        if text.endswith(word[:length]):
            return f"{text[:-length]}***"
    return text


def excerpt(body: bytes, hide: Callable[[str], str] = hidden) -> str:
    """Return the first 200 characters of a response, printable and on one line.

    `hide` gets as much as it looks at, so that no part of a secret is left that reaches beyond the
    cut.
    """
    return printable(hide(body[:LONGEST_BYTES].decode("utf-8", "backslashreplace")))


def quoted(text: str) -> str:
    """Return a value that a publisher sent, without secrets, printable and cut."""
    return printable(hidden(text))


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
