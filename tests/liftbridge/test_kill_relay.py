"""The relay, and real brokers under it, are killed at random moments.

`tests.liftbridge.kill_relay` and `tests.liftbridge.kill_real` are the programs for long runs.
"""

from __future__ import annotations

import random

import pytest

from tests.liftbridge.clusters import require_liftbridge
from tests.liftbridge.kill_real import KillRun
from tests.liftbridge.kill_relay import Outcome, kill_relay

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("no_calls_left"),
]

KILLS = 8


async def test_at_least_once_loses_nothing_when_killed() -> None:
    outcome = await kill_relay("at-least-once", KILLS, seed := random.randrange(2**32))
    assert not outcome.lost(), f"seed {seed}"
    assert Outcome.in_order(outcome.kept), f"seed {seed}"


@pytest.mark.parametrize("format", ["batch", "events"])
async def test_exactly_once_shows_each_event_once_and_in_order_when_killed(format: str) -> None:
    outcome = await kill_relay(format, KILLS, seed := random.randrange(2**32))
    assert sorted(outcome.kept) == outcome.published, f"seed {seed}"
    assert Outcome.in_order(outcome.kept), f"seed {seed}"
    if format == "batch":
        assert outcome.plain == outcome.kept


@pytest.mark.parametrize(("mode", "what"), [("batch", "nats"), ("events", "broker-kill")])
async def test_a_relay_and_its_reader_outlast_kills_of_a_real_broker(mode: str, what: str) -> None:
    require_liftbridge()
    outcome = await KillRun(mode, what, seed := random.randrange(2**32)).run(3)
    assert not outcome.lost(), f"seed {seed}"
    assert Outcome.in_order(outcome.kept), f"seed {seed}"
    if mode != "at-least-once":
        assert sorted(outcome.kept) == outcome.published, f"seed {seed}"
