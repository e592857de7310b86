"""What the application does with the batches of one partition, as far as it shows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(slots=True, eq=False)
class Handling:
    """The batch in flight of one partition, and the failures of its handler.

    Where several are in flight (`FeedConsumer.run_by_key`), the oldest one. Moments without a date
    are on the clock of the event loop.
    """

    in_flight_since: datetime | None = None
    """When the batch in flight was delivered."""
    delivered_at: float = 0.0
    """The same moment on the clock of the event loop."""
    attempt_began: float | None = None
    """When the application began to handle it; None once it has returned or failed."""
    attempts: int = 0
    failures: int = 0
    error: str | None = None
    """How the handler failed with the batch in flight."""
    hangs: str | None = None
    """That the application has had the batch in flight for too long."""
    since: datetime | None = None
    """When it first failed with that batch."""
    last_since: datetime | None = None
    """The same; of events that are handled one by one, with the last one that began to fail."""
    retry_at: datetime | None = None
    quarantined: int = 0
    passed_over: int = 0
    """Events that were not handled, because one with their identity is done."""
    committed_at: datetime | None = None
    _later: deque[tuple[datetime, float]] | None = None  # made when needed: there are thousands

    def delivered(self, now: float) -> None:
        if self.in_flight_since is not None:
            self._later = self._later or deque()
            self._later.append((datetime.now(UTC), now))
            return
        self.in_flight_since = datetime.now(UTC)
        self.attempt_began = self.delivered_at = now
        self.attempts = 1

    def attempt(self, now: float) -> None:
        self.attempt_began = now
        self.attempts += 1
        self.retry_at = self.hangs = None

    def returned(self) -> None:
        self.attempt_began = self.hangs = None

    def failed(self, error: str) -> None:
        self.event_failed(error, again=self.since is not None)
        self.attempt_began = self.hangs = None

    def event_failed(self, error: str, *, again: bool) -> None:
        """The handler of a single event raised. Others of the batch are handled meanwhile."""
        self.failures += 1
        self.error = error
        if not again:
            self.last_since = datetime.now(UTC)
        self.since = self.since or self.last_since

    def recovered(self) -> None:
        """No event that failed is left in flight."""
        self.error = self.since = self.last_since = self.retry_at = None

    def pauses(self, seconds: float) -> None:
        self.retry_at = datetime.now(UTC) + timedelta(seconds=seconds)

    def saved(self) -> None:
        self.committed_at = datetime.now(UTC)

    def released(self) -> None:
        if self._later:
            self.in_flight_since, self.delivered_at = self._later.popleft()
            self.hangs = None
            return
        self.in_flight_since = self.attempt_began = self.hangs = None
        self.attempts = 0
        self.recovered()
