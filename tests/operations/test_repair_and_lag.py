"""What needs the feed: lag, skip, drain and restore; and rewind, which needs the journal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import anyio
import pytest

from feedapi_client import FeedConsumer, FeedKey, FencedError, FetchOptions, Position
from feedapi_client.operations import (
    FeedAccess,
    LagState,
    OperationError,
    PartitionLag,
    drain,
    lag,
    restore,
    rewind,
    skip,
)
from feedapi_client.stores import AdministrableStore, JournalledStore, MemoryCursorStore
from feedapi_client.testing import Publisher
from tests.positions import stand

pytestmark = pytest.mark.anyio
Make = Callable[..., Publisher]


def access(publisher: Publisher, **settings: object) -> FeedAccess:
    return FeedAccess(url=str(publisher.url), **settings)  # type: ignore[arg-type]


async def consume(publisher: Publisher, store: AdministrableStore) -> list[object]:
    """Return the payloads that a consumer with this store gets."""
    async with FeedConsumer(str(publisher.url), store=store, follow=False) as consumer:
        return [event.json() async for event in consumer]


# ---------------------------------------------------------------------- lag


async def test_lag_says_where_each_cursor_stands(
    store: AdministrableStore, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(3)
    key = FeedKey(str(publisher.url))
    for partition in range(3):
        publisher.extend(partition, [{"n": 1}])
    await consume(publisher, store)
    publisher.append(0, {"n": 2})
    publisher.split(2, into=(5, 6), method="starts-after")
    positions = {
        **await store.load(key),
        7: Position("x", "drained"),
        8: Position("x", "superseded"),
        9: Position("x"),
    }
    found = await lag(access(publisher), key, positions)
    states = {id: each.state for id, each in found.items()}
    assert states == {
        0: LagState.BEHIND,
        1: LagState.CAUGHT_UP,
        2: LagState.CAUGHT_UP,
        5: LagState.NOT_BEGUN,
        6: LagState.NOT_BEGUN,
        7: LagState.DRAINED,
        8: LagState.SUPERSEDED,
        9: LagState.NOT_LISTED,
    }
    assert str(found[5]) == "not begun, starts after 2"


async def test_lag_of_a_partition_that_can_t_be_asked_is_unknown(publisher: Publisher) -> None:
    publisher.extend(0, [{"n": 1}])
    key = FeedKey(str(publisher.url))
    found = await lag(access(publisher), key, {0: Position("no such cursor")})
    assert found[0].state is LagState.UNKNOWN
    assert str(found[0]).startswith("unknown (")
    assert str(PartitionLag(LagState.BEHIND)) == "behind"


# ---------------------------------------------------------------------- skip


async def test_skip_saves_the_ends_without_delivering(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    publisher.extend(0, [{"n": n} for n in range(7)])
    told: list[int] = []
    skipped = await skip(
        store, access(publisher), progress=lambda consumer, events: told.append(events)
    )
    assert (skipped.events, told[0], told[-1]) == (7, 0, 7)
    assert await store.load(key) == skipped.positions
    publisher.append(0, {"n": 7})
    assert await consume(publisher, store) == [{"n": 7}]
    assert (await skip(store, access(publisher))).positions == {}


async def test_skip_goes_by_the_name_of_the_feed_and_by_its_selection(
    store: AdministrableStore, publisher: Publisher
) -> None:
    publisher.extend(0, [{"n": 1}])
    feed = access(publisher, feed_name="payments", name="app")
    await skip(store, feed)
    assert await store.feeds() == [FeedKey.named("payments", "app")] == [feed.key]
    selected = access(publisher, fetch=FetchOptions(event_types=["a"]))
    assert selected.key == FeedKey(str(publisher.url), "default", {"event-types": "a"})


async def test_r17_skip_changes_nothing_where_a_consumer_went_on_meanwhile(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    publisher.extend(0, [{"n": n} for n in range(3)])
    await store.save(key, {0: Position("_first")})
    before = (await store.load(key))[0]
    skipping = access(publisher)

    class Racing(MemoryCursorStore):
        async def save(self, *args: object, **kwargs: object) -> None:
            await store.save(key, {0: before.advance("elsewhere")})
            await store.save(*args, **kwargs)  # type: ignore[arg-type]

    racing = Racing()
    racing.load = store.load  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        await skip(racing, skipping)
    assert (await store.load(key))[0].cursor == "elsewhere"


# ---------------------------------------------------------------------- drain


async def test_r06_drain_marks_a_closed_partition_so_that_its_children_start(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    publisher.extend(0, [{"n": n} for n in range(3)])
    await store.save(key, {0: Position("_first")})
    with pytest.raises(OperationError, match="partition 0 is open"):
        await drain(store, access(publisher), 0)
    children = publisher.split(0, method="starts-after")
    publisher.append(children[0], {"n": 9})
    planned = await drain(store, access(publisher), 0, dry_run=True)
    assert await store.load(key) == planned.before
    assert stand(planned.after) == {0: ("_first", "drained")}
    await drain(store, access(publisher), 0)
    assert await consume(publisher, store) == [{"n": 9}]
    again = await drain(store, access(publisher), 0)
    assert again.after == {}


async def test_r06_drain_refuses_what_is_unknown_or_superseded(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    with pytest.raises(OperationError, match="no cursor is stored"):
        await drain(store, access(publisher), 0, force=True)
    await store.save(key, {1: Position("a", "superseded")})
    with pytest.raises(OperationError, match="neither listed by the feed nor stored"):
        await drain(store, access(publisher), 7)
    with pytest.raises(OperationError, match="is superseded"):
        await drain(store, access(publisher), 1, force=True)
    await drain(store, access(publisher), 7, force=True)
    assert stand(await store.load(key))[7] == ("_first", "drained")


# ---------------------------------------------------------------------- restore


async def test_r11_restore_moves_the_cursor_back_in_one_save(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    stored = {0: Position("60", "superseded"), 10: Position("80")}
    await store.save(key, stored)
    planned = await restore(store, access(publisher), [0], dry_run=True)
    assert await store.load(key) == stored
    done = await restore(store, access(publisher), [0])
    assert stand(done.after) == stand(planned.after)
    assert stand(await store.load(key)) == {0: ("80", "open"), 10: ("80", "superseded")}
    with pytest.raises(OperationError, match="does not list it"):
        await restore(store, access(publisher), [10])
    with pytest.raises(ValueError, match="printable ASCII"):
        await restore(store, access(publisher), [0], cursor="ä")


# ---------------------------------------------------------------------- rewind


async def test_rewind_goes_back_to_the_positions_of_a_time(
    store: AdministrableStore, publisher: Publisher, key: FeedKey
) -> None:
    if not isinstance(store, JournalledStore):
        with pytest.raises(OperationError, match="keeps no journal"):
            await rewind(store, key, datetime.now(UTC))
        return
    publisher.extend(0, [{"n": 0}])
    await consume(publisher, store)
    await anyio.sleep(0.002)  # the journal counts in microseconds
    then, old = datetime.now(UTC), await store.load(key)
    await anyio.sleep(0.002)
    publisher.extend(0, [{"n": 1}])
    await consume(publisher, store)
    now = await store.load(key)
    planned = await rewind(store, key, then, dry_run=True)
    assert (planned.before, planned.after, await store.load(key)) == (now, old, now)
    done = await rewind(store, key, then)
    assert {id: p.cursor for id, p in done.after.items()} == {0: old[0].cursor}
    assert await consume(publisher, store) == [{"n": 1}]
