"""What a store of leases promises, as tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from feedapi_client.stores.leases import Lease, LeaseStore
from feedapi_client.testing.contracts.administration import MOVED
from feedapi_client.testing.contracts.cursors import FEED, StoreContract

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

    async def test_who_joins_is_alive_until_it_leaves(self, store: LeaseStore) -> None:
        """Sorted by name, with an age and the time that is left by the store's clock."""
        assert not any(await store.look(FEED))
        assert not await store.beat(FEED, "b", LONG)
        assert not await store.beat(FEED, "a", LONG)
        found = (await store.look(FEED)).instances
        assert [(each.name, each.alive) for each in found] == [("a", True), ("b", True)]
        assert all(LONG / 2 < each.expires_in <= LONG for each in found)
        assert all(0 <= each.age < LONG for each in found)
        await store.leave(FEED, "a")
        assert [each.name for each in (await store.look(FEED)).instances] == ["b"]

    async def test_the_last_beat_counts(self, store: LeaseStore) -> None:
        """It may be a shorter one. It says whether the instance was alive."""
        await store.beat(FEED, "a", 2 * LONG)
        assert await store.beat(FEED, "a", LONG)
        assert (await store.look(FEED)).instances[0].expires_in <= LONG
        assert await store.beat(FEED, "a", 3 * LONG)
        assert (await store.look(FEED)).instances[0].expires_in > 2 * LONG

    async def test_what_an_instance_tells_when_it_joins_is_read_by_the_others(
        self, store: LeaseStore
    ) -> None:
        await store.beat(FEED, "a", LONG, "follow=1 version=1.0.0")
        await store.beat(FEED, "b", LONG)
        await store.beat(FEED, "a", SHORT)
        options = [each.options for each in (await store.look(FEED)).instances]
        assert options == ["follow=1 version=1.0.0", ""]
        await _expired(store, "a")
        await store.beat(FEED, "a", LONG, "follow=0")
        assert [each.options for each in (await store.look(FEED)).instances] == ["follow=0", ""]

    async def test_feeds_are_apart(self, store: LeaseStore) -> None:
        await store.beat(FEED, "a", LONG)
        await _claimed(store, "a", {1: 0})
        assert not any(await store.look(MOVED))
        assert not await store.put(MOVED, "a", [Lease(1, "a", 1)])
        await store.leave(MOVED, "a")
        assert await _owners(store) == {1: "a"}

    async def test_a_claim_raises_the_epoch_by_one(self, store: LeaseStore) -> None:
        """Of any other epoch it is refused, by being left out: somebody else was faster."""
        assert not await _claimed(store, "a", {1: 0})  # without a heartbeat it could never expire
        await store.beat(FEED, "a", LONG)
        for _ in range(2):  # the first answer may have been lost
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

    async def test_nobody_takes_from_a_living_instance(self, store: LeaseStore) -> None:
        """Two would read one partition, and handle its events twice."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        assert await _claimed(store, "a", {1: 0}) == {1}
        assert await _claimed(store, "b", {1: 1, 2: 0}) == {2}
        for lease in (Lease(1, "b", 1), Lease(1, None, 1), Lease(1, "b", 1, ended=True)):
            assert not await store.put(FEED, "b", [lease])
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

    async def test_the_dead_lose_what_others_take(self, store: LeaseStore) -> None:
        """Who joins again has what nobody took, and is told that it was dead."""
        await store.beat(FEED, "b", LONG)
        await store.beat(FEED, "a", LONG)
        await _claimed(store, "a", {1: 0, 2: 0})
        await store.beat(FEED, "a", SHORT)
        await _expired(store, "a")
        assert not await _claimed(store, "a", {3: 0})
        assert await _owners(store) == {1: "a", 2: "a"}
        assert await _claimed(store, "b", {1: 1}) == {1}
        assert not await store.beat(FEED, "a", LONG)
        assert not await store.put(FEED, "a", [Lease(1, None, 1)])
        assert not await _claimed(store, "b", {2: 1})
        assert await _owners(store) == {1: "b", 2: "a"}

    async def test_a_look_shows_what_has_changed_since_the_last_one(
        self, store: LeaseStore
    ) -> None:
        """Also of an instance that left and joined again."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        seen = [await store.look(FEED)]
        for claimed in ({1: 0}, {1: 1}):
            await store.leave(FEED, "a")
            await store.beat(FEED, "a", LONG)
            seen.append(await store.look(FEED))
            await _claimed(store, "a", claimed)
            await _claimed(store, "b", {2: 0})
            seen.append(await store.look(FEED))
            await store.put(FEED, "b", [Lease(2, None, 1)])
            now = await store.look(FEED)
            for last in seen:
                assert (await store.look(FEED, last)).leases == now.leases

    async def test_ends_hold_until_all_others_are_gone(self, store: LeaseStore) -> None:
        """Or until somebody claims the partition, and reads it on."""
        for name in ("a", "b"):
            await store.beat(FEED, name, LONG)
        await _claimed(store, "a", {1: 0, 2: 0})
        assert await store.put(FEED, "a", [Lease(p, None, 1, ended=True) for p in (1, 2)])
        assert await _ends(store) == [True, True]
        await _claimed(store, "b", {1: 1, 2: 8})
        assert await _ends(store) == [False, True]
        await store.leave(FEED, "a")
        await store.beat(FEED, "c", LONG)
        assert await _ends(store) == [False, True]
        await store.leave(FEED, "b")
        await store.leave(FEED, "c")
        await store.beat(FEED, "d", LONG)
        assert await _ends(store) == [False, False]

    async def test_of_concurrent_claimants_one_succeeds(self, store: LeaseStore) -> None:
        """Each through a handle of its own, where the store has such. More than a statement."""
        names = [f"instance {n}" for n in range(6)]
        partitions = range(3_000)
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
        assert set((await _owners(store)).values()) == {None}
