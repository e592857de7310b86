"""A heartbeat waits for nothing else that an instance writes."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from feedapi_client import FeedKey, Share, SQLiteCursorStore
from feedapi_client.sharing.membership import Membership
from feedapi_client.stores import Lease


@pytest.mark.anyio
async def test_a_heartbeat_does_not_wait_for_a_large_claim(tmp_path: Path) -> None:
    store, key = SQLiteCursorStore(tmp_path / "cursors.db"), FeedKey("http://feed/feed")
    member = Membership(Share(), store, key, "a", "", lost=pytest.fail, failed=pytest.fail)
    await member.beat()
    ended = []

    async def claim() -> None:
        assert len(await member.put([Lease(p, "a", 1) for p in range(5_000)])) == 5_000
        ended.append("claim")

    async def beat() -> None:
        await member.beat()
        ended.append("beat")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim)
        tasks.start_soon(beat)
    assert ended == ["beat", "claim"]
    await store.aclose()
