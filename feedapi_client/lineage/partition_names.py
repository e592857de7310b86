"""Partitions in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 8


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
