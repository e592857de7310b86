"""Contract tests of saves in the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.contracts.contract_positions import (
    FEED,
    MANY,
    UNUSUAL_CURSORS,
    advanced,
    opening,
    refused_cursor,
)
from feedapi_client.testing.contracts.store_contract import StoreContract


class TransactionTests(StoreContract):
    """A save takes effect with the caller's transaction, or is refused."""

    async def test_what_is_no_transaction_is_refused(self, store: CursorStore) -> None:
        """It is a StoreError: saved on its own, the position would outlive a rollback."""
        with pytest.raises(StoreError):  # saved on its own it would outlive a rollback
            await store.save(FEED, opening(), transaction=object())
        assert await store.load(FEED) == {}, "what was refused is not to be saved"

    async def test_r5_a_save_takes_effect_when_the_caller_commits(self, store: CursorStore) -> None:
        """The save is a part of the caller's transaction, and does not commit it."""
        self._need("supports_transactions")
        transaction = await self.begin(store)
        await store.save(FEED, opening(range(10)), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == opening(range(10))

    async def test_r5_a_rolled_back_save_leaves_nothing(self, store: CursorStore) -> None:
        """With the effects of the events their cursor is gone: exactly once."""
        self._need("supports_transactions")
        for partitions in ([0], range(10)):
            transaction = await self.begin(store)
            await store.save(FEED, opening(partitions), transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == {}

    async def test_r5_after_a_rollback_the_same_position_is_saved_again(
        self, store: CursorStore
    ) -> None:
        """The store remembers nothing of what was rolled back: a commit may be tried again."""
        self._need("supports_transactions")
        positions = opening(range(3))
        await store.save(FEED, positions)
        later = advanced({1: positions[1]})
        for _ in range(3):
            transaction = await self.begin(store)
            await store.save(FEED, later, transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == positions
        transaction = await self.begin(store)
        await store.save(FEED, later, transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {**positions, **later}

    @pytest.mark.parametrize("cursor", UNUSUAL_CURSORS)
    async def test_r18_a_cursor_that_is_refused_leaves_the_transaction_usable(
        self, store: CursorStore, cursor: str
    ) -> None:
        """A StoreError with `partition=`, before a statement fails: the application may go on."""
        self._need("supports_transactions")
        transaction, unusual = await self.begin(store), {3: Position(cursor)}
        try:
            await store.save(FEED, unusual, transaction=transaction)
        except StoreError as error:
            refused_cursor(error, 3, cursor)
            unusual = {}
        await store.save(FEED, opening(), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == opening() | unusual

    async def test_several_saves_in_one_transaction(self, store: CursorStore) -> None:
        """Each one sees what those before it saved."""
        self._need("supports_transactions")
        positions = opening(range(3))
        transaction = await self.begin(store)
        await store.save(FEED, positions, transaction=transaction)
        await store.save(FEED, advanced(positions), transaction=transaction)
        await store.save(FEED, advanced(advanced({0: positions[0]})), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {
            **advanced(positions),
            **advanced(advanced({0: positions[0]})),
        }

    async def test_a_save_of_nothing_in_a_transaction(self, store: CursorStore) -> None:
        """It is no error, and the transaction can be committed."""
        self._need("supports_transactions")
        transaction = await self.begin(store)
        await store.save(FEED, {}, transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {}

    @pytest.mark.parametrize("partitions", [[0], range(10)], ids=["one", "several"])
    async def test_r17_a_refused_save_leaves_a_transaction_that_rolls_back(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        """FencedError, and the application undoes what it did."""
        self._need("supports_transactions")
        positions = opening(partitions)
        await store.save(FEED, positions)
        winner = advanced({0: positions[0]}, "winner")
        await store.save(FEED, winner)
        for refused in (positions, advanced(positions)):
            transaction = await self.begin(store)
            with pytest.raises(FencedError):
                await store.save(FEED, refused, transaction=transaction)
            await self.rollback(transaction)
        await store.save(FEED, advanced(winner))
        assert await store.load(FEED) == {**positions, **advanced(winner)}

    async def test_many_partitions_in_one_transaction(self, store: CursorStore) -> None:
        """More than one statement takes are one step with the caller's transaction."""
        self._need("supports_transactions")
        positions = opening(MANY)
        for finish in (self.rollback, self.commit):
            transaction = await self.begin(store)
            await store.save(FEED, positions, transaction=transaction)
            await finish(transaction)
            assert await store.load(FEED) == ({} if finish == self.rollback else positions)
