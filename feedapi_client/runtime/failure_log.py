"""How often failures are written to the log (R14).

An outage makes each of up to 32,768 partitions fail again and again. The log says that it goes on,
not each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

log = logging.getLogger(__name__)

RECORDS = 10
"""Records in each interval, of all partitions together."""


class FailureLog:
    """Writes at most one record for each partition, and a few for all of them, in an interval.

    The next record says how many were left out.

    Arguments:
        interval: seconds.
        feed: a field of each record.
    """

    def __init__(self, interval: float, feed: str | None = None) -> None:
        self._interval = interval
        self._feed = feed
        self._written_at: dict[int | None, float] = {}
        self._began = float("-inf")
        self._written = 0
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<FailureLog: {self._written} records written, {self._left_out} left out>"

    def warn(
        self, partition: int | None, text: str | Callable[[], str], *, attempt: int | None = None
    ) -> bool:
        """Write a record about a failure, or count it. Return whether it was written.

        Arguments:
            partition: None for failures of the feed, as those of a discovery are.
            text: the message, or a function that makes it, called only if it is written.
            attempt: the number of the next attempt.
        """
        now = anyio.current_time()
        if now - self._began >= self._interval:
            self._began, self._written = now, 0
        recent = now - self._written_at.get(partition, float("-inf")) < self._interval
        # The feed's own failures are few, and say more than those of one partition.
        if recent or (self._written >= RECORDS and partition is not None):
            self._left_out += 1
            return False
        self._written_at[partition] = now
        self._written += partition is not None
        left_out, self._left_out = self._left_out, 0
        failures = "failure before it was" if left_out == 1 else "failures before it were"
        more = f" ({left_out} {failures} not logged)" if left_out else ""
        log.warning(
            "%s%s",
            text if isinstance(text, str) else text(),
            more,
            extra={"feed": self._feed, "partition": partition, "attempt": attempt},
        )
        return True
