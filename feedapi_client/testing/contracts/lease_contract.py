"""What a store of leases promises, as tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Lease, LeaseStore
from feedapi_client.testing.contracts.store_contract import StoreContract

FEED = FeedKey("https://service.test/feed", "shared")
OTHER = FeedKey("https://service.test/other", "shared")
LONG = 1000.0
SHORT = 0.5


async def _expired(store: LeaseStore, instance: str) -> None:
    """Wait until the heartbeat of the instance has expired by the store's own clock."""

    async def lives() -> bool:
        found = (await store.look(FEED)).instances
        return any(each.name == instance and each.alive for each in found)

    while await lives():  # noqa: ASYNC110 - the store has no event for it
        await anyio.sleep(SHORT / 5)


async def _claimed(store: LeaseStore, instance: str, epochs: Mapping[int, int]) -> set[int]:
    """Claim partitions that have these epochs; return those that the instance got."""
    return await store.put(
        FEED, instance, [Lease(p, instance, epoch + 1) for p, epoch in epochs.items()]
    )


async def _owners(store: LeaseStore) -> dict[int, str | None]:
    return {p: lease.owner for p, lease in (await store.look(FEED)).leases.items()}


async def _ends(store: LeaseStore) -> list[bool]:
    return [lease.ended for lease in (await store.look(FEED)).leases.values()]


