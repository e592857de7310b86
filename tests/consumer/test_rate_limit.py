"""A publisher that limits requests: the feed slows down as a whole (R14). On virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import pytest

from feedapi_client import FeedUnavailableError, Limits, RetryPolicy
from tests.consumer.limited_feed import (
    AtOnce,
    FixedWindow,
    Gateway,
    LimitedTransport,
    TokenBucket,
    consume_behind,
)
from tests.simulation.clock import Backend

MINUTE = 60.0
LONG = pytest.mark.slow
"""Hours of virtual time take a second or two. The quick answer has one case of each kind."""
POLLS, HISTORY = 0, 250
GATEWAYS = {
    "2 a second, polls": (lambda: TokenBucket(2), 1.5, POLLS),
    "2 a second, history": (lambda: TokenBucket(2), 1.5, HISTORY),
    "2 a second, bursts of 20": (lambda: TokenBucket(2, 20), 1.5, HISTORY),
    "429 with Retry-After": (lambda: TokenBucket(2, says=True), 1.3, POLLS),
    "503 with Retry-After": (lambda: TokenBucket(2, status=503, says=True), 1.3, HISTORY),
    "120 a minute": (lambda: FixedWindow(120, 60), 1.5, POLLS),
    "120 a minute, unsaid": (lambda: FixedWindow(120, 60, says=False), 1.5, HISTORY),
}


@pytest.mark.parametrize(
    ("gateway", "least", "events"),
    [
        pytest.param(*case, marks=() if id.startswith("2 a second, polls") else LONG, id=id)
        for id, case in GATEWAYS.items()
    ],
)
def test_r14_a_feed_with_a_rate_limit_is_read_at_its_pace(
    gateway: Callable[[], Gateway], least: float, events: int
) -> None:
    """With default policies and a hundred partitions, for as long as it takes."""
    fared = consume_behind(gateway(), seconds=10 * MINUTE, events=events)
    assert fared.error is None
    assert fared.seconds == 10 * MINUTE
    assert fared.ratio < 0.2, "refused for each granted"
    assert fared.granted / fared.seconds > least, "of the 2 a second that are allowed"
    assert fared.waited < 2 * 100 / least, "two rounds through all partitions"


@LONG
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_r14_a_feed_that_lets_one_request_pass_in_ten_seconds(backend: Backend) -> None:
    fared = consume_behind(TokenBucket(0.1), seconds=30 * MINUTE, partitions=10, backend=backend)
    assert fared.error is None
    assert fared.ratio < 1.0
    assert fared.granted > 0.07 * fared.seconds


@LONG
def test_r14_a_limit_of_requests_at_once_is_found() -> None:
    fared = consume_behind(AtOnce(4), seconds=20 * MINUTE, events=100, latency=0.5)
    assert fared.error is None
    assert fared.events == 100 * 100
    assert fared.ratio < 0.2
    assert fared.seconds < 2.5 * (100 * 10 * 0.5 / 4), "what four at once would take"


@LONG
def test_r14_the_pace_rises_again_when_the_limit_is_lifted() -> None:
    async def lift(transport: LimitedTransport) -> None:
        await anyio.sleep(5 * MINUTE)
        transport.gateway = None

    fared = consume_behind(
        TokenBucket(2), seconds=8 * MINUTE, partitions=20, events=1000, meanwhile=lift
    )
    assert fared.error is None
    assert fared.events == 20 * 1000, "which is 1,500 requests more than the limit lets pass"
    assert fared.seconds < 6.5 * MINUTE


def test_r14_without_any_progress_the_feed_gives_up_in_the_end() -> None:
    class Closed(Gateway):
        def passes(self, now: float, under_way: int) -> bool:
            return now < 30.0

    retry = RetryPolicy(give_up_after=300.0)
    fared = consume_behind(Closed(), seconds=20 * MINUTE, partitions=50, retry=retry)
    assert isinstance(fared.error, FeedUnavailableError)
    assert fared.error.status == 429
    assert 300.0 <= fared.seconds - 30.0 < 345.0
    assert fared.refused < 120, "of 50 partitions, in 5 minutes"


def test_r14_give_up_after_counts_from_the_last_request_that_passed() -> None:
    """No partition is given up while others go on, however rarely its turn comes."""
    retry = RetryPolicy(give_up_after=20.0)
    fared = consume_behind(TokenBucket(1), seconds=20 * MINUTE, partitions=60, retry=retry)
    assert fared.error is None


def test_r14_a_policy_may_call_a_limit_fatal() -> None:
    retry = RetryPolicy(decide=lambda error: "fatal")
    fared = consume_behind(TokenBucket(2, 5), seconds=MINUTE, retry=retry)
    assert isinstance(fared.error, FeedUnavailableError)
    assert fared.seconds < 1.0


@LONG
def test_r14_retry_after_of_a_429_stops_the_whole_feed_for_that_long() -> None:
    transport: list[LimitedTransport] = []

    async def keep(running: LimitedTransport) -> None:
        transport.append(running)
        await anyio.sleep_forever()

    fared = consume_behind(FixedWindow(200, 60), seconds=5 * MINUTE, events=100, meanwhile=keep)
    refused = [when for when, _ in transport[0].refused]
    asked = sorted([when for when, _ in transport[0].granted] + refused)
    for when in refused:
        allowed = when - when % 60 + 60
        # The refused request takes a moment to come back, while others are on their way.
        early = [each for each in asked if when + 0.1 < each < allowed]
        assert not early, "asked before the time that Retry-After names"
    assert fared.granted >= 4 * 200


class OnePartition(Gateway):
    """Refuses all requests of a partition, and no others."""

    def __init__(self, status: int, says: float | None = None) -> None:
        self.status, self._says = status, says

    def retry_after(self, now: float) -> float | None:
        return self._says


@pytest.mark.parametrize(
    ("status", "says"),
    [(429, 30.0), pytest.param(429, None, marks=LONG), pytest.param(503, 30.0, marks=LONG)],
)
def test_r14_one_partition_that_is_always_refused_does_not_keep_others_waiting(
    status: int, says: float | None
) -> None:
    transport: list[LimitedTransport] = []

    async def keep(running: LimitedTransport) -> None:
        running.refuses = {0, 1, 2}
        transport.append(running)
        await anyio.sleep_forever()

    fared = consume_behind(
        OnePartition(status, says),
        seconds=20 * MINUTE,
        partitions=20,
        meanwhile=keep,
        retry=RetryPolicy(give_up_after=None),
    )
    assert fared.error is None
    last = [when for when, _ in transport[0].granted if when > 15 * MINUTE]
    assert len(last) > 400, "17 partitions are polled every 10 seconds"


@LONG
def test_r14_a_limit_is_reported_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "feedapi_client"):
        consume_behind(TokenBucket(2), seconds=10 * MINUTE, limits=Limits(report_interval=60))
    ours = [record.getMessage() for record in caplog.records]
    assert 5 <= len(ours) <= 12
    assert "status 429" in ours[0]
    assert "asked more slowly" in ours[0]


def test_r14_the_present_ends_of_many_partitions_are_asked_at_the_pace() -> None:
    fared = consume_behind(TokenBucket(2), seconds=5 * MINUTE, start="last")
    assert fared.error is None
    assert fared.ratio < 1.0
