"""What a publisher sends, in messages of ours (R21)."""

from __future__ import annotations

from collections.abc import Callable

_QUOTED = 200


def excerpt(body: bytes, hide: Callable[[str], str] = str) -> str:
    """Return the first 200 characters of a response, printable and on one line.

    Arguments:
        body: any bytes.
        hide: removes secrets. It gets more than 200 characters, so that no part of a secret is left
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
