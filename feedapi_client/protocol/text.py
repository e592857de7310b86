"""What a publisher sends, in messages of ours (R21)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_QUOTED = 200
_SHOWN = 8


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
