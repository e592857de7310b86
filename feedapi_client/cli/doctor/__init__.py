"""``feedapi doctor``: is this a sound FeedAPI publisher?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one examination may cost, and how patient it is. Times are seconds."""

    max_requests: int = 120
    max_bytes: int = 32 * 1024**2
    """Received in total. One chunk may come on top."""
    page_bytes: int = 1024**2
    timeout: float = 10.0
    partitions: int = 6
    """That are read, of those that the feed lists."""
    pages: int = 4
    """That are read of each of these, from its first event on."""
    unanswered: int = 3
    """Requests without an answer, one after the other, that end the examination."""
    max_retry_after: float = 5.0
    pauses: float = 1.0
    """A factor on the pauses between attempts."""
    stream_milliseconds: int = 400
