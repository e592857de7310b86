"""When the driver of a query discovers again (R10)."""

from __future__ import annotations

from feedapi_client.spark.plan.discovery_timer import UNKNOWN_COMMAND_GAP, DiscoveryTimer


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def begun(clock: Clock) -> DiscoveryTimer:
    timer = DiscoveryTimer(60.0, clock=clock)
    timer.begun()
    return timer


def test_first_discovery_is_due_at_once() -> None:
    assert DiscoveryTimer(60.0, clock=Clock()).wait() == 0.0


def test_next_one_is_due_after_the_interval() -> None:
    clock = Clock()
    timer = begun(clock)
    assert timer.wait() == 60.0
    clock.now += 59.0
    assert timer.wait() == 1.0
    clock.now += 2.0
    assert timer.wait() == 0.0


def test_change_asks_for_one_at_once_and_once() -> None:
    timer = begun(Clock())
    timer.soon()
    assert timer.wait() == 0.0
    timer.begun()
    assert timer.wait() == 60.0


def test_unknown_commands_ask_for_one_at_a_limited_rate() -> None:
    clock = Clock()
    timer = begun(clock)
    timer.perhaps()
    assert timer.wait() == UNKNOWN_COMMAND_GAP
    clock.now += UNKNOWN_COMMAND_GAP
    assert timer.wait() == 0.0
    timer.soon()
    timer.perhaps()
    assert timer.wait() == 0.0
