"""`replay`: quarantined events are delivered to a handler once more."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from feedapi_client import Batch, Event, FeedConsumer, Quarantine, SQLiteCursorStore, StoreError
from feedapi_client.operations import move
from feedapi_client.quarantine import Replayed, drop, quarantine_beside, replay
from feedapi_client.testing import Publisher
from tests.quarantine.helpers import Ledger, PoisonError, kept

pytestmark = pytest.mark.anyio


@pytest.fixture
async def quarantine(ledger: Ledger) -> Any:
    """A quarantine with the events 4, 9 and 14."""
    await ledger.run(ledger.handler({4, 9, 14}))
    return quarantine_beside(ledger.store)


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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
async def test_r05_an_event_is_removed_in_the_handlers_transaction(
    quarantine: Any, ledger: Ledger, by_key: bool, fails: bool
) -> None:
    async def handle(batch: Batch) -> None:
        with ledger.transaction() as connection:
            ledger.write(connection, batch, ())
            ends = batch.events[0].done if by_key else batch.commit
            await ends(transaction=connection)
            if fails:
                raise PoisonError

    assert await replay(quarantine, handle) == (Replayed(0, 3) if fails else Replayed(3, 0))
    assert len(await kept(quarantine)) == (3 if fails else 0)
    assert ledger.rows()[17:] == ([] if fails else [4, 9, 14])


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


async def of_one_key(
    store: SQLiteCursorStore, names: str, publisher: Publisher | None = None
) -> Any:
    """A quarantine with events of one key in their order, of which the first has failed."""
    publisher = publisher or Publisher()
    for name in names:
        publisher.append(0, {"key": "k", "name": name})

    async def handle(event: Event) -> None:
        raise PoisonError

    with publisher.serve():
        async with FeedConsumer(
            publisher.url, store=store, follow=False, feed_name="orders"
        ) as consumer:
            await consumer.run_by_key(
                handle,
                key=lambda event: event.json()["key"],
                on_failure=Quarantine(whole_key=True),
            )
    return quarantine_beside(store)


async def names_of(quarantine: Any) -> str:
    return "".join(orjson.loads(event.raw)["name"] for event in await kept(quarantine))


@pytest.mark.parametrize(
    ("fails", "chosen", "handled", "stay"),
    [
        ("a", "abc", "", "abc"),
        ("b", "abc", "a", "bc"),
        ("", "abc", "abc", ""),
        ("", "c", "", "abc"),
        ("", "cab", "ab", "c"),
    ],
)
async def test_what_follows_an_event_of_its_key_stays_as_long_as_that_one(
    store: SQLiteCursorStore, fails: str, chosen: str, handled: str, stay: str
) -> None:
    quarantine, seen = await of_one_key(store, "abc"), []
    ids = {orjson.loads(event.raw)["name"]: event.id for event in await kept(quarantine)}

    async def handle(batch: Batch) -> None:
        name = batch.events[0].json()["name"]
        if name in fails:
            raise PoisonError
        seen.append(name)

    done = await replay(quarantine, handle, [ids[name] for name in chosen])
    assert done == Replayed(len(handled), len(chosen) - len(handled))
    assert ("".join(seen), await names_of(quarantine)) == (handled, stay)


async def test_what_stays_of_a_key_holds_the_later_ones_back_in_later_replays(
    store: SQLiteCursorStore,
) -> None:
    publisher, fails, seen = Publisher(), {"b"}, []
    quarantine = await of_one_key(store, "abc", publisher)

    async def handle(batch: Batch) -> None:
        name = batch.events[0].json()["name"]
        if name in fails:
            raise PoisonError
        seen.append(name)

    async def replayed(names: str) -> str:
        ids = {orjson.loads(event.raw)["name"]: event.id for event in await kept(quarantine)}
        await replay(quarantine, handle, [ids[name] for name in names])
        return await names_of(quarantine)

    assert await replayed("abc") == "bc"
    await of_one_key(store, "d", publisher)
    assert await replayed("c") == await replayed("d") == "bcd"
    fails.clear()
    assert await replayed("b") == await replayed("d") == "cd"
    assert await replayed("dc") == "d"
    assert await replayed("d") == ""
    assert seen == ["a", "b", "c", "d"]


async def test_what_followed_a_dropped_event_of_its_key_is_replayed(
    store: SQLiteCursorStore,
) -> None:
    quarantine, seen = await of_one_key(store, "abc"), []
    await drop(quarantine, [(await kept(quarantine))[0].id])

    async def handle(batch: Batch) -> None:
        seen.append(batch.events[0].json()["name"])

    assert await replay(quarantine, handle) == Replayed(2, 0)
    assert seen == ["b", "c"]


async def test_what_is_put_aside_during_a_replay_stays_in_order_in_it(
    store: SQLiteCursorStore,
) -> None:
    publisher, seen = Publisher(), []
    quarantine = await of_one_key(store, "ab", publisher)

    async def handle(batch: Batch) -> None:
        name = batch.events[0].json()["name"]
        if name == "b":
            await of_one_key(store, "cd", publisher)  # by a consumer that runs beside it
        if name == "c":
            raise PoisonError
        seen.append(name)

    assert await replay(quarantine, handle) == Replayed(2, 2)
    assert ("".join(seen), await names_of(quarantine)) == ("ab", "cd")


async def test_what_is_moved_during_a_replay_stays_in_order_in_it(
    store: SQLiteCursorStore,
) -> None:
    quarantine = await of_one_key(store, "abc")

    async def handle(batch: Batch) -> None:
        if batch.events[0].json()["name"] == "a":
            await move(store, "feed:orders", "feed:sales")
            raise PoisonError

    assert await replay(quarantine, handle) == Replayed(0, 3)
    assert await names_of(quarantine) == "abc"
