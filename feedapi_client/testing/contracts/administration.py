"""Contract tests of listing, deleting, replacing and moving positions."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.testing.contracts.cursors import (
    FEED,
    MANY,
    SPECIAL_TEXTS,
    CursorStoreContract,
    advanced,
    opening,
)

MOVED = FeedKey("https://elsewhere.test:8443/feed", FEED.name)
OTHER, MOVED_OTHER = FeedKey(FEED.url, "other"), FeedKey(MOVED.url, "other")
# One move of a key to itself, and two to one key.
TWICE = ({FEED: FEED}, {FEED: MOVED, OTHER: MOVED})


def _places(positions: dict[int, Position]) -> dict[int, tuple[str, str]]:
    return {p: (position.cursor, position.status) for p, position in positions.items()}


class AdministrableStoreContract(CursorStoreContract):
    """What `AdministrableStore` promises beyond `CursorStore`, as tests.

    Operators can list, delete, replace and move what is saved.
    """

    async def test_feeds_lists_the_keys_that_were_saved(self, store: AdministrableStore) -> None:
        """Every key comes back as it was saved, sorted by its text: operators choose by it."""
        assert await store.feeds() == []
        keys = [
            FeedKey("https://a.test/feed?tenant=1", text, {text: text, "filter-b": "2"})
            for text in SPECIAL_TEXTS.values()
        ]
        for key in keys:
            await store.save(key, opening(range(3)))
        found = await store.feeds()
        assert found == sorted(keys, key=str)
        assert {key.id for key in found} == {key.id for key in keys}

    async def test_deleted_positions_are_gone_and_others_stay(
        self, store: AdministrableStore
    ) -> None:
        """A key without positions is not listed: it would pass for a consumer."""
        for key in (FEED, OTHER):
            await store.save(key, opening(range(5)))
        for partitions, left in (([1, 3, 99], (0, 2, 4)), ([], (0, 2, 4)), ([0, 2, 4], ())):
            await store.delete(FEED, partitions)
            assert await store.load(FEED) == opening(left)
        assert await store.feeds() == [OTHER]
        await store.save(OTHER, opening(MANY[5:]))
        for _ in range(2):  # a command may be repeated
            await store.delete(OTHER)
            assert (await store.load(OTHER), await store.feeds()) == ({}, [])

    @pytest.mark.parametrize("change", ["delete", "replace"])
    async def test_r17_a_change_fences_a_running_consumer(
        self, store: AdministrableStore, change: str
    ) -> None:
        """Its next save would undo what an operator did."""
        await store.save(FEED, opening())
        if change == "delete":
            await store.delete(FEED)
        else:
            await store.replace(FEED, opening(cursor="set"))
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(opening()))

    async def test_r17_replaced_positions_have_revisions_above_the_stored_ones(
        self, store: AdministrableStore
    ) -> None:
        """A revision that was used fences nobody. `replace` returns what is stored now."""
        await store.save(FEED, opening(range(3)))
        await store.save(FEED, advanced(opening()))
        before = await store.load(FEED)
        given = {0: Position("x", "drained", 77), 1: Position("y"), 9: Position("z", revision=5)}
        given |= {p: Position("many") for p in MANY[10:]}
        replaced = await store.replace(FEED, given)
        assert _places(replaced) == _places(given)
        assert all(replaced[p].revision > before[p].revision for p in (0, 1))
        assert await store.load(FEED) == {**replaced, 2: opening((2,))[2]}

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

    async def test_moved_positions_are_under_the_new_key_only(
        self, store: AdministrableStore
    ) -> None:
        """Under both keys they would be read twice. A consumer goes on from what is returned."""
        positions = opening(range(3))
        positions |= {3: Position("end", "drained"), 4: Position("s", "superseded")}
        await store.save(FEED, positions)
        moved = await store.move({FEED: MOVED})
        assert await store.feeds() == [MOVED]
        assert await store.load(FEED) == {}
        assert await store.load(MOVED) == moved[MOVED]
        assert _places(moved[MOVED]) == _places(positions)
        await store.save(MOVED, advanced(moved[MOVED]))
        assert await store.move({FEED: MOVED}) == {}

    async def test_several_keys_are_moved_all_or_none(self, store: AdministrableStore) -> None:
        """What is stored under a new key may be of a consumer that runs: a StoreError."""
        for key in (FEED, OTHER, MOVED_OTHER):
            await store.save(key, opening(cursor=key.url))
        keys = {FEED: MOVED, OTHER: MOVED_OTHER}
        with pytest.raises(StoreError):
            await store.move(keys)
        assert set(await store.feeds()) == {FEED, OTHER, MOVED_OTHER}
        assert (await store.move(keys, overwrite=True)).keys() == {MOVED, MOVED_OTHER}
        assert set(await store.feeds()) == {MOVED, MOVED_OTHER}
        assert _places(await store.load(MOVED_OTHER)) == _places(opening(cursor=FEED.url))

    async def test_a_key_is_moved_once(self, store: AdministrableStore) -> None:
        await store.save(FEED, opening())
        for keys in TWICE:
            with pytest.raises(ValueError, match="twice"):
                await store.move(keys)
        assert await store.load(FEED) == opening()

    async def test_r17_moving_fences_the_consumers_of_both_keys(
        self, store: AdministrableStore
    ) -> None:
        """Neither may save any more: each would go on from a place that is not its own."""
        positions, others = opening(), advanced(advanced(opening(cursor="other")))
        await store.save(FEED, positions)
        for position in (opening(cursor="other"), advanced(opening(cursor="other")), others):
            await store.save(MOVED, position)
        await store.move({FEED: MOVED}, overwrite=True)
        for key, stale in ((FEED, positions), (MOVED, others)):
            with pytest.raises(FencedError):
                await store.save(key, advanced(stale))
