"""No log records of the library while it is simulated: what goes wrong there is no news."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced() -> Iterator[None]:
    """Write no log records of the library in the block."""
    log = logging.getLogger("feedapi_client")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
