"""The Retry-After header (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
import time
from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after(value: str | None, now: str | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, in either of its forms.

    `now` is the response's Date: taken together, the two do not depend on how the publisher's clock
    differs from ours. Returns None without a header, or for one that can't be read.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        later = _timestamp(value)
        if later is None:
            return None
        seconds = later - (_timestamp(now) or time.time())
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _timestamp(date: str | None) -> float | None:
    if not date:
        return None
    try:
        moment = parsedate_to_datetime(date)
        # The oldest of the three formats names no zone; all of them are in GMT.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None
