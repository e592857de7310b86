"""How fast a feed is asked whose publisher limits requests (R14).

Without I/O and without a clock: every method takes the present moment. The runtime asks a `Pace`
before each request, and tells it what became of the request.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from feedapi_client.errors import FeedError, FeedUnavailableError
from feedapi_client.options import RetryPolicy
from feedapi_client.retry import Backoff

_DECREASE = 0.3
"""The part of its rate that a feed gives up when a request is refused."""
_DOUBLED_STARTS = 4
"""Requests in which the rate doubles while it is not known what is too much."""
_DOUBLED_SECONDS = 1.0
"""Seconds for that, at least."""
_MOST_DOUBLINGS = 20
_RETURN_STARTS = 20
"""Requests until the rate is again what it was before the decrease. The more, the fewer are
refused."""
_RETURN_SECONDS = 10.0
"""Seconds until then, at least. With many requests a second, that many would pass too soon."""
_FIRST_RATE = 1.0
"""Requests a second to begin with: it doubles until one is refused again."""
_FEWEST = 2
"""Requests at once, at least: one that hangs must not stop the others."""
_FREE = 1000.0
"""Requests a second from which on the pace does not matter: the gate is opened."""
_LATE = 0.01
"""Seconds by which a timer may be late without making the pace slower."""


def limits_requests(error: BaseException) -> bool:
    """Whether the publisher limits requests: it answers 429, or 503 with Retry-After.

    Both speak for the client, and not for the partition that was asked for.
    """
    if not isinstance(error, FeedUnavailableError):
        return False
    return error.status == 429 or (error.status == 503 and error.retry_after is not None)


class Pace:
    """How many requests of a feed may begin in a second, and be under way at once.

    There is no limit until the publisher refuses a request because of its limits. From then on
    both numbers follow what the publisher lets pass. A refused request lowers the rate by 30 % and
    halves the number at once; each one that passes lets them rise again: fast to the values that
    were refused, slowly beyond them, then faster and faster, until there is no limit again.

    A Retry-After that comes with a 429 stops all requests for that long, up to
    `RetryPolicy.max_retry_after`. One that comes with a 503 may be that of a single broken
    instance behind the gateway: it only holds for the partition that was asked for.

    Arguments:
        policy: what to do without any progress: how long to pause, and when to give up.
        slots: requests at once without a limit.
    """

    def __init__(self, policy: RetryPolicy, slots: int) -> None:
        self.free = True
        """Whether nothing is limited. To be looked at first: it takes the least time."""
        self.count = 0
        self.since: float | None = None
        """The first refusal since the last request that passed; None if that one was the last."""
        self._slots = slots
        self._searching = False
        self._slowest = 1.0 / policy.max_delay
        self._policy = policy
        self._now = 0.0
        waits = replace(policy, max_retry_after=0.0)  # here a Retry-After is looked at apart
        self._backoff = Backoff.of(waits, clock=lambda: self._now)
        self._window = float(slots)
        self._refused_rate = _FREE
        self._slowed_at = -math.inf
        self._starts = 0
        self._opens = -math.inf

    def __repr__(self) -> str:
        if self.free:
            return "<Pace: no limit>"
        return f"<Pace: {self.rate(self._now):.2f} requests a second, {self.window} at once>"

    @property
    def window(self) -> int:
        return int(self._window)

    @property
    def opens(self) -> float:
        return -math.inf if self.free else self._opens

    def rate(self, now: float) -> float:
        """Return how many requests may begin in a second; infinite without a limit."""
        if self.free:
            return math.inf
        seconds = now - self._slowed_at
        if self._searching:
            doublings = min(self._starts / _DOUBLED_STARTS, seconds / _DOUBLED_SECONDS)
            rate = self._refused_rate * (1.0 - _DECREASE)
            rate *= math.pow(2.0, min(doublings, _MOST_DOUBLINGS))
        else:
            rate = self._refused_rate * (1.0 + _DECREASE * self._back(now) ** 3)
        return max(self._slowest, min(rate, _FREE))

    def _back(self, now: float) -> float:
        """How far the rate has returned: -1 after a refusal, 0 where it was, then beyond."""
        seconds = (now - self._slowed_at) / _RETURN_SECONDS
        return min(self._starts / _RETURN_STARTS, seconds) - 1.0

    def begin(self, now: float) -> None:
        if self.free:
            return
        self._now = now
        # A feed that asks less often than it may has not tried whether it might more often.
        self._starts += now - self._opens <= _LATE
        rate = self.rate(now)
        self._opens = max(self._opens, now - min(_LATE, 0.1 / rate)) + 1.0 / rate
        if rate >= _FREE and self.window >= self._slots:
            self.free = True

    def passed(self) -> None:
        self.count += 1
        if not self.free:
            self.since = None
            self._backoff.reset()
            self._window = min(self._slots, self._window + 1.0 / self._window)

    def refused(
        self, error: FeedError, *, began: float, now: float, under_way: int, answering: int
    ) -> bool:
        """Record a refusal, as `limits_requests` says. Return whether the pace is slower since.

        It is not for a request that began before it last became slower. Raises the error itself if
        it is final, or if nothing has passed for `RetryPolicy.give_up_after`.

        Arguments:
            under_way: how many requests are under way beside it.
            answering: how many of these have passed, and are being answered.
        """
        if self._policy.decide(error) != "retry":
            raise error
        self._now = now
        if began < self._slowed_at:
            self._hold(error, now)
            return False
        pause = self._backoff.pause(error)
        if self.since is None:  # otherwise nothing says how many would pass: the pause grows
            self.since = now
            self._refused_rate = _FIRST_RATE / (1.0 - _DECREASE) if self.free else self.rate(now)
            self._searching = self.free
        self.free = False
        self._slowed_at, self._starts = now, 0
        self._window = float(max(_FEWEST, answering, under_way // 2))
        self._opens = now + max(pause, 1.0 / self.rate(now))
        self._hold(error, now + pause)
        return True

    def _hold(self, error: FeedError, until: float) -> None:
        """Let no request begin for as long as a Retry-After asks for."""
        if isinstance(error, FeedUnavailableError) and error.status == 429:
            self._opens = max(self._opens, until + self._floor(error))

    def own_pause(self, error: FeedError) -> float:
        """Return for how many seconds the partition itself is not asked again."""
        if isinstance(error, FeedUnavailableError) and error.status == 429:
            return 0.0
        # Those whom one server sends away must not come back at once.
        return self._floor(error) + random.uniform(0.0, 2.0 * self._policy.base_delay)

    def _floor(self, error: FeedError) -> float:
        seconds = error.retry_after if isinstance(error, FeedUnavailableError) else None
        return min(max(seconds or 0.0, 0.0), self._policy.max_retry_after)
