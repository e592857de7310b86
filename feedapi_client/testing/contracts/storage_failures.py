"""Contract tests of storage that fails, and of cancellation."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.contracts.contract_positions import FEED, advanced, following, opening
from feedapi_client.testing.contracts.store_contract import StoreContract

CANCELLATION_DELAYS = (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""From before the first step of a save to well after the end of a fast one.

The tests hold whichever step a delay hits.
"""


class FailureTests(StoreContract):
    """A save that fails or is cancelled has saved all or nothing."""

    async def test_a_store_that_fails_in_the_middle_of_first_positions_keeps_none(
        self, store: CursorStore
    ) -> None:
        """A StoreError with `feed=` and the cause, no FencedError, and nothing is saved: it is
        tried again.
        """
        self._need("supports_failure_injection")
        async with self.failing(store):
            with pytest.raises(StoreError) as failed:
                await store.save(FEED, opening(range(10)))
        assert not isinstance(failed.value, FencedError)
        assert (failed.value.feed, failed.value.__cause__ is None) == (FEED.url, False)
        assert await store.load(FEED) == {}
        await store.save(FEED, opening(range(10)))

    async def test_a_store_that_fails_in_the_middle_of_later_positions_keeps_none(
        self, store: CursorStore
    ) -> None:
        """So it is where positions are there: they stay as they were."""
        self._need("supports_failure_injection")
        positions = opening(range(10))
        await store.save(FEED, positions)
        async with self.failing(store):
            with pytest.raises(StoreError) as failed:
                await store.save(FEED, {**advanced(positions), 10: Position("new")})
        assert not isinstance(failed.value, FencedError)
        assert await store.load(FEED) == positions
        await store.save(FEED, advanced(positions))
        assert await store.load(FEED) == advanced(positions)

    async def test_a_cancelled_save_has_saved_all_or_nothing(self, store: CursorStore) -> None:
        """A task may be cancelled at any time: a half of a save would skip events."""
        expected = opening(range(1_000))
        await store.save(FEED, expected)
        for delay in CANCELLATION_DELAYS:
            later = advanced(expected)
            with anyio.move_on_after(delay):
                await store.save(FEED, later)
            found = await store.load(FEED)
            assert found in (expected, later)
            expected = found
        await store.save(FEED, advanced(expected))
        assert await store.load(FEED) == advanced(expected)

    async def test_cancellation_during_a_save_in_a_transaction(self, store: CursorStore) -> None:
        """The caller's transaction can be rolled back, and nothing of the save is left."""
        self._need("supports_transactions")
        for delay in CANCELLATION_DELAYS:
            transaction = await self.begin(store)
            with anyio.move_on_after(delay):
                await store.save(FEED, opening(range(1_000)), transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == {}
        await store.save(FEED, opening())

    async def test_a_save_cancelled_at_any_of_its_first_steps_has_saved_all_or_nothing(
        self, store: CursorStore
    ) -> None:
        """So it is at each await within the save."""
        expected = opening(range(10))
        await store.save(FEED, expected)
        for steps in range(20):
            later = advanced(expected)
            async with anyio.create_task_group() as group:
                group.start_soon(store.save, FEED, later)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            found = await store.load(FEED)
            assert found in (expected, later)
            expected = found

    async def test_a_cancelled_queue_of_saves_leaves_the_store_usable(
        self, store: CursorStore
    ) -> None:
        """Saves that wait end when cancelled, and keep no lock or connection."""
        saves, sent = 0, set[Position]()

        async def consume(partition: int) -> None:
            nonlocal saves
            position = None
            for number in range(1, 1_000):
                position = following(position, f"c{number}")
                sent.add(position)
                await store.save(FEED, {partition: position})
                await anyio.lowlevel.checkpoint()  # a store without an await is not cancelled
                saves += 1
                if saves == 100:
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, partition)
        assert saves < 1_000, "a save that waits has to end when its task is cancelled"
        found = await store.load(FEED)
        assert sent.issuperset(found.values()), "something was stored that nobody saved"
        await store.save(FEED, advanced(found))
        assert await store.load(FEED) == advanced(found)
