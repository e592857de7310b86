"""What the application does with the batches of one partition, as far as it shows."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta


class Handling:
    """The batch in flight of one partition, and the failures of its handler.

    Where several are in flight (`FeedConsumer.run_by_key`), the oldest one. Moments without a date
    are on the clock of the event loop. Only `RuntimePartition` and its drivers call it.
    """

    __slots__ = (
        "_later",
        "attempt_began",
        "attempts",
        "committed_at",
        "delivered_at",
        "error",
        "failures",
        "hangs",
        "in_flight_since",
        "last_since",
        "passed_over",
        "quarantined",
        "retry_at",
        "since",
    )

    def __init__(self) -> None:
        self.in_flight_since: datetime | None = None
        """When the batch in flight was delivered."""
        self.delivered_at = 0.0
        """The same moment on the clock of the event loop."""
        self.attempt_began: float | None = None
        """When the application began to handle it; None once it has returned or failed."""
        self.attempts = 0
        """How often the handler got the batch in flight."""
        self.failures = 0
        """How often the handler raised."""
        self.error: str | None = None
        """How the handler failed with the batch in flight."""
        self.hangs: str | None = None
        """That the application has had the batch in flight for too long."""
        self.since: datetime | None = None
        """When it first failed with that batch."""
        self.last_since: datetime | None = None
        """The same; of events that are handled one by one, with the last one that began to fail."""
        self.retry_at: datetime | None = None
        self.quarantined = 0
        self.passed_over = 0
        """Events that were not handled, because one with their identity is done."""
        self.committed_at: datetime | None = None
        self._later: deque[tuple[datetime, float]] | None = None

    def delivered(self, now: float) -> None:
        """A batch was delivered."""
        if self.in_flight_since is not None:
            self._later = self._later or deque()
            self._later.append((datetime.now(UTC), now))
            return
        self.in_flight_since = datetime.now(UTC)
        self.attempt_began = self.delivered_at = now
        self.attempts = 1

    def attempt(self, now: float) -> None:
        """The handler gets the batch in flight again."""
        self.attempt_began = now
        self.attempts += 1
        self.retry_at = self.hangs = None

    def returned(self) -> None:
        """The handler has returned. What it did not commit is committed now."""
        self.attempt_began = self.hangs = None

    def failed(self, error: str) -> None:
        """The handler raised."""
        self.failures += 1
        self.attempt_began = self.hangs = None
        self.error = error
        if self.since is None:
            self.since = self.last_since = datetime.now(UTC)

    def event_failed(self, error: str, *, again: bool) -> None:
        """The handler of a single event raised. Others of the batch are handled meanwhile."""
        self.failures += 1
        self.error = error
        if not again:
            self.last_since = datetime.now(UTC)
        if self.since is None:
            self.since = self.last_since

    def recovered(self) -> None:
        """No event that failed is left in flight."""
        self.error = self.since = self.last_since = self.retry_at = None

    def pauses(self, seconds: float) -> None:
        """The handler gets the batch again after a pause."""
        self.retry_at = datetime.now(UTC) + timedelta(seconds=seconds)

    def stuck(self, text: str) -> None:
        """The application shows no sign of life."""
        self.hangs = text

    def quarantine(self) -> None:
        """An event was put into quarantine."""
        self.quarantined += 1

    def saved(self) -> None:
        """A cursor was saved."""
        self.committed_at = datetime.now(UTC)

    def released(self) -> None:
        """The application is done with the oldest batch."""
        if self._later:
            self.in_flight_since, self.delivered_at = self._later.popleft()
            self.hangs = None
            return
        self.in_flight_since = self.attempt_began = self.retry_at = None
        self.attempts = 0
        self.error = self.since = self.last_since = self.hangs = None
