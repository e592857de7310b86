"""What is stored: listed, set, reset, moved, renamed, exported and imported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.model import make_event
from feedapi_client.operations import (
    FeedPositions,
    OperationError,
    export_positions,
    import_positions,
    list_leases,
    list_positions,
    move,
    parse_export,
    rename,
    reset,
    set_position,
)
from feedapi_client.quarantine import quarantine_beside
from feedapi_client.quarantine.record import quarantined
from feedapi_client.stores import AdministrableStore, LeaseStore
from feedapi_client.stores.done import DoneEvent, DoneStore, stored_id
from tests.leases import claims
from tests.positions import stand

pytestmark = pytest.mark.anyio
HERE, THERE = FeedKey("https://here.test/feed"), FeedKey("https://there.test/feed")
STORED = {0: Position("a"), 1: Position("b", "drained")}


async def test_positions_are_listed_by_feed_and_consumer(store: AdministrableStore) -> None:
    other = FeedKey(HERE.url, "other")
    await store.save(HERE, STORED)
    await store.save(other, {3: Position("c")})
    both = [FeedPositions(HERE, STORED), FeedPositions(other, {3: Position("c")})]
    assert await list_positions(store) == both
    assert await list_positions(store, lambda key: key.name == "other") == both[1:]
    assert both[0].partitions() == [0, 1]


async def test_a_position_is_set_whatever_is_stored(store: AdministrableStore) -> None:
    first = await set_position(store, HERE, 0, Position("z"))
    second = await set_position(store, HERE, 0, Position("y"))
    assert (first.cursor, second.cursor) == ("z", "y")
    assert second.revision > first.revision
    assert await store.load(HERE) == {0: second}


@pytest.mark.parametrize("cursor", ["_last", "ä", "a\x00", "a" * 20_000])
async def test_r06_a_cursor_that_must_not_be_stored_is_refused(
    store: AdministrableStore, cursor: str
) -> None:
    with pytest.raises(ValueError, match=r"never stored|printable ASCII"):
        await set_position(store, HERE, 0, Position(cursor))
    assert await store.load(HERE) == {}


async def test_positions_are_deleted_after_a_dry_run_that_deletes_none(
    store: AdministrableStore,
) -> None:
    await store.save(HERE, STORED)
    found = await reset(store, HERE, [1, 7], dry_run=True)
    assert (found.positions, await store.load(HERE)) == ({1: STORED[1]}, STORED)
    assert await reset(store, HERE, [1, 7]) == found
    assert await store.load(HERE) == {0: STORED[0]}
    with pytest.raises(OperationError, match="nothing is stored for partition 1"):
        await reset(store, HERE, [1])
    assert (await reset(store, HERE)).positions == {0: STORED[0]}
    assert await store.feeds() == []


async def test_a_feed_is_moved_with_all_its_consumers(store: AdministrableStore) -> None:
    await store.save(HERE, STORED)
    await store.save(FeedKey(HERE.url, "other"), STORED)
    moved = await move(store, HERE.url, THERE.url)
    assert [feed.key for feed in moved] == [THERE, FeedKey(THERE.url, "other")]
    assert all(position.revision > 1 for feed in moved for position in feed.positions.values())
    assert await list_positions(store) == moved
    with pytest.raises(OperationError, match="holds no cursors"):
        await move(store, HERE.url, THERE.url)
    with pytest.raises(ValueError, match="same cursors"):
        await move(store, HERE.url, HERE.url)


async def test_a_move_replaces_nothing_unless_it_is_told_to(store: AdministrableStore) -> None:
    await store.save(HERE, STORED)
    await store.save(THERE, {0: Position("there")})
    with pytest.raises(OperationError, match="nothing was moved"):
        await move(store, HERE.url, THERE.url)
    assert await store.load(THERE) == {0: Position("there")}
    await move(store, HERE.url, THERE.url, overwrite=True)
    assert (await store.load(THERE))[0].cursor == "a"


async def test_some_partitions_are_moved_and_the_others_stay(store: AdministrableStore) -> None:
    await store.save(HERE, STORED)
    await store.save(THERE, {0: Position("there")})
    for partition, problem in ((7, "nothing is stored there for partition 7"), (0, "was moved")):
        with pytest.raises(OperationError, match=problem):
            await move(store, HERE.url, THERE.url, partitions=[partition])
    planned = await move(store, HERE.url, THERE.url, partitions=[1, 7], dry_run=True)
    assert await store.load(HERE) == STORED
    done = await move(store, HERE.url, THERE.url, partitions=[1, 7])
    assert [stand(each.positions) for each in (*planned, *done)] == [{1: ("b", "drained")}] * 2
    assert stand(await store.load(HERE)) == {0: ("a", "open")}
    assert stand(await store.load(THERE)) == {0: ("there", "open"), 1: ("b", "drained")}
    (renamed,) = await rename(store, "default", "new", feed=HERE.url, partitions=[0])
    assert renamed.key == FeedKey(HERE.url, "new")


async def test_r07_partitions_with_more_than_cursors_are_moved_with_all_the_others(
    store: AdministrableStore,
) -> None:
    ancestor = Position("a", "superseded")
    await store.save(HERE, {**STORED, 2: ancestor})
    if isinstance(store, DoneStore):
        # Another partition is read by key meanwhile: its claim stays.
        claim = await store.take_over(HERE, [0], STORED[0].revision)
        before = await store.take_over(HERE, [2], ancestor.revision)
        await store.done(HERE, DoneEvent(2, before.number, stored_id("b")))
        with pytest.raises(OperationError, match="done ahead"):
            await move(store, HERE.url, THERE.url, partitions=[1], force=True)
        await store.done(HERE, DoneEvent(0, claim.number, stored_id("a")))
        (moved,) = await move(store, HERE.url, THERE.url)
        again = await store.take_over(THERE, [0], moved.positions[0].revision)
        assert again.done == claim.done | {stored_id("a"): 0}


async def test_r07_partitions_with_quarantined_events_are_moved_with_all_the_others(
    tmp_path: Path,
) -> None:
    event = make_event(0, b"{}", {})
    async with SQLiteCursorStore(tmp_path / "c.db") as store:
        await store.save(HERE, STORED)
        quarantine = quarantine_beside(store)
        await quarantine.add([quarantined(HERE, event, "a", 0, ValueError("bad"))])
        for dry_run in (True, False):
            with pytest.raises(OperationError, match="partition 0 has quarantined events"):
                await move(store, HERE.url, THERE.url, partitions=[0], dry_run=dry_run)
        await move(store, HERE.url, THERE.url, partitions=[1])
        assert stand(await store.load(HERE)) == {0: ("a", "open")}
        await rename(store, "default", "new", feed=HERE.url)
        (kept,) = await quarantine.page(FeedKey(HERE.url, "new"))
        assert kept.raw == b"{}"


async def test_a_consumer_is_renamed_in_one_feed_or_in_all(store: AdministrableStore) -> None:
    await store.save(HERE, STORED)
    await store.save(THERE, STORED)
    renamed = await rename(store, "default", "new", feed="//here")
    assert [feed.key for feed in renamed] == [FeedKey(HERE.url, "new")]
    assert set(await store.feeds()) == {FeedKey(HERE.url, "new"), THERE}
    await rename(store, "default", "new")
    assert {key.name for key in await store.feeds()} == {"new"}
    for old, new in (("new", ""), ("new", "new")):
        with pytest.raises(ValueError, match="another name"):
            await rename(store, old, new)
    with pytest.raises(OperationError, match="consumer default"):
        await rename(store, "default", "x")


async def test_an_export_is_imported_into_another_consumer_s_store(
    store: AdministrableStore,
) -> None:
    await store.save(HERE, {**STORED, 2: Position("kept")})
    exported = export_positions(await list_positions(store))
    feeds = parse_export(exported)
    assert {id: (p.cursor, p.status) for id, p in feeds[HERE].items()} == {
        0: ("a", "open"),
        1: ("b", "drained"),
        2: ("kept", "open"),
    }
    del feeds[HERE][2]
    await store.replace(HERE, {0: Position("later")})
    (imported,) = await import_positions(store, feeds)
    assert imported.positions[0].cursor == "a"
    assert (await store.load(HERE))[2].cursor == "kept"


@pytest.mark.parametrize(
    "position",
    [
        '{"partition":0,"cursor":"_last","status":"open"}',
        '{"partition":0,"cursor":"ä","status":"open"}',
        '{"partition":0,"cursor":"a","status":"odd"}',
        '{"partition":0,"cursor":null,"status":"open"}',
        '{"partition":40000,"cursor":"a","status":"open"}',
        '{"partition":true,"cursor":"a","status":"open"}',
    ],
)
def test_r06_what_no_store_may_hold_is_no_export(position: str) -> None:
    text = (
        '{"format":"feedapi-cursors/1","feeds":[{"url":"https://h/f","name":"n","filters":{},'
        f'"positions":[{position}]}}]}}'
    )
    with pytest.raises(ValueError, match="no export of cursors"):
        parse_export(text.encode())


async def test_leases_are_listed_and_protect_positions(store: AdministrableStore) -> None:
    assert isinstance(store, LeaseStore)
    await store.save(HERE, STORED)
    await store.beat(HERE, "one", 1000)
    await store.put(HERE, "one", claims("one", {0: 0}))
    (found,) = await list_leases(store)
    assert (found.key, [each.name for each in found.instances]) == (HERE, ["one"])
    assert [lease.partition for lease in found.of("one")] == [0]
    assert found.of("two") == []
    refused: list[Callable[[bool], Awaitable[object]]] = [
        lambda force: set_position(store, HERE, 0, Position("c"), force=force),
        lambda force: reset(store, HERE, [1], force=force),
        lambda force: import_positions(store, {HERE: {0: Position("d")}}, force=force),
        lambda force: rename(store, "default", "new", force=force),
        lambda force: move(store, HERE.url, THERE.url, name="new", force=force),
    ]
    for change in refused[:-1]:
        before = await store.load(HERE)
        with pytest.raises(OperationError, match=r"1 living instance \(one\)"):
            await change(False)
        assert await store.load(HERE) == before
        await change(True)
        assert await store.load(HERE) != before
    await store.beat(FeedKey(HERE.url, "new"), "one", 1000)
    with pytest.raises(OperationError, match="1 living instance"):
        await refused[-1](False)
    await refused[-1](True)
    assert [key.url for key in await store.feeds()] == [THERE.url]
