"""What a cursor or a token may be: printable ASCII of at most 16 KiB (R18).

Anything else can't be sent in a URL, or not be stored by every database. It is refused where it is
decoded, before it can be committed.
"""

from __future__ import annotations

from feedapi_client.model import FIRST, LAST

MAX_CURSOR = 16 * 1024
"""Characters of the longest cursor or token. Encoded for a URL it may take three times as much,
and httpx sends no URL over 64 KiB."""
_SHOWN = 80
SPECIAL = frozenset((FIRST, LAST))
"""What a consumer asks with and a publisher never answers with (R3)."""


def is_valid(cursor: str) -> bool:
    """Return whether the text can be stored and sent back: not empty, printable ASCII, 16 KiB."""
    return 0 < len(cursor) <= MAX_CURSOR and cursor.isascii() and cursor.isprintable()


def are_valid(cursors: list[str]) -> bool:
    """Return whether all of these cursors are valid. Checks them at once."""
    text = "".join(cursors)
    short = len(text) <= MAX_CURSOR or max(map(len, cursors)) <= MAX_CURSOR
    return short and all(cursors) and text.isascii() and text.isprintable()


def problem(cursor: str) -> str:
    """Return what is wrong with a text that is not valid, for "... is ..."."""
    if not cursor:
        return "empty"
    if len(cursor) > MAX_CURSOR:
        return f"{len(cursor)} characters long: at most {MAX_CURSOR} are accepted"
    return f"not printable ASCII: {shown(cursor)}"


def shown(cursor: str) -> str:
    """Return a cursor for a message: quoted, escaped, and cut."""
    whole = ascii(cursor[: _SHOWN + 1])
    return whole if len(whole) <= _SHOWN + 2 else f"{whole[: _SHOWN + 1]}...{whole[0]}"
