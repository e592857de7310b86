"""No log records of the library while it is simulated: what goes wrong there is no news.

Nor threads that look for event loops which don't run, on another clock than the simulated one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from feedapi_client.runtime.heartbeat import watch


@contextmanager
def silenced() -> Iterator[None]:
    """Write no log records of the library in the block, and watch no event loop."""
    log = logging.getLogger("feedapi_client")
    level, starts_threads = log.level, watch.starts_threads
    log.setLevel(logging.CRITICAL + 1)
    watch.starts_threads = False
    try:
        yield
    finally:
        watch.starts_threads = starts_threads
        log.setLevel(level)
