"""What one instance sees of the others: each change of their leases."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from feedapi_client import FeedInfo, FeedKey, MemoryCursorStore, Partition, Position
from feedapi_client.sharing.coordinator import BOOTSTRAP
from tests.sharing.coordinators import KEY, instance

pytestmark = pytest.mark.anyio


async def test_who_bootstraps_leaves_and_joins_again_is_seen(anyio_backend: str) -> None:
    """It claims once in each of its two lives: what was seen of the first is not the second."""
    store = MemoryCursorStore()
    info = FeedInfo("v2-draft", {id: Partition(id) for id in range(2)})
    await store.save(KEY, {id: Position("a") for id in range(2)})
    other = "instance 2"
    await store.join(KEY, other, 3600)
    await store.claim(KEY, other, {BOOTSTRAP: 0})
    one = await instance(store, 1, info)
    await one._look()
    await store.leave(KEY, other)
    await store.join(KEY, other, 3600)
    (free,) = {0, 1} - one._owned.keys()
    await store.claim(KEY, other, {free: 0})
    await one._look()
    assert one.owner(free) == other


async def test_a_claim_that_the_heartbeat_did_not_survive_counts_for_nothing(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer comes when another instance has claimed the same, after the heartbeat expired."""
    store, other = MemoryCursorStore(), "instance 2"
    info = FeedInfo("v2-draft", {0: Partition(0)})
    await store.save(KEY, {0: Position("a")})
    one = await instance(store, 1, info)
    claim = store.claim

    async def claimed_late(feed: FeedKey, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        answer = await claim(feed, name, epochs)
        if name == one.name:
            await store.join(KEY, one.name, -1)
            await store.join(KEY, other, 3600)
            assert await claim(KEY, other, {0: 1}) == {0: 2}
            await one._membership._renew()  # it has joined again
        return answer

    monkeypatch.setattr(store, "claim", claimed_late)
    await one._look()
    assert not one._owned
    await one._look()
    assert one.owner(0) == other
