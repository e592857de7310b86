"""Whether responses are streamed. A proxy may hold back what should come at once (R14).

nginx does by default: it passes a response on when 8 KiB of it are there, or its end. Of a stream
nothing arrives then, for as long as the stream is open.
"""

from __future__ import annotations

import math

POLLED_SECONDS = 600.0
"""Polls go on for so long before a stream is tried again, and for twice as long each time."""
MOST_POLLED_SECONDS = 86_400.0


class Streaming:
    """Streams until a proxy shows that it buffers them; then one partition tries again at times."""

    def __init__(self) -> None:
        self._polls_until = -math.inf
        self._polls_for = POLLED_SECONDS
        self._trial: int | None = None
        self._trial_until = 0.0

    def __repr__(self) -> str:
        return f"<Streaming: {'streams' if self._polls_until < 0 else 'polls'}>"

    def is_tried(self, partition: int, now: float, timeout: float) -> bool:
        """Whether the next request of a partition is to ask for a stream.

        `timeout`: seconds that a stream may be silent.
        """
        if self._polls_until == -math.inf:
            return True
        if now < self._polls_until:
            return False
        if self._trial is None or now >= self._trial_until:
            self._trial, self._trial_until = partition, now + 2.0 * timeout
        return self._trial == partition

    def heard(self) -> None:
        """A stream has brought something."""
        self._polls_until, self._trial = -math.inf, None

    def held_back(self, now: float) -> float | None:
        """A request without a stream has brought what a silent stream did not.

        Return for how many seconds the feed is polled from now on; None if it is polled already.
        """
        if now < self._polls_until:
            return None
        seconds = self._polls_for
        self._polls_until, self._trial = now + seconds, None
        self._polls_for = min(2.0 * seconds, MOST_POLLED_SECONDS)
        return seconds

    def stayed_silent(self, partition: int) -> None:
        """Neither a stream of the partition nor the request after it has brought an event."""
        if self._trial == partition:
            self._trial = None
