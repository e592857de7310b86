"""What fails of one partition, and when it is asked again (R10, R13, R14)."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import anyio

from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    ProtocolError,
    RequestRefusedError,
    TransportError,
)
from feedapi_client.model import FeedInfo
from feedapi_client.options import RetryPolicy
from feedapi_client.retry import Backoff, gives_up_after
from feedapi_client.runtime.slots import MAX_DOUBLINGS

REFUSED_ATTEMPTS = 30
"""Refused requests pause for at most `RetryPolicy.refused_for` divided by this.

On average it takes twice as many requests to give up. Where half of a publisher's instances refuse,
all of them are refused once in 2**60 times.
"""
LAG_REPORTED_SECONDS = 5.0
"""After which a closed partition that does not reach its end is reported (R6)."""
ALONE_AFTER = 3
"""Refusals of a partition in a row, each of them since another request has passed, after which the
publisher's limits are no longer taken for the reason (R14)."""
CURSOR_REFUSALS = (400, 404, 405, 410, 421)
"""Statuses that the cursor of a request may be the reason for."""
_QUIET = 2
"""The pauses after refusals grow until none came for the longest pause times this."""


def is_refusal(error: FeedError) -> bool:
    """Whether an error is a refusal that may pass: of a rolling deployment or a stale cache (R10).

    What `is_of_gateway` is one, too, unless the application's policy retries it anyway.
    """
    return isinstance(error, RequestRefusedError) or is_of_gateway(error)


def is_of_gateway(error: BaseException | None) -> bool:
    """Whether a response was an answer to the whole feed, as gateways, proxies and logins give it.

    That is 401, 403, a redirect that is not followed, and each status that neither says "later"
    (R14) nor refuses the partition, its token or its cursor.
    """
    if isinstance(error, (RequestRefusedError, FeedUnavailableError)):
        return False
    return isinstance(error, AuthenticationError) or (
        isinstance(error, (ProtocolError, TransportError)) and error.status is not None
    )


def refusal_backoff(policy: RetryPolicy, *, give_up_after: float | None = None) -> Backoff:
    """Return the pauses after refused requests: at most those of `REFUSED_ATTEMPTS`."""
    longest = min(policy.max_delay, policy.refused_for / REFUSED_ATTEMPTS)
    return Backoff(
        base_delay=policy.base_delay,
        max_delay=max(longest, policy.base_delay),
        give_up_after=give_up_after,
    )


class AskedAs(NamedTuple):
    """The dialect and the token of a request."""

    dialect: str
    token: str | None

    @classmethod
    def of(cls, info: FeedInfo) -> AskedAs:
        """Of the requests after this discovery."""
        return cls(info.dialect, info.token)