class LeaseStoreContract(StoreContract):
    """What `LeaseStore` promises, as tests. Declare ``supports_second_handle``.

    Of the other capabilities none is asked for.
    """

    supports_transactions = False
    supports_failure_injection = False

    @pytest.fixture
    def store(self) -> LeaseStore:
        """Return a store without instances and leases. May be an async fixture."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture store")

    async def test_it_is_a_lease_store(self, store: LeaseStore) -> None:
        """It has `look`, `beat`, `put` and `leave`: instances call them."""
        assert isinstance(store, LeaseStore)

    async def test_an_empty_store(self, store: LeaseStore) -> None:
        """Nobody lives and nobody reads: that is no error."""
        instances, leases = await store.look(FEED)
        assert not instances
        assert not leases

    async def test_who_joins_is_alive_until_it_leaves(self, store: LeaseStore) -> None:
        """Sorted by name, with an age and the time that is left by the store's clock."""
        assert not await store.beat(FEED, "b", LONG)
        assert not await store.beat(FEED, "a", LONG)
        found = (await store.look(FEED)).instances
        assert [(each.name, each.alive) for each in found] == [("a", True), ("b", True)]
        assert all(LONG / 2 < each.expires_in <= LONG for each in found)
        assert all(0 <= each.age < LONG for each in found)
        await store.leave(FEED, "a")
        assert [each.name for each in (await store.look(FEED)).instances] == ["b"]

    async def test_what_an_instance_tells_is_read_by_the_others(self, store: LeaseStore) -> None:
        """They compare it with their own, and report what differs."""
        await store.beat(FEED, "a", LONG, "follow=1 version=1.0.0")
        await store.beat(FEED, "b", LONG)
        await store.beat(FEED, "a", SHORT)
        options = [each.options for each in (await store.look(FEED)).instances]
        assert options == ["follow=1 version=1.0.0", ""]
        await _expired(store, "a")
        await store.beat(FEED, "a", LONG, "follow=0")
        assert [each.options for each in (await store.look(FEED)).instances] == ["follow=0", ""]

    async def test_a_heartbeat_holds_for_so_long_from_the_last_beat(
        self, store: LeaseStore
    ) -> None:
        """The last beat counts, also a shorter one, and says whether the instance was alive."""
        await store.beat(FEED, "a", 2 * LONG)
        assert await store.beat(FEED, "a", LONG)
        assert (await store.look(FEED)).instances[0].expires_in <= LONG
        assert await store.beat(FEED, "a", 3 * LONG)
        assert (await store.look(FEED)).instances[0].expires_in > 2 * LONG

    async def test_feeds_are_apart(self, store: LeaseStore) -> None:
        """Instances and leases of another feed are not seen, and not changed."""
        await store.beat(FEED, "a", LONG)
        await _claimed(store, "a", {1: 0})
        instances, leases = await store.look(OTHER)
        assert not instances
        assert not leases
        assert not await store.put(OTHER, "a", [Lease(1, "a", 1)])
        await store.leave(OTHER, "a")
        assert await _owners(store) == {1: "a"}

    async def test_a_claim_raises_the_epoch_by_one(self, store: LeaseStore) -> None:
        """Of any other epoch it is refused, by being left out: somebody else was faster."""
        await store.beat(FEED, "a", LONG)
        assert await _claimed(store, "a", {2: 0, 1: 0}) == {1, 2}
        leases = (await store.look(FEED)).leases
        assert [(each.partition, each.owner, each.epoch) for each in leases.values()] == [
            (1, "a", 1),
            (2, "a", 1),
        ]
        assert not any(each.ended for each in leases.values())
        assert all(0 <= each.age < LONG for each in leases.values())
        assert await _claimed(store, "a", {1: 1}) == {1}
        assert not await _claimed(store, "a", {1: 0, 2: 7, 3: 1})
        found = {p: lease.epoch for p, lease in (await store.look(FEED)).leases.items()}
        assert found == {1: 2, 2: 1}

    async def test_a_lease_whose_answer_was_lost_can_be_put_again(self, store: LeaseStore) -> None:
        """The caller has it already, and is told so."""
        await store.beat(FEED, "a", LONG)
        for _ in range(2):
            assert await _claimed(store, "a", {1: 0}) == {1}
        assert (await store.look(FEED)).leases[1].epoch == 1

    async def test_who_has_not_joined_puts_nothing(self, store: LeaseStore) -> None:
        """Without a heartbeat nobody could tell that it died, and its leases were held for ever."""
        assert not await _claimed(store, "a", {1: 0})
        assert not (await store.look(FEED)).leases

    async def test_nobody_takes_from_a_living_instance(self, store: LeaseStore) -> None:
        """Two would read one partition, and handle its events twice."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        assert await _claimed(store, "a", {1: 0}) == {1}
        assert await _claimed(store, "b", {1: 1, 2: 0}) == {2}
        assert not await _claimed(store, "b", {1: 0})
        assert not await store.put(FEED, "b", [Lease(1, None, 1)])
        assert not await store.put(FEED, "b", [Lease(1, "b", 1, ended=True)])
        assert await _owners(store) == {1: "a", 2: "b"}

    async def test_what_was_released_can_be_claimed_once(self, store: LeaseStore) -> None:
        """At once, by the next epoch: a hand-over does not wait for an expiry."""
        for name in ("a", "b", "c"):
            await store.beat(FEED, name, LONG)
        await _claimed(store, "a", {1: 0, 2: 0})
        assert await store.put(FEED, "a", [Lease(1, None, 1), Lease(7, None, 0)]) == {1}
        assert await _owners(store) == {1: None, 2: "a"}
        assert not await _claimed(store, "b", {1: 0})
        assert await _claimed(store, "b", {1: 1}) == {1}
        assert not await _claimed(store, "c", {1: 1})
        await store.leave(FEED, "b")
        assert await _owners(store) == {1: None, 2: "a"}

    async def test_the_dead_lose_their_leases(self, store: LeaseStore) -> None:
        """Others take them, and who comes back is told that it was dead."""
        await store.beat(FEED, "b", LONG)
        await store.beat(FEED, "a", LONG)
        await _claimed(store, "a", {1: 0})
        await store.beat(FEED, "a", SHORT)
        await _expired(store, "a")
        assert not await _claimed(store, "a", {3: 0})
        assert await _owners(store) == {1: "a"}
        assert await _claimed(store, "b", {1: 1}) == {1}
        assert not await store.beat(FEED, "a", LONG)
        assert not await store.put(FEED, "a", [Lease(1, None, 1)])
        assert await _owners(store) == {1: "b"}

    async def test_who_joins_again_has_what_nobody_took(self, store: LeaseStore) -> None:
        """It goes on with them, and others may not take them."""
        await store.beat(FEED, "a", LONG)
        await _claimed(store, "a", {1: 0})
        await store.beat(FEED, "a", SHORT)
        await _expired(store, "a")
        await store.beat(FEED, "a", LONG)
        await store.beat(FEED, "b", LONG)
        assert not await _claimed(store, "b", {1: 1})

    async def test_ends_hold_until_all_others_are_gone(self, store: LeaseStore) -> None:
        """Who begins after all others left reads the feed again, to its end of then."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        await _claimed(store, "a", {1: 0, 2: 0})
        assert await store.put(FEED, "a", [Lease(2, "a", 1, ended=True)]) == {2}
        assert await _ends(store) == [False, True]
        await store.leave(FEED, "a")
        await store.beat(FEED, "c", LONG)
        assert await _ends(store) == [False, True]
        await store.leave(FEED, "b")
        await store.leave(FEED, "c")
        await store.beat(FEED, "d", LONG)
        assert await _ends(store) == [False, False]

    async def test_a_claim_deletes_the_mark_of_an_end(self, store: LeaseStore) -> None:
        """Who claims a partition reads it on: it has not ended."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        await _claimed(store, "a", {1: 0, 2: 0})
        await store.put(FEED, "a", [Lease(p, None, 1, ended=True) for p in (1, 2)])
        assert await _ends(store) == [True, True]
        await _claimed(store, "b", {1: 1, 2: 8})
        assert await _ends(store) == [False, True]

    async def test_of_concurrent_claimants_one_succeeds(self, store: LeaseStore) -> None:
        """Each through a handle of its own, where the store has such."""
        names = [f"instance {n}" for n in range(6)]
        partitions = range(20)
        claimed: dict[str, set[int]] = {}
        async with AsyncExitStack() as stack:
            handles: list[Any] = [store]
            if self.supports_second_handle:
                for _ in range(2):
                    second = self.second_handle(store)
                    handles.append(await stack.enter_async_context(second))

            async def compete(number: int, name: str) -> None:
                handle = handles[number % len(handles)]
                await handle.beat(FEED, name, LONG)
                claimed[name] = await _claimed(handle, name, dict.fromkeys(partitions, 0))

            async with anyio.create_task_group() as tasks:
                for number, name in enumerate(names):
                    tasks.start_soon(compete, number, name)
            for name in names:
                await store.leave(FEED, name)
        assert sorted(p for found in claimed.values() for p in found) == list(partitions)

    async def test_thousands_of_partitions_at_once(self, store: LeaseStore) -> None:
        """More than one statement takes are put with one call."""
        await store.beat(FEED, "a", LONG)
        count = 3000
        for epoch in range(2):
            assert len(await _claimed(store, "a", dict.fromkeys(range(count), epoch))) == count
        assert len(await store.put(FEED, "a", [Lease(p, None, 2) for p in range(count)])) == count
        assert set((await _owners(store)).values()) == {None}
        await store.leave(FEED, "a")
