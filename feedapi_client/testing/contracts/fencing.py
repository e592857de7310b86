"""Contract tests of compare-and-set: of several consumers one advances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import anyio
import pytest

from feedapi_client.errors import FencedError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.contracts.contract_positions import FEED, advanced, following, opening
from feedapi_client.testing.contracts.store_contract import StoreContract

CONSUMERS = 8


class FencingTests(StoreContract):
    """A save is refused, as a whole, when one of its positions is not the next one."""

    async def test_r17_a_position_that_replaces_another_one_is_refused(
        self, store: CursorStore
    ) -> None:
        """Only what replaces the stored revision is saved, all else is a FencedError."""
        stored = Position("c3", revision=30, replaces=20)
        await store.save(FEED, {0: Position("c1", revision=10)})
        await store.save(FEED, {0: Position("c2", revision=20, replaces=10)})
        await store.save(FEED, {0: stored})
        for replaces in (None, 10, 20, 29, 31, 39):
            with pytest.raises(FencedError):
                await store.save(FEED, {0: Position("other", revision=40, replaces=replaces)})
            assert await store.load(FEED) == {0: stored}

    async def test_r17_a_position_that_replaces_one_is_refused_where_nothing_is_stored(
        self, store: CursorStore
    ) -> None:
        """What it replaces was deleted: saved, it would undo a reset."""
        with pytest.raises(FencedError):
            await store.save(FEED, {0: Position("c", revision=2, replaces=1)})
        assert await store.load(FEED) == {}

    async def test_r17_two_first_positions_are_not_both_accepted(self, store: CursorStore) -> None:
        """Two consumers that start at once would both go on."""
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening(cursor="other"))

    async def test_r17_a_consumer_notices_that_the_database_went_back(
        self, store: CursorStore
    ) -> None:
        """After a failover that lost its save it is a FencedError, whoever saved since."""

        def saved(cursor: str, before: Position | None) -> Position:
            return Position.after(before, cursor)

        for first in (None, saved("a", None)):
            feed = FeedKey(FEED.url, "a" if first else "nothing")
            if first is not None:
                await store.save(feed, {0: first})
            lost = saved("b", first)  # which the database that went on has not got
            rival = saved("x", first)
            await store.save(feed, {0: rival})
            for position in (saved("c", lost), lost):
                with pytest.raises(FencedError):
                    await store.save(feed, {0: position})
            assert await store.load(feed) == {0: rival}

    async def test_r17_the_error_names_feed_and_partition(self, store: CursorStore) -> None:
        """FencedError has `feed` and `partition`: an operator looks there."""
        await store.save(FEED, opening(range(3)))
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, {**advanced(opening(range(2))), 2: Position("x")})
        assert (refused.value.feed, refused.value.partition) == (FEED.url, 2)

    async def test_r17_one_stale_position_refuses_all(self, store: CursorStore) -> None:
        """A save is one step: a part of it would tear a split or a merge apart."""
        positions = opening(range(10))
        for stale in (0, 4, 9):
            feed = FeedKey(FEED.url, f"{stale} is stale")
            await store.save(feed, positions)
            winner = advanced({stale: positions[stale]}, "winner")
            await store.save(feed, winner)
            with pytest.raises(FencedError):
                await store.save(feed, {**advanced(positions), 10: Position("new")})
            assert await store.load(feed) == {**positions, **winner}

    async def test_r17_a_partition_that_is_not_new_refuses_the_new_ones(
        self, store: CursorStore
    ) -> None:
        """So it is where new partitions are saved together with one that is there."""
        positions = opening((0, 5))
        await store.save(FEED, positions)
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, {**advanced({0: positions[0]}), **opening(range(1, 10), "new")})
        assert refused.value.partition == 5
        assert await store.load(FEED) == positions

    async def test_the_store_keeps_working_after_a_refusal(self, store: CursorStore) -> None:
        """The next save of the consumer that is right is accepted."""
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening(cursor="other"))
        await store.save(FEED, advanced(opening()))
        assert await store.load(FEED) == advanced(opening())

    async def test_r17_of_concurrent_consumers_one_advances(self, store: CursorStore) -> None:
        """Exactly one of the saves at once is accepted, the others are FencedErrors."""
        for _ in range(3):
            before = await store.load(FEED)
            results = await self._race(store, [0])
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            winner = following(before.get(0), _winner(results))
            assert await store.load(FEED) == {0: winner}

    async def test_r17_of_concurrent_saves_of_many_positions_one_is_kept(
        self, store: CursorStore
    ) -> None:
        """And all that is stored is of that one."""
        for _ in range(3):
            before = await store.load(FEED)
            results = await self._race(store, range(50))
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            assert await store.load(FEED) == {
                p: following(before.get(p), _winner(results)) for p in range(50)
            }

    async def test_concurrent_saves_of_different_partitions_are_all_kept(
        self, store: CursorStore
    ) -> None:
        """They have nothing in common: none is refused or lost."""
        last: dict[int, Position] = {}

        async def consume(partition: int) -> None:
            for number in range(5):
                last[partition] = following(last.get(partition), f"c{number}")
                await store.save(FEED, {partition: last[partition]})

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, partition)
        assert await store.load(FEED) == last

    async def test_concurrent_saves_of_different_feeds_are_all_kept(
        self, store: CursorStore
    ) -> None:
        """They have nothing in common: none is refused or lost."""
        feeds = [FeedKey(FEED.url, f"consumer {number}") for number in range(CONSUMERS)]
        async with anyio.create_task_group() as group:
            for feed in feeds:
                group.start_soon(store.save, feed, opening(range(5), feed.name))
        for feed in feeds:
            assert await store.load(feed) == opening(range(5), feed.name)

    async def test_a_second_handle_sees_what_the_first_saved(self, store: CursorStore) -> None:
        """What is saved is in the storage, not in the store object: a restart reads it."""
        self._need("supports_second_handle")
        await store.save(FEED, opening(range(3)))
        async with self.second_handle(store) as second:
            assert await second.load(FEED) == opening(range(3))
            await second.save(FEED, advanced(opening()))
        assert await store.load(FEED) == {**opening(range(3)), **advanced(opening())}

    async def test_r17_a_second_handle_fences_the_first(self, store: CursorStore) -> None:
        """Revisions are compared in the storage: the consumers are different processes."""
        self._need("supports_second_handle")
        await store.save(FEED, opening())
        async with self.second_handle(store) as second:
            await second.save(FEED, advanced(opening(), "second"))
            with pytest.raises(FencedError):
                await store.save(FEED, advanced(opening(), "first"))
            assert await second.load(FEED) == advanced(opening(), "second")

    async def test_r17_of_concurrent_consumers_on_two_handles_one_advances(
        self, store: CursorStore
    ) -> None:
        """Comparison and save are one step of the storage: UPDATE ... WHERE revision = ?."""
        self._need("supports_second_handle")
        async with self.second_handle(store) as second:
            for _ in range(3):
                for partitions in ([0], range(1, 20)):
                    results = await self._race(store, partitions, second)
                    assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]

    async def _race(
        self, store: CursorStore, partitions: Iterable[int], second: CursorStore | None = None
    ) -> dict[str, str]:
        """Let several consumers save the same partitions at once; return how each one ended."""
        results: dict[str, str] = {}
        before = await store.load(FEED)

        async def consume(name: str, handle: CursorStore) -> None:
            try:
                await handle.save(FEED, {p: following(before.get(p), name) for p in partitions})
                results[name] = "saved"
            except FencedError:
                results[name] = "fenced"

        async with anyio.create_task_group() as group:
            for number in range(CONSUMERS):
                group.start_soon(
                    consume, f"consumer {number}", second if second and number % 2 else store
                )
        return results


def _winner(results: Mapping[str, str]) -> str:
    return next(name for name, result in results.items() if result == "saved")
