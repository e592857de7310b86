"""What one instance sees of the others: each change of their leases."""

from __future__ import annotations

import pytest

from feedapi_client import FeedInfo, MemoryCursorStore, Partition, Position
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
