"""Foreign bytes in our messages."""

from __future__ import annotations

_QUOTED = 200


def excerpt(body: bytes) -> str:
    """The first 200 characters of a response, on one line and printable whatever the bytes are."""
    text = body[: 4 * _QUOTED].decode("utf-8", "backslashreplace")
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:_QUOTED])
    return shown[:_QUOTED]
