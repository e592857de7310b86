"""Backoff and the retry loops: pauses, limits and deadlines on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feedapi_client.errors import FeedError, FeedUnavailableError, NegotiationError
from feedapi_client.options import RetryPolicy
from feedapi_client.retry import Backoff, retry

ERROR = FeedError("it failed")


class Clock:
    """A clock that only a test moves. Sleeping moves it at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Call:
    """Fails a number of times, each attempt taking `seconds`, then returns its attempt's number."""

    def __init__(self, clock: Clock, failures: int, seconds: float = 0.0) -> None:
        self.clock = clock
        self.failures = failures
        self.seconds = seconds
        self.attempts = 0

    def __call__(self) -> int:
        self.attempts += 1
        self.clock.now += self.seconds
        if self.attempts <= self.failures:
            raise ERROR
        return self.attempts

    async def awaited(self) -> int:
        return self()


def pauses(backoff: Backoff, error: Exception = ERROR) -> Iterator[float]:
    while True:
        yield backoff.pause(error)


def test_r14_pauses_are_jittered_below_a_doubling_bound_and_a_maximum() -> None:
    for _ in range(50):
        bounds = [2.0, 4.0, 8.0, 10.0, 10.0]
        found = zip(pauses(Backoff(base_delay=1.0, max_delay=10.0)), bounds, strict=False)
        assert all(0 <= pause <= bound for pause, bound in found)


def test_r14_retry_after_is_a_floor_under_a_jittered_pause() -> None:
    backoff = Backoff(base_delay=1.0, max_delay=8.0, max_retry_after=100.0)
    asked = [backoff.pause(FeedUnavailableError("", retry_after=7.0)) for _ in range(100)]
    assert all(7.0 <= pause <= 15.0 for pause in asked)
    assert len(set(asked)) == len(asked)
    assert 100.0 <= backoff.pause(FeedUnavailableError("", retry_after=7000.0)) <= 108.0


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_r14_retry_after_is_no_way_around_the_pause(seconds: float) -> None:
    backoff = Backoff(base_delay=1.0, max_delay=8.0)
    pauses = [backoff.pause(FeedUnavailableError("", retry_after=seconds)) for _ in range(100)]
    assert sum(pauses) > 100.0


def test_a_number_of_attempts_bounds_the_failures() -> None:
    backoff = Backoff(attempts=3)
    backoff.pause(ERROR)
    backoff.pause(ERROR)
    with pytest.raises(FeedError, match="it failed"):
        backoff.pause(ERROR)


def test_one_attempt_means_that_the_first_failure_is_final() -> None:
    with pytest.raises(FeedError):
        Backoff(attempts=1).pause(ERROR)


def test_r14_give_up_after_counts_from_the_first_failure(clock: Clock) -> None:
    backoff = Backoff(give_up_after=10, clock=clock)
    clock.now += 100
    backoff.pause(ERROR)
    clock.now += 9.5
    backoff.pause(ERROR)
    clock.now += 0.5
    with pytest.raises(FeedError):
        backoff.pause(ERROR)


def test_a_deadline_counts_from_before_the_first_failure(clock: Clock) -> None:
    backoff = Backoff(deadline=clock() + 10, clock=clock)
    clock.now += 9.5
    backoff.pause(ERROR)
    clock.now += 0.5
    with pytest.raises(FeedError):
        backoff.pause(ERROR)


def test_a_first_failure_behind_the_deadline_is_final(clock: Clock) -> None:
    backoff = Backoff(deadline=clock() + 10, clock=clock)
    clock.now += 11
    with pytest.raises(FeedError):
        backoff.pause(ERROR)


def test_whichever_limit_comes_first_ends_the_attempts(clock: Clock) -> None:
    backoff = Backoff(deadline=clock() + 10, attempts=2, clock=clock)
    backoff.pause(ERROR)
    with pytest.raises(FeedError):
        backoff.pause(ERROR)


def test_it_knows_for_how_long_it_fails(clock: Clock) -> None:
    backoff = Backoff(clock=clock)
    assert backoff.elapsed == 0.0
    for _ in range(3):
        backoff.pause(ERROR)
        clock.now += 2.0
    assert backoff.elapsed == 4.0, "from the first failure to the last one"


def test_progress_forgets_the_failures(clock: Clock) -> None:
    backoff = Backoff(attempts=2, give_up_after=10, clock=clock)
    for _ in range(5):
        backoff.pause(ERROR)
        assert (backoff.failing, backoff.failures) == (True, 1)
        clock.now += 100
        backoff.reset()
        assert (backoff.failing, backoff.failures) == (False, 0)


def test_an_error_that_is_not_worth_another_attempt_is_raised_at_once() -> None:
    backoff = Backoff(retry_if=lambda error: isinstance(error, FeedError))
    with pytest.raises(KeyError):
        backoff.pause(KeyError("no"))
    assert not backoff.failing


def test_r14_a_policy_decides_about_feed_errors_only() -> None:
    backoff = Backoff.of(RetryPolicy())
    backoff.pause(FeedUnavailableError("busy"))
    with pytest.raises(NegotiationError):
        backoff.pause(NegotiationError("no"))
    with pytest.raises(KeyError):
        backoff.pause(KeyError("no"))


@pytest.mark.anyio
async def test_r14_retry_awaits_the_call_until_it_succeeds(clock: Clock) -> None:
    call, seen = Call(clock, failures=3), []
    result = await retry(
        call.awaited,
        Backoff(clock=clock),
        sleep=clock.async_sleep,
        on_retry=lambda error, attempt, pause: seen.append((error, attempt, pause)),
    )
    assert result == 4
    assert seen == [(ERROR, 2 + n, pause) for n, pause in enumerate(clock.pauses)]


@pytest.mark.anyio
async def test_retry_raises_the_error_that_came_behind_the_deadline(clock: Clock) -> None:
    call = Call(clock, failures=100, seconds=4.0)
    with pytest.raises(FeedError):
        await retry(
            call.awaited,
            Backoff(base_delay=0, deadline=clock() + 10, clock=clock),
            sleep=clock.async_sleep,
        )
    assert call.attempts == 3
