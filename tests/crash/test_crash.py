"""Short runs of ``python -m tests.crash``, on asyncio with SQLAlchemy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runner import run_crash_test

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_each_event_is_stored_once_in_order_although_the_consumer_is_killed(
    database: str,
) -> None:
    outcome = await run_crash_test(database, kills=11)
    assert outcome.kills == 11
    assert set(outcome.splits) == {"starts-after", "cursor-from"}
    assert outcome.rotations
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)
    assert outcome.exactly_once


async def test_quarantined_events_are_stored_once_although_the_consumer_is_killed(
    database: str,
) -> None:
    outcome = await run_crash_test(database, kills=6, poison=True)
    assert outcome.quarantined
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)


async def test_a_cursor_saved_after_the_transaction_shows_as_duplicates(database: str) -> None:
    """The check can fail: with the cursor outside the transaction it does."""
    outcome = await run_crash_test(database, kills=40, cursor="after", stop_when_damaged=True)
    assert outcome.repeated
    assert not outcome.lost
    assert not outcome.exactly_once


async def test_a_cursor_saved_before_the_transaction_shows_as_loss(database: str) -> None:
    outcome = await run_crash_test(database, kills=40, cursor="before", stop_when_damaged=True)
    assert outcome.lost
    assert not outcome.repeated
    assert not outcome.exactly_once


async def test_by_key_each_event_is_stored_once_in_order_although_the_consumer_is_killed(
    database: str,
) -> None:
    outcome = await run_crash_test(database, kills=11, by_key=True)
    assert outcome.kills == 11
    assert set(outcome.splits) == {"starts-after", "cursor-from"}
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)
    assert outcome.exactly_once


async def test_by_key_what_is_remembered_outside_of_the_transaction_shows(tmp_path: Path) -> None:
    outcome = await run_crash_test(
        str(tmp_path / "app.db"), kills=40, cursor="after", by_key=True, stop_when_damaged=True
    )
    assert outcome.repeated
    assert not outcome.exactly_once
