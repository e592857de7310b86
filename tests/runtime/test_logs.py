"""`FailureLog`: an outage does not fill the log (R14)."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.runtime.logs import RECORDS, FailureLog

INTERVAL = 60.0


class Clock:
    now = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(anyio, "current_time", lambda: clock.now)
    return clock


def test_r14_the_first_failure_and_then_one_in_an_interval(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailureLog(INTERVAL)
    for _ in range(100):
        failures.warn(3, "partition 3 fails")
    assert caplog.messages == ["partition 3 fails"]
    clock.now += INTERVAL
    failures.warn(3, "partition 3 fails")
    assert caplog.messages[1:] == ["partition 3 fails (99 failures before it were not logged)"]


def test_r14_many_failing_partitions_are_bounded_together(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailureLog(INTERVAL)
    for _ in range(10):
        for partition in range(1000):
            failures.warn(partition, "it fails")
        clock.now += INTERVAL / 10
    assert len(caplog.messages) == RECORDS
    failures.warn(0, "it fails")
    assert (
        caplog.messages[-1] == f"it fails ({10_000 - RECORDS} failures before it were not logged)"
    )


def test_r14_what_fails_of_the_feed_is_logged_beside_its_partitions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureLog(INTERVAL)
    for partition in range(100):
        failures.warn(partition, "it fails")
    assert failures.warn(None, "discovery fails")
    assert not failures.warn(None, "discovery fails")
    assert "discovery fails" in caplog.messages[-1]
