"""Contract tests of what is done ahead of the cursor."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from feedapi_client.errors import AlreadyDoneError, FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.done import DoneEvent, DoneStore, stored_id
from feedapi_client.testing.contracts.contract_positions import FEED, advanced, opening
from feedapi_client.testing.contracts.store_contract import StoreContract

_OTHER = FeedKey("https://elsewhere.example/feed")
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


class DoneTests(StoreContract):
    """What is done is remembered until a cursor has passed it, under one claim at a time."""

    async def test_it_is_a_done_store(self, store: DoneStore) -> None:
        """It has `take_over`, `done`, `is_done` and `save_passing`: `run_by_key` calls them."""
        assert isinstance(store, DoneStore)

    async def test_what_is_done_is_found_by_the_next_claim(self, store: DoneStore) -> None:
        """Else the events would be handled again after a restart."""
        claim = await store.take_over(FEED, [0], 0)
        assert claim.done == {}
        for name in ("a", "b"):
            assert not await store.is_done(FEED, _event(claim.number, name))
            await store.done(FEED, _event(claim.number, name))
            assert await store.is_done(FEED, _event(claim.number, name))
        assert await _remembered(store) == _ids("a", "b")

    async def test_it_is_done_once(self, store: DoneStore) -> None:
        """A second time is an AlreadyDoneError, under a newer claim too: its effects are there."""
        claim = await _claimed(store)
        await store.done(FEED, _event(claim))
        with pytest.raises(AlreadyDoneError) as refused:
            await store.done(FEED, _event(claim))
        assert refused.value.partition == 0
        again = await _claimed(store)
        with pytest.raises(AlreadyDoneError):
            await store.done(FEED, _event(again))
        assert await _remembered(store) == _ids("a")

    async def test_r17_an_older_claim_does_nothing_more(self, store: DoneStore) -> None:
        """It is a FencedError: a process that was paused must not do what another one does."""
        old = await _claimed(store)
        await store.done(FEED, _event(old))
        new = await _claimed(store)
        for name in ("a", "b"):
            with pytest.raises(FencedError) as refused:
                await store.done(FEED, _event(old, name))
            assert refused.value.partition == 0
        await store.done(FEED, _event(new, "b"))
        assert await _remembered(store) == _ids("a", "b")

    async def test_r17_without_a_claim_nothing_is_done(self, store: DoneStore) -> None:
        """Of another partition, number or feed it is a FencedError: nobody would look for it."""
        claim = await _claimed(store)
        for event in (_event(claim, partition=1), _event(claim + 1)):
            with pytest.raises(FencedError):
                await store.done(FEED, event)
        with pytest.raises(FencedError):
            await store.done(_OTHER, _event(claim))

    async def test_r17_a_claim_of_another_revision_is_refused(self, store: DoneStore) -> None:
        """What was done behind that position may be forgotten already."""
        with pytest.raises(FencedError):
            await store.take_over(FEED, [0], 1)
        positions = opening()
        await store.save(FEED, positions)
        first = positions[0].revision
        for revision in (0, first - 1, first + 1):
            with pytest.raises(FencedError) as refused:
                await store.take_over(FEED, [0], revision)
            assert refused.value.partition == 0
        await store.save(FEED, advanced(positions))
        with pytest.raises(FencedError):
            await store.take_over(FEED, [0], first)
        assert await _remembered(store, revision=advanced(positions)[0].revision) == {}

    async def test_r17_a_refused_claim_fences_nobody(self, store: DoneStore) -> None:
        """The claim before it holds: its consumer is the one whose position is stored."""
        claim = await _claimed(store)
        with pytest.raises(FencedError):
            await store.take_over(FEED, [0], 1)
        await store.done(FEED, _event(claim))
        assert await _remembered(store) == _ids("a")

    async def test_a_save_forgets_what_it_passes(self, store: DoneStore) -> None:
        """What is done is remembered behind the cursor only, else the table grows for ever."""
        positions = opening(range(2))
        await store.save(FEED, positions)
        claims = {p: await _claimed(store, [p], positions[p].revision) for p in range(2)}
        for partition, claim in claims.items():
            for name in ("a", "b"):
                await store.done(FEED, _event(claim, name, partition))
        later = advanced({0: positions[0]})
        await store.save_passing(FEED, later, {0: [stored_id("a")]})
        assert (await store.load(FEED))[0] == later[0]
        assert await _remembered(store, revision=later[0].revision) == _ids("b")
        found = await _remembered(store, [1], positions[1].revision)
        assert found == _ids("a", "b", partition=1)

    async def test_r17_a_refused_save_forgets_nothing(self, store: DoneStore) -> None:
        """The cursor did not pass the events: they come again, and must be known as done."""
        await store.save(FEED, opening())
        await store.done(FEED, _event(await _claimed(store, revision=_OPENING)))
        for refused in (opening(cursor="x"), advanced(advanced(opening()))):
            with pytest.raises(FencedError):
                await store.save_passing(FEED, refused, {0: [stored_id("a")]})
        assert await _remembered(store, revision=_OPENING) == _ids("a")

    async def test_a_save_forgets_any_number(self, store: DoneStore) -> None:
        """More identities than one statement takes are forgotten with one save."""
        claim = await _claimed(store)
        names = [str(number) for number in range(_MANY)]
        await store.done(FEED, _event(claim, names[0]))
        await store.done(FEED, _event(claim, names[-1]))
        await store.done(FEED, _event(claim, "later"))
        await store.save_passing(FEED, opening([0]), {0: [stored_id(name) for name in names]})
        assert await _remembered(store, revision=_OPENING) == _ids("later")

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
        """The application has to undo what it did in it."""
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
        """It is a StoreError: a mark on its own would outlive a rollback of the effects."""
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

    async def test_feeds_are_apart(self, store: DoneStore) -> None:
        """The same identity in another feed is another event."""
        claim = await _claimed(store)
        await store.done(FEED, _event(claim))
        assert (await store.take_over(_OTHER, [0], 0)).done == {}
        await store.done(FEED, _event(claim, "b"))
        assert await _remembered(store) == _ids("a", "b")

    async def test_an_operators_changes_forget(self, store: DoneStore) -> None:
        """Behind a cursor that was set or deleted all events are wanted again."""
        assert isinstance(store, AdministrableStore)
        await store.save(FEED, opening([0]))
        claim = await _claimed(store, revision=_OPENING)
        await store.done(FEED, _event(claim))
        replaced = await store.replace(FEED, {0: Position("back")})
        with pytest.raises(FencedError):
            await store.done(FEED, _event(claim, "b"))
        claim, done = await store.take_over(FEED, [0], replaced[0].revision)
        assert done == {}
        await store.done(FEED, _event(claim))
        await store.delete(FEED, [0])
        with pytest.raises(FencedError):
            await store.done(FEED, _event(claim, "b"))
        assert await _remembered(store) == {}

    async def test_a_move_takes_along_what_is_done(self, store: DoneStore) -> None:
        """The cursor is moved, and behind it these events come again."""
        assert isinstance(store, AdministrableStore)
        await store.save(FEED, opening([0]))
        claim = await _claimed(store, revision=_OPENING)
        await store.done(FEED, _event(claim))
        moved = await store.move({FEED: _OTHER})
        with pytest.raises(FencedError):
            await store.done(FEED, _event(claim, "b"))
        found = await store.take_over(_OTHER, [0], moved[_OTHER][0].revision)
        assert found.done == _ids("a")
        await store.done(_OTHER, _event(found.number, "b"))
