"""The same with Django, without async, and with each driver: short runs of `tests.crash`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runner import run_crash_test
from tests.servers import Postgres

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("threads", [1, 3])
async def test_each_event_is_stored_once_by_a_killed_consumer_without_async(
    tmp_path: Path, threads: int
) -> None:
    outcome = await run_crash_test(str(tmp_path / "app.db"), kills=11, threads=threads)
    assert outcome.kills == 11
    assert set(outcome.splits) == {"starts-after", "cursor-from"}
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)
    assert outcome.exactly_once


@pytest.mark.parametrize("threads", [1, 3])
async def test_each_event_is_stored_once_by_a_killed_consumer_of_django(
    django_database: str, threads: int
) -> None:
    outcome = await run_crash_test(django_database, kills=4, threads=threads)
    assert outcome.kills == 4
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)
    assert outcome.exactly_once


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "sync-psycopg", "sync-sqlalchemy"])
async def test_each_event_is_stored_once_with_each_driver_of_postgresql(
    postgres: Postgres, driver: str
) -> None:
    threads = 3 if driver.startswith("sync") else 0
    outcome = await run_crash_test(f"{driver}+{postgres.dsn}", kills=4, threads=threads)
    assert outcome.kills == 4
    assert (outcome.lost, outcome.repeated, outcome.disordered) == (0, 0, 0)
    assert outcome.exactly_once


async def test_with_django_a_cursor_outside_of_the_transaction_shows(django_database: str) -> None:
    outcome = await run_crash_test(
        django_database, kills=40, cursor="after", threads=1, stop_when_damaged=True
    )
    assert outcome.repeated
    assert not outcome.exactly_once


async def test_without_async_a_cursor_outside_of_the_transaction_shows(tmp_path: Path) -> None:
    database = str(tmp_path / "app.db")
    outcome = await run_crash_test(
        database, kills=40, cursor="after", threads=2, stop_when_damaged=True
    )
    assert outcome.repeated
    assert not outcome.exactly_once
