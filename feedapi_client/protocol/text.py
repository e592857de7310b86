"""What a publisher sends: in messages of ours (R19, R21), and as a cursor (R18)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from weakref import WeakSet

from feedapi_client.model import FIRST, LAST

# Characters of the longest cursor or token. Encoded for a URL it may take three times as much, and
# httpx sends no URL over 64 KiB.
MAX_CURSOR = 16 * 1024
SPECIAL = frozenset((FIRST, LAST))  # a consumer asks with these, and no publisher answers so (R3)
_QUOTED = 200
_SHOWN = 8
_CURSOR_SHOWN = 80
LONGEST_TEXT = 16 * 1024  # characters that are shown, and of a secret
_BEGINNING = 32  # letters and digits by which a secret is found
_ESCAPE = 8  # of them, at most, in the half of an escape
LONGEST_BYTES = 8 * LONGEST_TEXT  # that are more characters than are searched, of whatever text
_NO_WORD = re.compile(  # what is between words, as it is and as encoders write it
    r"(?:\\(?:u[0-9a-f]{4}|x[0-9a-f]{2})|%(?:25)*[0-9a-f]{2}|&(?:amp;)*#?\w{1,8};"
    r"|[^a-z0-9])++",
    re.IGNORECASE | re.ASCII,
)
_SYMBOLS = re.compile(r"[^a-z0-9]+", re.IGNORECASE | re.ASCII)


class KnownSecrets(Protocol):
    """What must not be shown of a feed in use, and what it can be told from."""

    site: str

    def texts(self) -> frozenset[str]: ...


# A publisher may echo what it was sent anywhere, in a cursor or an id too.
in_use: WeakSet[KnownSecrets] = WeakSet()


def hidden(text: str) -> str:
    """Return what a publisher sent without the secrets of the feeds in use."""
    secrets = frozenset[str]().union(*(each.texts() for each in list(in_use)))
    return hide_secrets(text, secrets)


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return the text's first `LONGEST_TEXT` characters with ``***`` in place of the secrets, also
    where an encoder has escaped parts of them: only letters and digits are compared, which no
    encoder escapes. Secrets of fewer than four characters are left.
    """
    text = text[: 2 * LONGEST_TEXT]  # a secret that begins before the cut is known by its end
    forms: set[str] = set()
    for secret in secrets:
        words = {form for each in (_NO_WORD, _SYMBOLS) if len(form := each.sub("", secret)) >= 4}
        forms |= words
        if not words and len(secret) >= 4:
            text = text.replace(secret, "***")
    blank = _NO_WORD.sub(lambda found: "\0" * len(found[0]), text)
    places = [place for place, char in enumerate(blank) if char != "\0"]
    plain = blank.replace("\0", "")
    hits: list[tuple[int, int]] = []
    for form in forms:
        at = -1
        while (at := plain.find(form[:_BEGINNING], at + 1)) >= 0:
            stop = at + len(form)
            # It may be longer than what is searched, at the end of which may be half an escape.
            cut = stop > len(plain) and form.startswith(plain[at:-_ESCAPE])
            if cut or plain.startswith(form, at):
                hits.append((places[at], places[min(stop, len(plain)) - 1] + 1))
    shown: list[str] = []
    end = 0
    for start, stop in sorted(hit for hit in hits if hit[0] < LONGEST_TEXT):
        if start >= end:
            shown += (text[end:start], "***")
        end = max(end, stop)
    return "".join((*shown, text[end:LONGEST_TEXT]))


def excerpt(body: bytes, hide: Callable[[str], str] = hidden) -> str:
    """Return the first 200 characters of a response, printable and on one line. `hide` gets as much
    as it looks at, so that no part of a secret is left that reaches beyond the cut.
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