class Failures:
    """The failures of one partition in a row. Only `RuntimePartition` and its drivers call it."""

    __slots__ = (
        "_failures",
        "_lag",
        "_lag_ends",
        "_lag_reported",
        "_limited_alone",
        "_limited_at",
        "_no_progress",
        "_refusals",
        "_refused_at",
        "_refused_since",
        "_retry",
        "_retry_due",
        "_without_checkpoint",
        "error",
        "failed_at",
        "refused",
        "refused_as",
        "retry_at",
        "since",
        "slot_doublings",
        "total",
    )

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry
        self.error: FeedError | None = None
        self.since: datetime | None = None
        """When the first error in a row came."""
        self.failed_at = float("-inf")
        """When a request failed last, on the clock of the event loop.

        The first refusal in a row does not count: publishers change tokens and split partitions.
        """
        self.retry_at: datetime | None = None
        """When it is asked again, for `status()` only: the wall clock may be set meanwhile."""
        self._retry_due = 0.0
        self.total = 0
        """Requests that failed, were refused or brought nothing in their time."""
        self.refused = False
        """Whether a request was refused and a discovery that began later is awaited."""
        self.refused_as: AskedAs | None = None
        self.slot_doublings = 0
        """How often the time that it may hold a slot is doubled: it was too short before."""
        self._failures: Backoff | None = None
        self._no_progress: Backoff | None = None
        self._lag: Backoff | None = None
        self._lag_ends = True
        self._lag_reported = False
        self._without_checkpoint: Backoff | None = None
        self._refusals: Backoff | None = None
        self._refused_at = 0.0
        self._refused_since: float | None = None
        self._limited_at = -1
        self._limited_alone = -1

    @property
    def failing(self) -> bool:
        """The last request failed by an error that is retried, or brought nothing in its time."""
        return self._failures is not None or self._without_checkpoint is not None

    @property
    def given_up(self) -> bool:
        """Whether requests had failed for `RetryPolicy.give_up_after` when the last one did."""
        failures = self._failures
        if failures is None or not failures.failing:
            return False
        return failures.elapsed >= gives_up_after(self._retry)

    @property
    def attempts(self) -> int:
        """Failed requests in a row."""
        return self._failures.failures if self._failures else 0

    @property
    def refusals(self) -> int:
        """Refused requests that are not forgotten yet: successes between them don't count."""
        return self._refusals.failures if self._refusals else 0

    def started(self) -> None:
        """The partition is read anew."""
        self.error = self.since = None

    def stopped(self) -> None:
        """The partition is not read any more."""
        self.refused = False

    def forgotten(self) -> None:
        """The partition is asked no more."""
        self.recovered()
        self.refused = False

    def recovered(self) -> None:
        """A request succeeded, or brought something before it failed.

        The pauses after refusals are remembered: a publisher that refuses every third request must
        not be asked as fast as one that never does.
        """
        self._failures = self._without_checkpoint = self._lag = None
        self._lag_reported = False
        self._refused_since = None
        self.error = self.since = self.retry_at = None

    def progressed(self) -> None:
        """A response moved the cursor."""
        self._no_progress = None

    def failed(self, error: FeedError) -> float:
        """Record that a request failed. Return the seconds until the next one.

        Raises the error itself when it is fatal, or when requests have failed for too long.
        """
        self.show(error)
        if self._failures is None:
            self._failures = Backoff.of(self._retry, clock=anyio.current_time)
        return self._retry_in(self._failures.pause(error))

    def answered(self) -> None:
        """A response has begun: the publisher's limits have let the request pass."""
        self._limited_at = self._limited_alone = -1

    def limited(self, error: FeedError, passed: int) -> bool:
        """The publisher's limits have refused the request, as `limits_requests` says.

        Return whether the partition keeps its place among those that wait. It does not if nothing
        has passed since it was refused before: another one is to be tried then, since this one may
        be refused for another reason.

        `passed`: how many requests of all partitions have passed so far.
        """
        self.show(error)
        others_passed = passed > self._limited_at
        self._limited_alone += others_passed
        self._limited_at = passed
        return others_passed

    @property
    def limited_alone(self) -> bool:
        """Whether the limits refuse this partition again and again while they let others pass."""
        return self._limited_alone >= ALONE_AFTER

    def ask_when_allowed(self, pause: float) -> float:
        """Record that the request is made again after so many seconds, once the pace allows."""
        return self._retry_in(pause)

    def show(self, error: FeedError) -> None:
        """Show an error in the status, with the time of the first in a row."""
        self.error = error
        if self.since is None:
            self.since = datetime.now(UTC)

    def lags(self, error: FeedError, *, ends: bool = True) -> float:
        """The response is no evidence of anything: seconds until the next request (R6).

        Raises the error itself when that has lasted for `RetryPolicy.give_up_after`, unless the
        partition `ends` neither by itself nor by the end of the iteration.
        """
        self.show(error)
        self._failures = self._without_checkpoint = self._refused_since = None
        if self._lag is None or self._lag_ends is not ends:
            policy = self._retry
            self._lag_ends = ends
            self._lag = Backoff(
                base_delay=policy.base_delay,
                max_delay=policy.max_delay,
                give_up_after=gives_up_after(policy) if ends else None,
                clock=anyio.current_time,
            )
        return self._retry_in(self._lag.pause(error))

    def lags_for_long(self) -> bool:
        """Return whether the lag is to be reported: once, after 5 seconds."""
        if self._lag is None or self._lag_reported or self._lag.elapsed < LAG_REPORTED_SECONDS:
            return False
        self._lag_reported = True
        return True

    # ------------------------------------------------------------------ refusals (R10)

    def refuse(self, error: FeedError, asked_as: AskedAs, *, outdated: bool) -> float:
        """A request was refused: return the seconds until the next one.

        If it is to wait for a new discovery first, `refused` is set. After the first refusal in a
        row it always is, then a coin decides: where servers answer in turn, with a fixed order of
        requests one of them could get all the discoveries and another one all the fetches.

        Arguments:
            asked_as: dialect and token of the request.
            outdated: a discovery has succeeded since the request was made.

        Raises:
            FeedError: the error itself, after `RetryPolicy.refused_for`.
        """
        now = anyio.current_time()
        self.show(error)
        quiet, self._refused_at = now - self._refused_at, now
        first = self._refused_since is None
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since >= self._retry.refused_for:
            raise error
        self.refused = not outdated and (first or random.random() < 0.5)
        self.refused_as = asked_as
        failed_at = self.failed_at
        pause = self._retry_in(self._refusal_pause(error, quiet))
        if first:  # says that the topology changed, not that what answers may lag
            self.failed_at = failed_at
        return pause

    def _refusal_pause(self, error: FeedError, quiet: float) -> float:
        """0 for the first refusal in a while: the feed has changed, and a discovery says how."""
        policy = self._retry
        longest = min(policy.max_delay, policy.refused_for / REFUSED_ATTEMPTS)
        if self._refusals is None or quiet > _QUIET * longest:
            self._refusals = refusal_backoff(policy)
        pause = self._refusals.pause(error)
        return 0.0 if self._refusals.failures == 1 else pause

    @property
    def refused_seconds(self) -> float:
        """Seconds from the first refusal in a row to the last one."""
        return 0.0 if self._refused_since is None else self._refused_at - self._refused_since

    def ask_again(self, *, after_failures: bool = False) -> float:
        """A discovery that began after the refusal lists the partition: seconds until it is asked.

        `after_failures`: the discoveries before that one failed, so that it was not known whether
        the partition is listed. Then the time of the refusals begins anew.
        """
        self.refused = False
        if after_failures and self._refused_since is not None:
            self._refused_since = anyio.current_time()
        if self.retry_at is None:
            return 0.0
        return max(0.0, self._retry_due - anyio.current_time())

    # ------------------------------------------------------------------ without a checkpoint

    def gave_slot_back(self, error: FeedError) -> float:
        """The request brought no checkpoint while others waited for its slot (R14).

        Return the seconds until the next one, which may then take twice as long.
        """
        self.show(error)
        self.slot_doublings = min(self.slot_doublings + 1, MAX_DOUBLINGS)
        if self._without_checkpoint is None:
            self._without_checkpoint = self._unlimited()
        return self._retry_in(self._without_checkpoint.pause(error))

    def answered_quickly(self) -> None:
        """The request needed a small part of the time that it may hold a slot."""
        self.slot_doublings = max(0, self.slot_doublings - 1)

    def pause_without_progress(self, error: Exception) -> float:
        """Return the seconds to wait after a response without progress (R13)."""
        if self._no_progress is None:
            self._no_progress = self._unlimited()
        return self._no_progress.pause(error)

    def _unlimited(self) -> Backoff:
        """For what is limited by the number of attempts elsewhere, or not at all."""
        policy = self._retry
        return Backoff(base_delay=policy.base_delay, max_delay=policy.max_delay)

    def _retry_in(self, seconds: float) -> float:
        self.total += 1
        self.retry_at = datetime.now(UTC) + timedelta(seconds=seconds)
        self.failed_at = anyio.current_time()
        self._retry_due = self.failed_at + seconds
        return seconds
