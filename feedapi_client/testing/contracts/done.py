"""Contract tests of what is done ahead of the cursor."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from feedapi_client.errors import AlreadyDoneError, FencedError, StoreError
from feedapi_client.model import Position
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.done import DoneEvent, DoneStore, stored_id
from feedapi_client.testing.contracts.administration import MOVED
from feedapi_client.testing.contracts.cursors import (
    FEED,
    StoreContract,
    advanced,
    opening,
)

_MANY = 1200
_WHILE = 0.2
"""Seconds in which something that does not wait would be over."""
_OPENING = opening()[0].revision


def _event(claim: int, name: str = "a", partition: int = 0) -> DoneEvent:
    return DoneEvent(partition, claim, stored_id(name))


def _ids(*names: str, partition: int = 0) -> dict[str, int]:
    return {stored_id(name): partition for name in names}


async def _claimed(store: DoneStore, partitions: Sequence[int] = (0,), revision: int = 0) -> int:
    return (await store.take_over(FEED, partitions, revision)).number


async def _remembered(
    store: DoneStore, partitions: Sequence[int] = (0,), revision: int = 0
) -> dict[str, int]:
    return (await store.take_over(FEED, partitions, revision)).done


class DoneStoreContract(StoreContract):
    """What `DoneStore` promises beyond `CursorStore`, as tests. Run both.

    What is done is remembered until a cursor has passed it, under one claim at a time.
    """

    async def test_it_is_done_once_and_found_by_the_next_claim(self, store: DoneStore) -> None:
        """A second time is an AlreadyDoneError, under a newer claim too: its effects are there."""
        claim, done = await store.take_over(FEED, [0], 0)
        assert done == {}
        for name in ("a", "b"):
            event = _event(claim, name)
            assert not await store.is_done(FEED, event)
            await store.done(FEED, event)
            assert await store.is_done(FEED, event)
        for _ in range(2):
            with pytest.raises(AlreadyDoneError) as refused:
                await store.done(FEED, _event(claim))
            assert refused.value.partition == 0
            claim = await _claimed(store)
        assert (await store.take_over(MOVED, [0], 0)).done == {}
        assert await _remembered(store) == _ids("a", "b")

    async def test_r17_an_older_claim_does_nothing_more(self, store: DoneStore) -> None:
        """A process that was paused must not do what another one does."""
        old = await _claimed(store)
        await store.done(FEED, _event(old))
        new = await _claimed(store)
        for refused in (_event(old), _event(old, "b"), _event(new, "b", 1), _event(new + 1, "b")):
            with pytest.raises(FencedError) as found:
                await store.done(FEED, refused)
            assert found.value.partition == refused.partition
        with pytest.raises(FencedError):
            await store.done(MOVED, _event(new, "b"))
        await store.done(FEED, _event(new, "b"))
        assert await _remembered(store) == _ids("a", "b")

    async def test_r17_a_claim_of_another_revision_is_refused(self, store: DoneStore) -> None:
        """What was done behind that position may be forgotten already. It fences nobody."""
        claim = await _claimed(store)
        with pytest.raises(FencedError):
            await store.take_over(FEED, [0], 1)
        await store.done(FEED, _event(claim))
        positions, revision = opening(), 0
        for _ in range(2):
            await store.save(FEED, positions)
            revision = positions[0].revision
            for other in (0, revision - 1, revision + 1):
                with pytest.raises(FencedError) as refused:
                    await store.take_over(FEED, [0], other)
                assert refused.value.partition == 0
            positions = advanced(positions)
        assert await _remembered(store, revision=revision) == _ids("a")

    async def test_a_save_forgets_what_it_passes(self, store: DoneStore) -> None:
        """More identities than one statement takes are forgotten with one save."""
        positions = opening(range(2))
        await store.save(FEED, positions)
        claims = {p: await _claimed(store, [p], positions[p].revision) for p in range(2)}
        for partition, claim in claims.items():
            for name in ("0", str(_MANY - 1), "later"):
                await store.done(FEED, _event(claim, name, partition))
        passed = {0: [stored_id(str(number)) for number in range(_MANY)]}
        for refused in (opening(cursor="x"), advanced(advanced(opening()))):
            with pytest.raises(FencedError):
                await store.save_passing(FEED, refused, passed)
        found = await _remembered(store, revision=positions[0].revision)
        assert found == _ids("0", str(_MANY - 1), "later")
        later = advanced({0: positions[0]})
        await store.save_passing(FEED, later, passed)
        assert (await store.load(FEED))[0] == later[0]
        assert await _remembered(store, revision=later[0].revision) == _ids("later")
        found = await _remembered(store, [1], positions[1].revision)
        assert found == _ids("0", str(_MANY - 1), "later", partition=1)

    async def test_r9_a_successor_finds_what_is_done_in_its_ancestors(
        self, store: DoneStore
    ) -> None:
        """It goes on from their cursor, behind which these events come again."""
        for partition in (3, 4):
            claim = await _claimed(store, [partition])
            await store.done(FEED, _event(claim, str(partition), partition))
        old = await _claimed(store, [4])
        await store.save(FEED, opening([7]))
        claim, done = await store.take_over(FEED, [7, 4, 3], opening([7])[7].revision)
        assert done == _ids("3", partition=3) | _ids("4", partition=4)
        with pytest.raises(FencedError):
            await store.done(FEED, _event(old, "new", 4))
        await store.done(FEED, _event(claim, "new", 7))
        passed = {3: [stored_id("3")], 7: [stored_id("new")]}
        later = advanced(opening([7]))
        await store.save_passing(FEED, later, passed)
        assert await _remembered(store, [7, 4, 3], later[7].revision) == _ids("4", partition=4)

    async def test_r5_what_is_done_takes_effect_with_the_transaction(
        self, store: DoneStore
    ) -> None:
        """With a rollback the effects are gone, and so must be the mark."""
        self._need("supports_transactions")
        claim = await _claimed(store)
        for finish, expected in ((self.rollback, {}), (self.commit, _ids("a", "b"))):
            transaction = await self.begin(store)
            for name in ("a", "b"):
                await store.done(FEED, _event(claim, name), transaction=transaction)
            await finish(transaction)
            assert await store.is_done(FEED, _event(claim)) == bool(expected)
        assert await _remembered(store) == expected

    async def test_r5_a_refusal_leaves_a_transaction_that_rolls_back(
        self, store: DoneStore
    ) -> None:
        self._need("supports_transactions")
        old = await _claimed(store)
        claim = await _claimed(store)
        await store.done(FEED, _event(claim))
        refusals: tuple[tuple[int, type[StoreError]], ...] = (
            (old, FencedError),
            (claim, AlreadyDoneError),
        )
        for number, refusal in refusals:
            transaction = await self.begin(store)
            with pytest.raises(refusal):
                await store.done(FEED, _event(number), transaction=transaction)
            await self.rollback(transaction)
        await store.done(FEED, _event(claim, "b"))
        assert await _remembered(store) == _ids("a", "b")

    async def test_r5_a_save_forgets_with_its_transaction(self, store: DoneStore) -> None:
        """Rolled back, the cursor stays before the events, and they have to be remembered."""
        self._need("supports_transactions")
        positions = opening([0])
        await store.save(FEED, positions)
        await store.done(FEED, _event(await _claimed(store, revision=_OPENING)))
        later = advanced(positions)
        for finish in (self.rollback, self.commit):
            assert await _remembered(store, revision=_OPENING) == _ids("a")
            transaction = await self.begin(store)
            passed = {0: [stored_id("a")]}
            await store.save_passing(FEED, later, passed, transaction=transaction)
            await finish(transaction)
        assert await _remembered(store, revision=later[0].revision) == {}

    async def test_what_is_no_transaction_is_refused_here_too(self, store: DoneStore) -> None:
        claim = await _claimed(store)
        with pytest.raises(StoreError):
            await store.done(FEED, _event(claim), transaction=object())
        assert not await store.is_done(FEED, _event(claim))

    @pytest.mark.parametrize("commits", [True, False])
    async def test_r17_a_claim_waits_for_open_transactions(
        self, store: DoneStore, commits: bool
    ) -> None:
        """Else it would miss what they commit, and the event would be done twice."""
        self._need("supports_transactions")
        self._need("supports_second_handle")
        claim = await _claimed(store)
        transaction = await self.begin(store)
        await store.done(FEED, _event(claim), transaction=transaction)
        found: list[dict[str, int]] = []

        async def take_over() -> None:
            async with self.second_handle(store) as second:
                assert isinstance(second, DoneStore)
                found.append(await _remembered(second))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_over)
            await anyio.sleep(_WHILE)
            assert found == []
            await (self.commit if commits else self.rollback)(transaction)
        assert found == [_ids("a") if commits else {}]

    async def test_an_operators_changes_forget_and_a_move_takes_along(
        self, store: DoneStore
    ) -> None:
        """Behind a cursor that was set or deleted all events are wanted again."""
        assert isinstance(store, AdministrableStore)
        await store.save(FEED, opening())
        claim = await _claimed(store, revision=_OPENING)
        await store.done(FEED, _event(claim))
        old, positions = claim, await store.replace(FEED, {0: Position("back")})
        claim, done = await store.take_over(FEED, [0], positions[0].revision)
        assert done == {}
        await store.done(FEED, _event(claim))
        moved = (await store.move({FEED: MOVED}))[MOVED]
        taken = await store.take_over(MOVED, [0], moved[0].revision)
        assert taken.done == _ids("a")
        await store.delete(MOVED, [0])
        for feed, number in ((FEED, old), (FEED, claim), (MOVED, taken.number)):
            with pytest.raises(FencedError):
                await store.done(feed, _event(number, "b"))
        assert (await store.take_over(MOVED, [0], 0)).done == {}
