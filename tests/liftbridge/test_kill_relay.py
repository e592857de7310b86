"""A relay, and what it needs, are killed at random moments.

`tests.liftbridge.kill_real` is the program for long runs.
"""

from __future__ import annotations

import random

import pytest

from tests.liftbridge.broker import require_liftbridge
from tests.liftbridge.kill_real import KillRun, Outcome

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mode", "what", "kills"),
    [
        ("at-least-once", "relay", 8),
        ("batch", "relay", 8),
        ("events", "relay", 8),
        ("batch", "nats", 3),
        ("events", "broker-kill", 3),
    ],
)
async def test_a_relay_and_its_reader_outlast_kills(mode: str, what: str, kills: int) -> None:
    require_liftbridge()
    outcome = await KillRun(mode, what, seed := random.randrange(2**32)).run(kills)
    assert not outcome.lost(), f"seed {seed}"
    assert Outcome.in_order(outcome.kept), f"seed {seed}"
    if mode != "at-least-once":
        assert sorted(outcome.kept) == outcome.published, f"seed {seed}"
    if (mode, what) == ("batch", "relay"):
        assert outcome.plain == outcome.kept, f"seed {seed}"
