"""Finding the failing events of a batch, for any failing events and any kind of handler."""

from __future__ import annotations

from typing import Any

import anyio
from feedapi_client.quarantine.retrying_handler import retrying_handler
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client import Batch, FeedKey, MemoryCursorStore, Quarantine, Retry
from feedapi_client.model import make_event
from feedapi_client.quarantine import MemoryQuarantineStore
from tests.quarantine.helpers import PoisonError, kept, numbers

FEED = FeedKey("https://service/feed")


class LockedError(Exception):
    """The database fails, whatever the events are."""


class Database:
    """Effects and a cursor, with one transaction at a time."""

    def __init__(self) -> None:
        self.effects: list[int] = []
        self.cursor: str | None = None

    async def __aenter__(self) -> Database:
        self.draft = (list(self.effects), self.cursor)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.effects, self.cursor = self.draft

    async def save(self, batch: Batch, transaction: Any) -> None:
        self.cursor = batch.cursor


def scenario(
    count: int, poison: set[int], *, transactional: bool, on_failure: Any, fails: int | None = None
) -> tuple[Database, list[int], int]:
    """Handle one batch. The call with the number `fails` fails for no event's sake.

    Returns the database, the indices of the quarantined events, and the number of handler calls.
    """
    database, store, calls = Database(), MemoryQuarantineStore(), 0

    def apply(batch: Batch) -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise LockedError
        for n in numbers(batch):
            if n in poison:
                raise PoisonError(n)
            database.effects.append(n)

    async def in_transaction(batch: Batch) -> None:
        async with database as transaction:
            apply(batch)
            await batch.commit(transaction=transaction)

    async def without(batch: Batch) -> None:
        apply(batch)

    async def main() -> list[int]:
        quarantine = Quarantine(to=store, limit=1000)
        retried = Retry(attempts=2, base_delay=1e-6, max_delay=1e-6, then=quarantine)
        handle = await retrying_handler(
            in_transaction if transactional else without,
            retried if on_failure == "retry" else quarantine,
            FEED,
            MemoryCursorStore(),
        )
        events = [make_event(0, b'{"n":%d}' % n) for n in range(count)]
        await handle(Batch(0, events, "the end", database.save))
        return [event.index for event in await kept(store)]

    return database, anyio.run(main), calls


counts = st.integers(1, 60)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, set[int]]:
    count = draw(counts)
    return count, draw(st.sets(st.integers(0, count - 1)))


@given(batches(), st.sampled_from(["quarantine", "retry"]))
def test_with_a_transaction_each_good_event_is_there_once_in_order(
    batch: tuple[int, set[int]], on_failure: str
) -> None:
    count, poison = batch
    database, quarantined, _ = scenario(count, poison, transactional=True, on_failure=on_failure)
    assert database.effects == [n for n in range(count) if n not in poison]
    assert quarantined == sorted(poison)
    assert database.cursor == "the end"


@given(batches(), st.sampled_from(["quarantine", "retry"]))
def test_without_a_transaction_each_good_event_is_there_at_least_once(
    batch: tuple[int, set[int]], on_failure: str
) -> None:
    count, poison = batch
    database, quarantined, _ = scenario(count, poison, transactional=False, on_failure=on_failure)
    good = [n for n in range(count) if n not in poison]
    assert list(dict.fromkeys(database.effects)) == good
    # Once in each attempt at the whole batch, up to the failing event, and once more alone.
    assert all(database.effects.count(n) <= (2 if on_failure == "quarantine" else 3) for n in good)
    assert quarantined == sorted(poison)
    assert database.cursor == "the end"


@given(batches(), st.sampled_from(["quarantine", "retry"]), st.booleans(), st.integers(1, 40))
def test_a_call_that_fails_for_no_event_hides_none_behind_it(
    batch: tuple[int, set[int]], on_failure: str, transactional: bool, fails: int
) -> None:
    """A database that is locked during one dry run: the events of that run are not to blame."""
    count, poison = batch
    try:
        database, quarantined, _ = scenario(
            count, poison, transactional=transactional, on_failure=on_failure, fails=fails
        )
    except LockedError:
        return  # in the last attempt at all events, each of which had passed
    # The event that is tried alone when the database fails can't be told from one that fails.
    assert set(quarantined) - poison <= set(range(count))
    assert len(set(quarantined) - poison) <= 1
    assert set(quarantined) >= poison
    assert set(database.effects) == set(range(count)) - set(quarantined)
    assert database.cursor == "the end"


def test_the_number_of_calls_grows_with_the_logarithm_of_the_batch() -> None:
    _, quarantined, calls = scenario(4096, {2500}, transactional=True, on_failure="quarantine")
    assert quarantined == [2500]
    assert calls < 20
