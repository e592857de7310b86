"""Processes that share a feed are killed, paused and restarted; the long runs are by hand.

``python -m tests.sharing --disturbances 300 --database postgresql`` (asyncpg, mariadb, ...).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import Postgres, Redis
from tests.sharing.databases import database
from tests.sharing.disturbances import SERVER_KINDS, run_disturbances

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]
EVENTS = 24


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "app.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.dsn


async def test_kills_pauses_and_restarts_leave_each_event_exactly_once(where: str) -> None:
    outcome = await run_disturbances(where, events=EVENTS, processes=3)
    assert outcome.exactly_once, outcome


@pytest.mark.parametrize("kind", ["postgresql", "asyncpg", "mariadb"])
async def test_a_server_that_crashes_and_sessions_that_end_leave_each_event_exactly_once(
    kind: str,
) -> None:
    with database(kind, lease=3.0) as shared:
        outcome = await run_disturbances(
            shared, events=EVENTS // 2, processes=3, kinds=SERVER_KINDS, lease=3.0
        )
    assert outcome.exactly_once, outcome
    assert outcome.waits.keys() >= {"save", "look", "beat", "put"}, outcome


async def test_graceful_restarts_repeat_nothing_without_any_transaction(tmp_path: Path) -> None:
    """Who hands over does not depend on the store."""
    outcome = await run_disturbances(
        str(tmp_path / "app.db"),
        events=EVENTS // 2,
        processes=3,
        kinds=("restart",),
        # Without transactions a lease that is lost because a process is slow repeats events.
        options=("--without-transaction", "--lease", "600"),
    )
    assert outcome.exactly_once, outcome


async def test_redis_which_has_no_transaction_loses_nothing(redis_server: Redis) -> None:
    outcome = await run_disturbances(redis_server.url, events=EVENTS // 2, processes=3)
    assert outcome.events
    assert outcome.lost == 0, outcome


async def test_without_fencing_the_same_program_fails(postgres: Postgres) -> None:
    """Leases and the clock of each process are not enough."""
    outcome = await run_disturbances(
        postgres.dsn,
        events=200,
        processes=3,
        kinds=("pause",),
        options=("--without-fencing",),
        stop_when_repeated=True,
    )
    assert not outcome.exactly_once, outcome
