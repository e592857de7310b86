"""What a store of leases promises, as tests."""

# ruff: noqa: D102 - the names of the tests say what is promised

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.testing.contracts.store_contract import StoreContract

FEED = FeedKey("https://service.test/feed", "shared")
OTHER = FeedKey("https://service.test/other", "shared")
LONG = 1000.0
SHORT = 0.05


async def _expired(store: LeaseStore, instance: str) -> None:
    """Wait until the heartbeat of the instance has expired by the store's own clock."""

    async def lives() -> bool:
        return any(each.name == instance and each.alive for each in await store.instances(FEED))

    while await lives():  # noqa: ASYNC110 - the store has no event for it
        await anyio.sleep(SHORT / 5)


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
        assert isinstance(store, LeaseStore)

    async def test_an_empty_store(self, store: LeaseStore) -> None:
        assert await store.instances(FEED) == []
        assert await store.leases(FEED) == {}

    async def test_who_joins_is_alive_until_it_leaves(self, store: LeaseStore) -> None:
        await store.join(FEED, "b", LONG)
        await store.join(FEED, "a", LONG)
        found = await store.instances(FEED)
        assert [(each.name, each.alive) for each in found] == [("a", True), ("b", True)]
        assert all(LONG / 2 < each.expires_in <= LONG for each in found)
        assert all(0 <= each.age < LONG for each in found)
        await store.leave(FEED, "a")
        assert [each.name for each in await store.instances(FEED)] == ["b"]

    async def test_what_an_instance_tells_is_read_by_the_others(self, store: LeaseStore) -> None:
        await store.join(FEED, "a", LONG, "follow=1 version=1.0.0")
        await store.join(FEED, "b", LONG)
        assert [each.options for each in await store.instances(FEED)] == [
            "follow=1 version=1.0.0",
            "",
        ]
        await store.renew(FEED, "a", LONG)
        await store.join(FEED, "a", LONG, "follow=0")
        assert [each.options for each in await store.instances(FEED)] == ["follow=0", ""]

    async def test_feeds_are_apart(self, store: LeaseStore) -> None:
        await store.join(FEED, "a", LONG)
        await store.claim(FEED, "a", {1: 0})
        assert await store.instances(OTHER) == []
        assert await store.leases(OTHER) == {}
        assert not await store.renew(OTHER, "a", LONG)

    async def test_a_claim_raises_the_epoch(self, store: LeaseStore) -> None:
        await store.join(FEED, "a", LONG)
        assert await store.claim(FEED, "a", {2: 0, 1: 0}) == {1: 1, 2: 1}
        leases = await store.leases(FEED)
        assert [(each.partition, each.owner, each.epoch) for each in leases.values()] == [
            (1, "a", 1),
            (2, "a", 1),
        ]
        assert not any(each.ended for each in leases.values())
        assert all(0 <= each.age < LONG for each in leases.values())
        assert await store.claim(FEED, "a", {1: 1}) == {1: 2}

    async def test_who_has_not_joined_claims_nothing(self, store: LeaseStore) -> None:
        assert await store.claim(FEED, "a", {1: 0}) == {}
        assert await store.leases(FEED) == {}

    async def test_nobody_takes_from_a_living_instance(self, store: LeaseStore) -> None:
        for name in ("a", "b"):
            await store.join(FEED, name, LONG)
        assert await store.claim(FEED, "a", {1: 0}) == {1: 1}
        assert await store.claim(FEED, "b", {1: 1, 2: 0}) == {2: 1}
        assert await store.claim(FEED, "b", {1: 0}) == {}

    async def test_what_was_released_can_be_claimed_once(self, store: LeaseStore) -> None:
        for name in ("a", "b", "c"):
            await store.join(FEED, name, LONG)
        await store.claim(FEED, "a", {1: 0, 2: 0})
        await store.release(FEED, "b", [1])
        assert (await store.leases(FEED))[1].owner == "a"
        await store.release(FEED, "a", [1, 7])
        assert (await store.leases(FEED))[1].owner is None
        assert await store.claim(FEED, "b", {1: 0}) == {}
        assert await store.claim(FEED, "b", {1: 1}) == {1: 2}
        assert await store.claim(FEED, "c", {1: 1}) == {}
        await store.leave(FEED, "b")
        assert [lease.owner for lease in (await store.leases(FEED)).values()] == [None, "a"]

    async def test_the_dead_lose_their_leases_and_cannot_renew(self, store: LeaseStore) -> None:
        await store.join(FEED, "b", LONG)
        await store.join(FEED, "a", LONG)
        await store.claim(FEED, "a", {1: 0})
        await store.renew(FEED, "a", SHORT)
        await _expired(store, "a")
        assert not await store.renew(FEED, "a", LONG)
        assert await store.claim(FEED, "a", {3: 0}) == {}
        assert (await store.leases(FEED))[1].owner == "a"
        assert await store.claim(FEED, "b", {1: 1}) == {1: 2}
        await store.join(FEED, "a", LONG)
        await store.release(FEED, "a", [1])
        assert (await store.leases(FEED))[1].owner == "b"

    async def test_who_joins_again_has_what_nobody_took(self, store: LeaseStore) -> None:
        await store.join(FEED, "a", LONG)
        await store.claim(FEED, "a", {1: 0})
        await store.renew(FEED, "a", SHORT)
        await _expired(store, "a")
        await store.join(FEED, "a", LONG)
        await store.join(FEED, "b", LONG)
        assert await store.claim(FEED, "b", {1: 1}) == {}

    async def test_renewing_extends_the_heartbeat(self, store: LeaseStore) -> None:
        assert not await store.renew(FEED, "a", LONG)
        await store.join(FEED, "a", 2 * LONG)
        assert await store.renew(FEED, "a", LONG)
        assert (await store.instances(FEED))[0].expires_in <= LONG
        assert await store.renew(FEED, "a", 3 * LONG)
        assert (await store.instances(FEED))[0].expires_in > 2 * LONG

    async def test_every_change_of_leases_shows_in_the_heartbeat(self, store: LeaseStore) -> None:
        async def changes() -> int:
            return (await store.instances(FEED))[0].changes

        await store.join(FEED, "a", LONG)
        seen = [await changes()]
        await store.claim(FEED, "a", {1: 0})
        seen.append(await changes())
        await store.end(FEED, "a", [1])
        seen.append(await changes())
        await store.release(FEED, "a", [1])
        seen.append(await changes())
        assert sorted(set(seen)) == seen
        await store.renew(FEED, "a", LONG)
        assert await changes() == seen[-1]

    async def test_the_number_of_changes_does_not_come_again(self, store: LeaseStore) -> None:
        """Whoever compares it would take the second life of an instance for the first one."""
        seen = set()
        for _ in range(5):
            await store.join(FEED, "a", LONG)
            seen.add((await store.instances(FEED))[0].changes)
            await store.leave(FEED, "a")
        assert len(seen) == 5

    async def test_ends_hold_until_all_others_are_gone(self, store: LeaseStore) -> None:
        for name in ("a", "b"):
            await store.join(FEED, name, LONG)
        await store.claim(FEED, "a", {1: 0, 2: 0})
        await store.end(FEED, "b", [1])
        await store.end(FEED, "a", [2])
        assert [lease.ended for lease in (await store.leases(FEED)).values()] == [False, True]
        await store.leave(FEED, "a")
        await store.join(FEED, "c", LONG)
        assert (await store.leases(FEED))[2].ended
        await store.leave(FEED, "b")
        await store.leave(FEED, "c")
        await store.join(FEED, "d", LONG)
        assert not (await store.leases(FEED))[2].ended

    async def test_a_claim_deletes_the_mark_of_an_end(self, store: LeaseStore) -> None:
        for name in ("a", "b"):
            await store.join(FEED, name, LONG)
        epochs = await store.claim(FEED, "a", {1: 0, 2: 0})
        await store.end(FEED, "a", [1, 2])
        await store.release(FEED, "a", [1, 2])
        assert all(lease.ended for lease in (await store.leases(FEED)).values())
        await store.claim(FEED, "b", {1: epochs[1], 2: epochs[2] + 7})
        assert [lease.ended for lease in (await store.leases(FEED)).values()] == [False, True]

    async def test_of_concurrent_claimants_one_succeeds(self, store: LeaseStore) -> None:
        """Each through a handle of its own, where the store has such."""
        names = [f"instance {n}" for n in range(6)]
        partitions = range(20)
        claimed: dict[str, dict[int, int]] = {}
        async with AsyncExitStack() as stack:
            handles: list[Any] = [store]
            if self.supports_second_handle:
                for _ in range(2):
                    second = self.second_handle(store)
                    handles.append(await stack.enter_async_context(second))

            async def compete(number: int, name: str) -> None:
                handle = handles[number % len(handles)]
                await handle.join(FEED, name, LONG)
                claimed[name] = await handle.claim(FEED, name, dict.fromkeys(partitions, 0))

            async with anyio.create_task_group() as tasks:
                for number, name in enumerate(names):
                    tasks.start_soon(compete, number, name)
            for name in names:
                await store.leave(FEED, name)
        won = [partition for found in claimed.values() for partition in found]
        assert sorted(won) == list(partitions)

    async def test_thousands_of_partitions_at_once(self, store: LeaseStore) -> None:
        await store.join(FEED, "a", LONG)
        count = 3000
        assert len(await store.claim(FEED, "a", dict.fromkeys(range(count), 0))) == count
        assert len(await store.claim(FEED, "a", dict.fromkeys(range(count), 1))) == count
        await store.release(FEED, "a", range(count))
        assert {lease.owner for lease in (await store.leases(FEED)).values()} == {None}
        await store.leave(FEED, "a")
