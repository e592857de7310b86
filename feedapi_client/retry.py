"""When to try again: pauses and deadlines, on tenacity's wait and stop strategies.

`Backoff` is the only place that computes them. Code that repeats a call in a loop uses `retry`.
Code that schedules the next attempt itself (the runtime) calls `Backoff.pause`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from feedapi_client.errors import FeedError, FeedUnavailableError
from feedapi_client.options import RetryPolicy

T = TypeVar("T")
Clock = Callable[[], float]
OnRetry = Callable[[Exception, int, float], object]
"""Called before a pause with the error, the next attempt's number, and the seconds until it."""


GIVE_UP_AFTER = 300.0
"""Seconds, on entry and for what ends, where `RetryPolicy.give_up_after` is not set (R14)."""


def gives_up_after(policy: RetryPolicy, *, following: bool = False) -> float:
    """Return after how many seconds without progress an error is raised; `math.inf` for never.

    `following`: the consumer has been running, and goes on at the end of the feed.
    """
    if policy.give_up_after is not None:
        return policy.give_up_after
    return math.inf if following else GIVE_UP_AFTER


class _StopAt(tenacity.stop.stop_base):
    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        now = retry_state.outcome_timestamp
        return now is not None and now >= self._deadline


class Backoff:
    """The attempts at one thing, from its first failure on.

    The pause before attempt n+1 is random, from 0 to ``min(max_delay, base_delay * 2**n)`` seconds
    (full jitter). What the server's Retry-After asks for, up to `max_retry_after`, comes on top: it
    never makes a pause shorter, and those whom one server sends away don't come back at once.

    Arguments:
        base_delay, max_delay, max_retry_after: seconds.
        give_up_after: seconds since the first failure after which a failure is final; None: never.
        deadline: moment on `clock` from which a failure is final; None: never. Unlike
            `give_up_after` it also counts the time before the first failure.
        attempts: number of attempts after which a failure is final; None: unlimited.
        retry_if: whether an error is worth another attempt.
        clock: seconds on any monotonic clock.
    """

    def __init__(
        self,
        *,
        base_delay: float = 0.2,
        max_delay: float = 20.0,
        max_retry_after: float = 300.0,
        give_up_after: float | None = None,
        deadline: float | None = None,
        attempts: int | None = None,
        retry_if: Callable[[Exception], bool] = lambda _: True,
        clock: Clock = time.monotonic,
    ) -> None:
        stop: list[tenacity.stop.stop_base] = []
        if give_up_after is not None:
            stop.append(tenacity.stop_after_delay(give_up_after))
        if deadline is not None:
            stop.append(_StopAt(deadline))
        if attempts is not None:
            stop.append(tenacity.stop_after_attempt(attempts))
        self._rules = tenacity.Retrying(
            wait=tenacity.wait_random_exponential(multiplier=base_delay, max=max_delay),
            stop=tenacity.stop_any(*stop) if stop else tenacity.stop_never,
        )
        self._max_retry_after = max_retry_after
        self._retry_if = retry_if
        self._clock = clock
        self._state: tenacity.RetryCallState | None = None
        self._last_failure = 0.0

    @classmethod
    def of(
        cls,
        policy: RetryPolicy,
        *,
        give_up_after: float | None = None,
        clock: Clock = time.monotonic,
    ) -> Backoff:
        """The backoff that a policy describes; `give_up_after` replaces what it comes to.

        Only a `FeedError` is ever retried.
        """
        return cls(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            max_retry_after=policy.max_retry_after,
            give_up_after=gives_up_after(policy) if give_up_after is None else give_up_after,
            retry_if=lambda error: isinstance(error, FeedError) and policy.retries(error),
            clock=clock,
        )

    @property
    def failures(self) -> int:
        return 0 if self._state is None else self._state.attempt_number - 1

    @property
    def failing(self) -> bool:
        return self._state is not None

    @property
    def elapsed(self) -> float:
        """Seconds from the first failure to the last one."""
        return 0.0 if self._state is None else self._last_failure - self._state.start_time

    def reset(self) -> None:
        self._state = None

    def pause(self, error: Exception) -> float:
        """Record a failed attempt and return the seconds until the next one.

        Raises:
            the error itself, when it is not worth another attempt or too many were made.
        """
        if not self._retry_if(error):
            raise error
        state = self._failed()
        if self._rules.stop(state):
            raise error
        retry_after = error.retry_after if isinstance(error, FeedUnavailableError) else None
        state.prepare_for_next_attempt()
        floor = min(max(retry_after or 0.0, 0.0), self._max_retry_after)
        return floor + float(self._rules.wait(state))

    def _failed(self) -> tenacity.RetryCallState:
        now = self._clock()
        if self._state is None:
            self._state = tenacity.RetryCallState(self._rules, None, (), {})
            self._state.start_time = now
        self._state.outcome_timestamp = self._last_failure = now
        return self._state

    def __repr__(self) -> str:
        return f"<Backoff after {self.failures} failures>"


async def retry(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    sleep: Callable[[float], Awaitable[object]],
    on_retry: OnRetry | None = None,
) -> T:
    """Await `call()` until it succeeds or `backoff` gives up, whose error is raised."""
    while True:
        try:
            return await call()
        except Exception as error:  # noqa: BLE001 - the backoff raises what is final
            pause = backoff.pause(error)
            if on_retry is not None:
                on_retry(error, backoff.failures + 1, pause)
        await sleep(pause)
