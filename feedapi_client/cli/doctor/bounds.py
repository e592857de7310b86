"""How much traffic an examination may cause."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MAX_REQUESTS = 120
MAX_BYTES = 32 * KIB * KIB
PAGE_BYTES = KIB * KIB
TIMEOUT = 10.0
SAMPLED_PARTITIONS = 6
PAGES_READ = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one examination. All requests are made one after the other."""

    max_requests: int = MAX_REQUESTS
    """Requests in total, repeated ones and redirects included."""
    max_bytes: int = MAX_BYTES
    """Received bytes in total. One chunk may come on top."""
    page_bytes: int = PAGE_BYTES
    """Bytes of one page that are read. The rest of a longer one is not received."""
    timeout: float = TIMEOUT
    """Seconds for one request as a whole."""
    partitions: int = SAMPLED_PARTITIONS
    """Partitions that are read, of those that the feed lists."""
    pages: int = PAGES_READ
    """Pages read of each of these partitions, from its first event on."""
    attempts: int = 3
    """Attempts at a request that fails in a way that may pass."""
    base_delay: float = 0.1
    """Seconds of the longest first pause between two of these attempts."""
    limited_attempts: int = 6
    """Attempts at a request that is refused by a rate limit."""
    limited_base_delay: float = 0.5
    """Seconds of the longest first pause between two of these attempts."""
    max_retry_after: float = 5.0
    """Seconds that a Retry-After may ask for; a longer one is cut to this."""
    unanswered: int = 3
    """Requests without an answer, one after the other, that end the examination."""
    stream_milliseconds: int = 400
    """For how long a streamed response is asked for."""
