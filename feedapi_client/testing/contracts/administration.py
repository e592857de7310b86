"""Contract tests of listing, deleting and replacing positions."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore, CursorStore
from feedapi_client.testing.contracts.contract_positions import (
    FEED,
    MANY,
    SPECIAL_TEXTS,
    advanced,
    opening,
)
from feedapi_client.testing.contracts.store_contract import StoreContract

MOVED = FeedKey("https://elsewhere.test:8443/feed", FEED.name)


class AdministrationTests(StoreContract):
    """Operators can list, delete and replace what is saved."""

    async def test_the_store_is_administrable(self, store: CursorStore) -> None:
        """It has `feeds`, `delete`, `replace` and `move`: `feedapi cursors` calls them."""
        assert isinstance(store, AdministrableStore)

    async def test_feeds_lists_the_keys_that_were_saved(self, store: AdministrableStore) -> None:
        """Every key comes back as it was saved, sorted by its text: operators choose by it."""
        keys = [
            FeedKey("https://a.test/feed?tenant=1", text, {text: text, "filter-b": "2"})
            for text in SPECIAL_TEXTS.values()
        ]
        for key in keys:
            await store.save(key, opening(range(3)))
        found = await store.feeds()
        assert found == sorted(keys, key=str)
        assert {key.id for key in found} == {key.id for key in keys}

    async def test_feeds_of_an_empty_store(self, store: AdministrableStore) -> None:
        """A store without positions lists no feed, and is no error: a new one is listed, too."""
        assert await store.feeds() == []

    async def test_deleted_positions_are_gone_and_others_stay(
        self, store: AdministrableStore
    ) -> None:
        """Only the given partitions of this key go: others would be read anew."""
        other = FeedKey(FEED.url, "other")
        await store.save(FEED, opening(range(5)))
        await store.save(other, opening(range(5)))
        await store.delete(FEED, [1, 3, 99])
        assert await store.load(FEED) == opening((0, 2, 4))
        assert await store.load(other) == opening(range(5))

    async def test_a_deleted_feed_is_no_longer_listed(self, store: AdministrableStore) -> None:
        """A key without positions is not there: listed, it would pass for a consumer."""
        await store.save(FEED, opening(MANY))
        await store.delete(FEED)
        assert (await store.load(FEED), await store.feeds()) == ({}, [])

    async def test_a_feed_without_its_last_partition_is_no_longer_listed(
        self, store: AdministrableStore
    ) -> None:
        """So it is where its partitions are deleted one by one."""
        await store.save(FEED, opening(range(2)))
        await store.delete(FEED, [0, 1])
        assert (await store.load(FEED), await store.feeds()) == ({}, [])

    async def test_deleting_what_is_not_there_is_no_error(self, store: AdministrableStore) -> None:
        """The result is what was wanted: a command may be repeated."""
        await store.delete(FEED)
        await store.delete(FEED, [1])
        await store.delete(FEED, [])
        assert await store.load(FEED) == {}

    async def test_r17_deleting_fences_a_running_consumer(self, store: AdministrableStore) -> None:
        """Its next save is a FencedError: else a reset would be undone by it."""
        await store.save(FEED, opening())
        await store.delete(FEED)
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(opening()))
        await store.save(FEED, opening(cursor="again"))

    async def test_r17_replaced_positions_have_revisions_above_the_stored_ones(
        self, store: AdministrableStore
    ) -> None:
        """A revision that was used fences nobody. `replace` returns what is stored now."""
        await store.save(FEED, opening(range(3)))
        await store.save(FEED, advanced(opening()))
        before = await store.load(FEED)
        given = {0: Position("x", "drained", 77), 1: Position("y"), 9: Position("z", revision=5)}
        replaced = await store.replace(FEED, given)
        assert {p: (new.cursor, new.status) for p, new in replaced.items()} == {
            p: (new.cursor, new.status) for p, new in given.items()
        }
        assert all(replaced[p].revision > before[p].revision for p in (0, 1))
        assert await store.load(FEED) == {**replaced, 2: opening((2,))[2]}

    async def test_r17_replacing_fences_a_running_consumer(self, store: AdministrableStore) -> None:
        """Its next save is a FencedError: else a cursor that was set would be undone by it."""
        await store.save(FEED, opening())
        await store.replace(FEED, opening(cursor="set"))
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(opening()))

    async def test_moved_positions_are_under_the_new_key_only(
        self, store: AdministrableStore
    ) -> None:
        """Under both keys they would be read twice, and a consumer goes on from what `move`
        returns.
        """
        positions = opening(range(3)) | {
            3: Position("end", "drained"),
            4: Position("s", "superseded"),
        }
        await store.save(FEED, positions)
        await store.save(FEED, advanced({0: positions[0]}))
        moved = await store.move({FEED: MOVED})
        assert await store.load(FEED) == {}
        assert await store.load(MOVED) == moved[MOVED]
        assert await store.feeds() == [MOVED]
        assert {p: (new.cursor, new.status) for p, new in moved[MOVED].items()} == {
            p: (old.cursor, old.status)
            for p, old in (positions | advanced({0: positions[0]})).items()
        }
        await store.save(MOVED, advanced(moved[MOVED]))

    async def test_several_keys_are_moved_all_or_none(self, store: AdministrableStore) -> None:
        """Where one of them can't be, nothing is moved: no consumer is left without its cursors."""
        other, moved_other = FeedKey(FEED.url, "other"), FeedKey(MOVED.url, "other")
        for key in (FEED, other, moved_other):
            await store.save(key, opening())
        keys = {FEED: MOVED, other: moved_other}
        with pytest.raises(StoreError):
            await store.move(keys)
        assert set(await store.feeds()) == {FEED, other, moved_other}
        await store.delete(moved_other)
        assert (await store.move(keys)).keys() == {MOVED, moved_other}
        assert set(await store.feeds()) == {MOVED, moved_other}

    async def test_a_move_overwrites_only_when_told(self, store: AdministrableStore) -> None:
        """What is stored under the new key is a StoreError: it may be of a consumer that runs."""
        await store.save(FEED, opening(range(3)))
        await store.save(MOVED, opening(range(2, 5), "other"))
        with pytest.raises(StoreError):
            await store.move({FEED: MOVED})
        assert await store.load(FEED) == opening(range(3))
        assert await store.load(MOVED) == opening(range(2, 5), "other")
        await store.move({FEED: MOVED}, overwrite=True)
        assert {p: found.cursor for p, found in (await store.load(MOVED)).items()} == {
            p: found.cursor for p, found in opening(range(3)).items()
        }

    async def test_moving_what_is_not_there_moves_nothing(self, store: AdministrableStore) -> None:
        """It is no error, and nothing under the new key is lost."""
        await store.save(MOVED, opening())
        assert await store.move({FEED: MOVED}) == {}
        assert await store.move({}) == {}
        assert await store.load(MOVED) == opening()

    async def test_a_key_is_moved_once(self, store: AdministrableStore) -> None:
        """Two moves of a key, or to one key, are a ValueError that says "twice"."""
        await store.save(FEED, opening())
        for keys in ({FEED: FEED}, {FEED: MOVED, FeedKey(FEED.url, "other"): MOVED}):
            with pytest.raises(ValueError, match="twice"):
                await store.move(keys)
        assert await store.load(FEED) == opening()

    async def test_r17_moving_fences_the_consumers_of_both_keys(
        self, store: AdministrableStore
    ) -> None:
        """Neither may save any more: each would go on from a place that is not its own."""
        positions, others = opening(), advanced(advanced(opening(cursor="other")))
        await store.save(FEED, positions)
        await store.save(MOVED, opening(cursor="other"))
        await store.save(MOVED, advanced(opening(cursor="other")))
        await store.save(MOVED, others)
        await store.move({FEED: MOVED}, overwrite=True)
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(positions))
        with pytest.raises(FencedError):
            await store.save(MOVED, advanced(others))

    async def test_replacing_wins_against_a_running_consumer(
        self, store: AdministrableStore
    ) -> None:
        """`replace` takes effect whatever is saved meanwhile: an operator can't be outrun."""
        stopped: list[int | None] = []
        replaced: dict[int, Position] = {}

        async def consume() -> None:
            positions = opening()
            try:
                while True:
                    await store.save(FEED, positions)
                    positions = advanced(positions)
                    await anyio.lowlevel.checkpoint()
            except FencedError:
                stopped.append(positions[0].replaces)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            with anyio.fail_after(30):
                while not await store.load(FEED):
                    await anyio.lowlevel.checkpoint()
                replaced = await store.replace(FEED, {0: Position("set")})
        assert stopped == [replaced[0].replaces]
        assert await store.load(FEED) == replaced

    async def test_replacing_many_partitions(self, store: AdministrableStore) -> None:
        """More than one statement takes are replaced at once."""
        await store.save(FEED, opening(range(1_000)))
        replaced = await store.replace(FEED, opening(MANY, "set"))
        assert await store.load(FEED) == replaced
        assert replaced.keys() == set(MANY)
