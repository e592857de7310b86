"""The time of day in a simulation: that of the virtual clock, until somebody sets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import Any

from feedapi_client import status
from feedapi_client.runtime import partition, trouble

START = 1_700_000_000.0
"""Seconds since 1970 at which each simulation begins."""


class WallClock:
    """What the consumer takes for the time of day. `now` gives the virtual time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.off_by = 0.0
        """Seconds that it is ahead of the publisher's clock."""
        self._now = now

    def time(self) -> float:
        """Return the consumer's time in seconds since 1970."""
        return START + self._now() + self.off_by

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the library see this time of day during the block.

        Not thread-safe: its modules are changed for the whole process.
        """
        modules: tuple[Any, ...] = trouble, partition, status
        _shown.append(self)
        for module in modules:
            module.datetime = _Shown
        try:
            yield
        finally:
            _shown.pop()
            for module in modules:
                module.datetime = _Shown if _shown else datetime


@lru_cache(4)
def _at(time: float, tz: tzinfo | None) -> datetime:
    """Return a time of day. It is asked for several times before virtual time passes."""
    return datetime.fromtimestamp(time, tz)


class _Shown(datetime):
    """The library's `datetime` meanwhile."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        # A plain one: to make one of a subclass takes twice as long.
        return _at(_shown[-1].time(), tz)


_shown: list[WallClock] = []
"""The clock whose time is shown is the last one."""
