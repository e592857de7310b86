"""The journal's times are those of the database: consumers' clocks may differ."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from feedapi_client import FeedKey, Position
from feedapi_client.stores import Journal
from tests.positions import counted
from tests.stores.drivers import SERVED, App, with_drivers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]
FEED = FeedKey("https://service.test/clocks")


@pytest.mark.parametrize("minutes", [-10, 10])
@with_drivers([each for each in SERVED if each.kind.endswith(("+asyncpg", "+asyncmy"))])
async def test_with_clocks_ten_minutes_apart_a_rewind_skips_and_repeats_nothing(
    app: App, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [app.store(journal=Journal()) for _ in range(2)]
    # The processes take turns, as instances do; the second one's clock is wrong.
    clocks = [time.time_ns] * 2
    clocks[1] = lambda: clocks[0]() + minutes * 60 * 1_000_000_000
    history: list[tuple[datetime, dict[int, Position]]] = []
    for revision in range(1, 7):
        monkeypatch.setattr(time, "time_ns", clocks[revision % 2])
        position = {0: counted(f"c{revision}", revision)}
        await stores[revision % 2].save(FEED, position)
        monkeypatch.undo()
        # The database's clock is this machine's here.
        history.append((datetime.now(UTC), position))
    for when, positions in history:
        assert await stores[0].positions_at(FEED, when) == positions
    # What is out of reach is so by the database's clock, too.
    monkeypatch.setattr(time, "time_ns", lambda: 10**18 * 4)
    when, positions = history[2]
    rewound = await stores[1].rewind(FEED, when)
    assert {p: found.cursor for p, found in rewound.items()} == {0: positions[0].cursor}
