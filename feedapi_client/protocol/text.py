"""What a publisher sends: in messages of ours (R21), and as a cursor (R18)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from feedapi_client.model import FIRST, LAST

MAX_CURSOR = 16 * 1024
"""Characters of the longest cursor or token. Encoded for a URL it may take three times as much,
and httpx sends no URL over 64 KiB."""
SPECIAL = frozenset((FIRST, LAST))
"""What a consumer asks with and a publisher never answers with (R3)."""
_QUOTED = 200
_SHOWN = 8
_CURSOR_SHOWN = 80


def excerpt(body: bytes, hide: Callable[[str], str] = str) -> str:
    """Return the first 200 characters of a response, printable and on one line.

    `hide` removes secrets. It gets more than 200 characters, so that no part of a secret is left
    that reaches beyond the cut.
    """
    return printable(hide(body[: 8 * _QUOTED].decode("utf-8", "backslashreplace")))


def printable(text: str, length: int = _QUOTED) -> str:
    """Return the text with its unprintable characters escaped, once, and cut to `length`."""
    if text.isprintable():
        return text[:length]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:length]
    )[:length]


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
    """Return a cursor for a message: quoted, escaped, and cut."""
    whole = ascii(cursor[: _CURSOR_SHOWN + 1])
    cut = len(whole) > _CURSOR_SHOWN + 2
    return f"{whole[: _CURSOR_SHOWN + 1]}...{whole[0]}" if cut else whole
