"""`Trouble`: what fails of one partition, and when it is asked again (R6, R10, R13, R14)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import NamedTuple

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
from feedapi_client.runtime.loop import Clock
from feedapi_client.runtime.scheduling import MAX_DOUBLINGS

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
    dialect: str
    token: str | None

    @classmethod
    def of(cls, info: FeedInfo) -> AskedAs:
        return cls(info.dialect, info.token)


class Kind(Enum):
    """What may fail again and again, each with pauses of its own."""

    REQUEST = auto()
    """A request fails by an error that is retried."""
    LAG = auto()
    """Responses are no evidence of anything, and the partition ends (R6)."""
    LAG_OF_OPEN = auto()
    """The same of one that goes on: it is asked for ever."""
    NO_CHECKPOINT = auto()
    """A request brought nothing while others waited for its turn (R14)."""
    NO_PROGRESS = auto()
    """Responses make no progress (R13), which is limited by their number."""
    REFUSED = auto()
    """Requests are refused. Successes between them don't count: a publisher that refuses every
    third request must not be asked as fast as one that never does (R10)."""


_UNTIL_SUCCESS = (Kind.REQUEST, Kind.LAG, Kind.LAG_OF_OPEN, Kind.NO_CHECKPOINT)


@dataclass(slots=True, eq=False)
class Trouble:
    _retry: RetryPolicy
    _clock: Clock
    _backoffs: dict[Kind, Backoff] = field(default_factory=dict)
    error: FeedError | None = None
    since: datetime | None = None
    failed_at: float = float("-inf")
    """When a request failed last, on the clock of the event loop.

    The first refusal in a row does not count: publishers change tokens and split partitions.
    """
    retry_at: datetime | None = None
    """When it is asked again, for `status()` only: the wall clock may be set meanwhile."""
    _retry_due: float = 0.0
    total: int = 0
    """Requests that failed, were refused or brought nothing in their time."""
    refused: bool = False
    refused_as: AskedAs | None = None
    doublings: int = 0
    """How often the time that it may hold a turn is doubled: it was too short before."""
    _lag_reported: bool = False
    _refused_at: float = 0.0
    _refused_since: float | None = None
    _limited_at: int = -1
    _limited_alone: int = -1

    def _backoff(self, kind: Kind) -> Backoff:
        backoff = self._backoffs.get(kind)
        if backoff is None:
            backoff = self._backoffs[kind] = self._new(kind)
        return backoff

    def _new(self, kind: Kind) -> Backoff:
        policy = self._retry
        if kind is Kind.REQUEST:
            return Backoff.of(policy, clock=self._clock)
        if kind is Kind.REFUSED:
            return refusal_backoff(policy)
        limit = gives_up_after(policy) if kind is Kind.LAG else None
        return Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            give_up_after=limit,
            clock=self._clock,
        )

    def _forget(self, *kinds: Kind) -> None:
        if self._backoffs:
            for kind in kinds:
                self._backoffs.pop(kind, None)

    # ------------------------------------------------------------------ what is shown

    @property
    def failing(self) -> bool:
        return Kind.REQUEST in self._backoffs or Kind.NO_CHECKPOINT in self._backoffs

    @property
    def given_up(self) -> bool:
        """Whether requests had failed for `RetryPolicy.give_up_after` when the last one did."""
        failures = self._backoffs.get(Kind.REQUEST)
        return (
            failures is not None
            and failures.failing
            and failures.elapsed >= gives_up_after(self._retry)
        )

    def attempts(self, kind: Kind) -> int:
        known = self._backoffs.get(kind)
        return 0 if known is None else known.failures

    def show(self, error: FeedError) -> None:
        self.error = error
        if self.since is None:
            self.since = datetime.now(UTC)

    # ------------------------------------------------------------------ what goes well

    def started(self) -> None:
        self.error = self.since = None

    def recovered(self) -> None:
        """A request succeeded, or brought something before it failed."""
        self._forget(*_UNTIL_SUCCESS)
        self._lag_reported = False
        self._refused_since = None
        self.error = self.since = self.retry_at = None

    def progressed(self) -> None:
        self._forget(Kind.NO_PROGRESS)

    def answered(self) -> None:
        """A response has begun: the publisher's limits have let the request pass."""
        self._limited_at = self._limited_alone = -1

    def answered_quickly(self) -> None:
        """The request needed a small part of the time that it may hold a turn."""
        self.doublings = max(0, self.doublings - 1)

    # ------------------------------------------------------------------ what fails

    def failed(self, kind: Kind, error: FeedError) -> float:
        """Return the seconds until the next request. Raises the error when it is final."""
        self.show(error)
        if kind in (Kind.LAG, Kind.LAG_OF_OPEN):
            other = Kind.LAG_OF_OPEN if kind is Kind.LAG else Kind.LAG
            self._forget(Kind.REQUEST, Kind.NO_CHECKPOINT, other)
            self._refused_since = None
        if kind is Kind.NO_CHECKPOINT:
            self.doublings = min(self.doublings + 1, MAX_DOUBLINGS)
        return self.retry_in(self._backoff(kind).pause(error))

    def pause_without_progress(self, error: FeedError) -> float:
        return self._backoff(Kind.NO_PROGRESS).pause(error)

    def lags_for_long(self) -> bool:
        lag = self._backoffs.get(Kind.LAG) or self._backoffs.get(Kind.LAG_OF_OPEN)
        if lag is None or self._lag_reported or lag.elapsed < LAG_REPORTED_SECONDS:
            return False
        self._lag_reported = True
        return True

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

    def refuse(self, error: FeedError, asked_as: AskedAs, *, outdated: bool) -> float:
        """A request was refused: return the seconds until the next one (R10).

        If it is to wait for a new discovery first, `refused` is set. After the first refusal in a
        row it always is, then a coin decides: where servers answer in turn, with a fixed order of
        requests one of them could get all the discoveries and another one all the fetches.

        Arguments:
            asked_as: dialect and token of the request.
            outdated: a discovery has succeeded since the request was made.

        Raises:
            FeedError: the error itself, after `RetryPolicy.refused_for`.
        """
        now = self._clock()
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
        pause = self.retry_in(self._refusal_pause(error, quiet))
        if first:  # says that the topology changed, not that what answers may lag
            self.failed_at = failed_at
        return pause

    def _refusal_pause(self, error: FeedError, quiet: float) -> float:
        """0 for the first refusal in a while: the feed has changed, and a discovery says how."""
        policy = self._retry
        if quiet > _QUIET * min(policy.max_delay, policy.refused_for / REFUSED_ATTEMPTS):
            self._forget(Kind.REFUSED)
        refusals = self._backoff(Kind.REFUSED)
        pause = refusals.pause(error)
        return 0.0 if refusals.failures == 1 else pause

    @property
    def refused_seconds(self) -> float:
        return 0.0 if self._refused_since is None else self._refused_at - self._refused_since

    def ask_again(self, *, after_failures: bool = False) -> float:
        """A discovery that began after the refusal lists the partition: when it is asked.

        `after_failures`: the discoveries before that one failed, so that it was not known whether
        the partition is listed. Then the time of the refusals begins anew.
        """
        self.refused = False
        if after_failures and self._refused_since is not None:
            self._refused_since = self._clock()
        return 0.0 if self.retry_at is None else self._retry_due

    def retry_in(self, seconds: float) -> float:
        self.total += 1
        self.retry_at = datetime.now(UTC) + timedelta(seconds=seconds)
        self.failed_at = self._clock()
        self._retry_due = self.failed_at + seconds
        return seconds
