"""`replay`: quarantined events are delivered to a handler once more."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from feedapi_client import Batch, SQLiteCursorStore, StoreError
from feedapi_client.quarantine import Replayed, quarantine_beside, replay
from feedapi_client.testing import Publisher
from tests.quarantine.helpers import Ledger, PoisonError, kept, numbers, run

pytestmark = pytest.mark.anyio


@pytest.fixture
async def quarantine(publisher: Publisher, store: SQLiteCursorStore, ledger: Ledger) -> Any:
    """A quarantine with the events 4, 9 and 14."""
    await run(publisher, store, ledger.handler({4, 9, 14}), "quarantine")
    return quarantine_beside(store)


async def test_each_event_is_removed_in_the_handlers_transaction(
    quarantine: Any, ledger: Ledger
) -> None:
    assert await replay(quarantine, ledger.handler(())) == Replayed(3, 0)
    assert ledger.rows()[-3:] == [4, 9, 14]
    assert await kept(quarantine) == []


async def test_an_event_that_fails_again_stays_and_is_reported(
    quarantine: Any, ledger: Ledger
) -> None:
    reports: list[tuple[int, Exception | None]] = []
    assert await replay(
        quarantine,
        ledger.handler({9}),
        report=lambda event, error: reports.append((event.index, error)),
    ) == Replayed(2, 1)
    assert [event.index for event in await kept(quarantine)] == [9]
    assert [(index, type(error)) for index, error in reports] == [
        (4, type(None)),
        (9, PoisonError),
        (14, type(None)),
    ]


async def test_an_event_stays_when_the_handlers_transaction_rolls_back(
    quarantine: Any, ledger: Ledger
) -> None:
    async def handle(batch: Batch) -> None:
        with closing(ledger.connect()) as connection, connection:
            ledger.write(connection, batch, ())
            await batch.commit(transaction=connection)
            raise PoisonError

    assert await replay(quarantine, handle) == Replayed(0, 3)
    assert len(await kept(quarantine)) == 3
    assert len(ledger.rows()) == 17


async def test_a_handler_without_a_commit_is_enough(quarantine: Any) -> None:
    seen = []

    async def handle(batch: Batch) -> None:
        seen.extend(numbers(batch))

    assert await replay(quarantine, handle) == Replayed(3, 0)
    assert seen == [4, 9, 14]
    assert await kept(quarantine) == []


async def test_chosen_events_only(quarantine: Any, ledger: Ledger) -> None:
    first, _, last = await kept(quarantine)
    assert await replay(quarantine, ledger.handler(()), [last.id, first.id]) == Replayed(2, 0)
    assert ledger.rows()[-2:] == [14, 4]
    with pytest.raises(StoreError, match="no event"):
        await replay(quarantine, ledger.handler(()), [first.id])


async def test_two_replays_at_a_time_handle_each_event_once(
    quarantine: Any, ledger: Ledger
) -> None:
    inner = ledger.handler(())

    async def slower(batch: Batch) -> None:
        await replay(
            quarantine, ledger.handler(()), [event.id for event in await kept(quarantine)][:1]
        )
        await inner(batch)

    assert await replay(quarantine, slower) == Replayed(0, 3)
    assert ledger.rows()[-3:] == [4, 9, 14]
    assert await kept(quarantine) == []
