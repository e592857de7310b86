"""Partitions in messages."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 8


def names(partitions: Iterable[int]) -> str:
    """Return "partition 4" or "partitions 4, 5", at most 8 of them, for a message."""
    listed = sorted(partitions)
    shown = ", ".join(map(str, listed[:_SHOWN]))
    others = " and others" if len(listed) > _SHOWN else ""
    return f"partition{'s' if len(listed) > 1 else ''} {shown}{others}"
