"""`Failures`: refusals, pauses and how they grow (R10, R14)."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest
from feedapi_client.runtime.failures import AskedAs, Failures
from feedapi_client.runtime.slots import MAX_DOUBLINGS

from feedapi_client import FeedUnavailableError, RequestRefusedError, RetryPolicy

pytestmark = pytest.mark.anyio

REFUSAL = RequestRefusedError("no", status=410)
SILENCE = FeedUnavailableError("no checkpoint")
AS = AskedAs("v2-token", "t")


def failures(**policy: float) -> Failures:
    return Failures(RetryPolicy(**{"base_delay": 0.01, "max_delay": 3600, **policy}))


def refuse(failed: Failures, *, outdated: bool = False) -> float:
    return failed.refuse(REFUSAL, AS, outdated=outdated)


async def test_r06_a_lag_is_reported_once_after_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    failed = failures()
    reported = []
    for _ in range(8):
        failed.lags(SILENCE)
        reported.append(failed.lags_for_long())
        now += 1.0
    assert reported == [False] * 5 + [True] + [False] * 2
    failed.recovered()
    failed.lags(SILENCE)
    assert not failed.lags_for_long()


async def test_r10_a_refused_partition_waits_for_a_discovery_and_then_asks_at_once() -> None:
    failed = failures()
    assert refuse(failed) == 0.0
    assert failed.refused
    assert failed.refused_as == AS
    assert failed.ask_again() == 0.0
    assert not failed.refused
    assert failed.error is REFUSAL


async def test_r10_a_request_older_than_the_last_discovery_needs_no_other_one() -> None:
    failed = failures()
    refuse(failed, outdated=True)
    assert not failed.refused


async def test_r10_the_pause_after_a_refusal_does_not_depend_on_the_wall_clock() -> None:
    """Which an operator or NTP may set: an hour back would have been an hour more to wait."""
    failed = failures()
    refuse(failed)
    refuse(failed)
    assert failed.retry_at is not None
    failed.retry_at += timedelta(hours=1)  # as it looks after the clock was set back
    assert failed.ask_again() < 60.0


async def test_r10_no_fixed_order_of_discoveries_and_fetches() -> None:
    """Servers that answer in turn could else go on refusing for ever."""
    failed = failures()
    waits = []
    for _ in range(100):
        refuse(failed)
        waits.append(failed.refused)
    assert waits[0]
    assert set(waits[1:]) == {True, False}


async def test_r10_the_pauses_grow_also_while_other_requests_succeed() -> None:
    """A refusal of every third request must not be asked for as fast as the publisher answers."""
    failed = failures(refused_for=3600 * 30)
    pauses = []
    for _ in range(100):
        for _ in range(12):
            refuse(failed)
            failed.recovered()
        pauses.append(refuse(failed))
    assert max(pauses) > 0.01 * 2**6
    assert min(pauses) >= 0


async def test_r10_refusals_are_final_after_their_time_but_not_without_a_second_request() -> None:
    failed = failures(refused_for=0)
    refuse(failed)
    with pytest.raises(RequestRefusedError):
        refuse(failed)


async def test_r10_a_success_begins_the_time_of_the_refusals_anew() -> None:
    failed = failures(refused_for=0)
    refuse(failed)
    failed.recovered()
    refuse(failed)


async def test_r10_so_does_the_first_discovery_that_succeeds_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    failed = failures(refused_for=60)
    refuse(failed)
    now = 59.0
    failed.ask_again(after_failures=True)
    now = 118.0
    refuse(failed)
    now = 119.5
    with pytest.raises(RequestRefusedError):
        refuse(failed)
    assert failed.refused_seconds == 60.5


async def test_r14_a_request_that_brought_nothing_may_take_twice_as_long_the_next_time() -> None:
    failed = failures()
    for doublings in range(1, 10):
        failed.gave_slot_back(SILENCE)
        assert failed.slot_doublings == min(doublings, MAX_DOUBLINGS)
    assert failed.failing
    failed.recovered()
    assert not failed.failing
    assert failed.slot_doublings == MAX_DOUBLINGS, "a long page takes as long the next time"
    failed.answered_quickly()
    assert failed.slot_doublings == MAX_DOUBLINGS - 1
