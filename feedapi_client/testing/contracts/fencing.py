"""Contract tests of compare-and-set: of several consumers one advances."""

# ruff: noqa: D102 - the name of a test says what it shows

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from feedapi_client.errors import FencedError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.contracts.contract_positions import FEED, advanced, opening
from feedapi_client.testing.contracts.store_contract import StoreContract

CONSUMERS = 8


class FencingTests(StoreContract):
    """A save is refused, as a whole, when one of its positions is not the next one."""

    async def test_r17_a_revision_that_is_not_the_next_is_refused(self, store: CursorStore) -> None:
        stored = {0: Position("c3", revision=3)}
        for number in (1, 2, 3):
            await store.save(FEED, {0: Position(f"c{number}", revision=number)})
        for revision in (1, 2, 3, 5, 100):
            with pytest.raises(FencedError):
                await store.save(FEED, {0: Position("other", revision=revision)})
            assert await store.load(FEED) == stored

    async def test_r17_a_later_revision_on_nothing_is_refused(self, store: CursorStore) -> None:
        with pytest.raises(FencedError):
            await store.save(FEED, {0: Position("c", revision=2)})
        assert await store.load(FEED) == {}

    async def test_r17_the_same_position_saved_twice_is_refused(self, store: CursorStore) -> None:
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening())

    async def test_r17_the_error_names_feed_and_partition(self, store: CursorStore) -> None:
        await store.save(FEED, opening(range(3)))
        with pytest.raises(FencedError, match=r"partition 2: .*contract") as refused:
            await store.save(FEED, {**advanced(opening(range(2))), 2: Position("x")})
        assert (refused.value.feed, refused.value.partition) == (FEED.url, 2)

    async def test_r17_one_stale_position_refuses_all(self, store: CursorStore) -> None:
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
        positions = opening((0, 5))
        await store.save(FEED, positions)
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, {**advanced({0: positions[0]}), **opening(range(1, 10))})
        assert refused.value.partition == 5
        assert await store.load(FEED) == positions

    async def test_the_store_keeps_working_after_a_refusal(self, store: CursorStore) -> None:
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening())
        await store.save(FEED, advanced(opening()))
        assert await store.load(FEED) == advanced(opening())

    async def test_r17_of_concurrent_consumers_one_advances(self, store: CursorStore) -> None:
        for revision in (1, 2, 3):
            results = await self._race(store, {0: revision})
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            assert await store.load(FEED) == {0: Position(_winner(results), revision=revision)}

    async def test_r17_of_concurrent_saves_of_many_positions_one_is_kept(
        self, store: CursorStore
    ) -> None:
        for revision in (1, 2, 3):
            results = await self._race(store, dict.fromkeys(range(50), revision))
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            assert await store.load(FEED) == {
                p: Position(_winner(results), revision=revision) for p in range(50)
            }

    async def test_concurrent_saves_of_different_partitions_are_all_kept(
        self, store: CursorStore
    ) -> None:
        async def consume(partition: int) -> None:
            for revision in range(1, 6):
                await store.save(FEED, {partition: Position(f"c{revision}", revision=revision)})

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, partition)
        assert await store.load(FEED) == {
            partition: Position("c5", revision=5) for partition in range(20)
        }

    async def test_concurrent_saves_of_different_feeds_are_all_kept(
        self, store: CursorStore
    ) -> None:
        feeds = [FeedKey(FEED.url, f"consumer {number}") for number in range(CONSUMERS)]
        async with anyio.create_task_group() as group:
            for feed in feeds:
                group.start_soon(store.save, feed, opening(range(5), feed.name))
        for feed in feeds:
            assert await store.load(feed) == opening(range(5), feed.name)

    async def test_a_second_handle_sees_what_the_first_saved(self, store: CursorStore) -> None:
        self._need("supports_second_handle")
        await store.save(FEED, opening(range(3)))
        async with self.second_handle(store) as second:
            assert await second.load(FEED) == opening(range(3))
            await second.save(FEED, advanced(opening()))
        assert await store.load(FEED) == {**opening(range(3)), **advanced(opening())}

    async def test_r17_a_second_handle_fences_the_first(self, store: CursorStore) -> None:
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
        self._need("supports_second_handle")
        async with self.second_handle(store) as second:
            for revision in (1, 2, 3):
                for partitions in ([0], list(range(1, 20))):
                    results = await self._race(store, dict.fromkeys(partitions, revision), second)
                    assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]

    async def _race(
        self, store: CursorStore, revisions: dict[int, int], second: CursorStore | None = None
    ) -> dict[str, str]:
        """Let several consumers save the same partitions at once; return how each one ended."""
        results: dict[str, str] = {}

        async def consume(name: str, handle: CursorStore) -> None:
            try:
                await handle.save(
                    FEED,
                    {
                        partition: Position(name, revision=revision)
                        for partition, revision in revisions.items()
                    },
                )
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
