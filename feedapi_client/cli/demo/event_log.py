"""What happened during the demo, with times, for the views."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAX_ENTRIES = 1000


class EventLog:
    """The latest entries, each with the seconds since the start. `on_entry` is called with each."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, str]] = deque(maxlen=_MAX_ENTRIES)
        self.on_entry: Callable[[float, str], None] | None = None
        self._start = time.monotonic()

    def restart_clock(self) -> None:
        """Count the seconds from now."""
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def add(self, text: str) -> None:
        """Add an entry."""
        elapsed = self.elapsed
        self.entries.append((elapsed, text))
        if self.on_entry is not None:
            self.on_entry(elapsed, text)

    @contextmanager
    def with_warnings(self, feed: str) -> Iterator[None]:
        """Add the library's warnings about the feed, instead of logging them."""
        logger = logging.getLogger("feedapi_client")
        handler, propagate = _WarningHandler(self, feed), logger.propagate
        logger.propagate = False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate


class _WarningHandler(logging.Handler):
    def __init__(self, log: EventLog, feed: str) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._prefix = f"feed {feed}"

    def emit(self, record: logging.LogRecord) -> None:
        # There is one feed: its URL on each line would say nothing.
        self._log.add(record.getMessage().removeprefix(self._prefix).lstrip(":, "))
