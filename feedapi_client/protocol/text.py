"""Foreign bytes in our messages."""

from __future__ import annotations

from collections.abc import Callable

_QUOTED = 200


def excerpt(body: bytes, hide: Callable[[str], str] = str) -> str:
    """The first 200 characters of a response, on one line and printable whatever the bytes are.

    `hide` takes out what is not to be shown; it sees more than the 200, so that nothing is shown of what the cut would halve.
    """
    text = hide(body[: 8 * _QUOTED].decode("utf-8", "backslashreplace"))
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:_QUOTED]
    )[:_QUOTED]
