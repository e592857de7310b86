"""What sharing costs: 10 instances on a thousand partitions, and what a change is to the others."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from feedapi_client import FeedKey, Limits, Share, SQLiteCursorStore
from feedapi_client.sharing.membership import Membership
from feedapi_client.stores import Lease
from feedapi_client.testing import Publisher
from tests.sharing.fleet import fleet
from tests.testing.virtual_time import run_in_virtual_time


@pytest.mark.slow
def test_ten_instances_divide_a_thousand_partitions_in_one_round() -> None:
    async def test() -> None:
        count = 10
        async with fleet(Publisher(1_000)) as instances:
            limits = Limits(poll_interval=100, max_poll_interval=100)
            await instances.balanced(*(instances.start(limits=limits) for _ in range(count)))
            started = instances.store.taken()
            assert started["claim"] == count + 1  # one for the first start
            assert started["release"] == 0
            assert started["load"] <= 5 * count

    run_in_virtual_time(test, "asyncio")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_change_is_read_once_by_each(backend: str) -> None:
    async def test() -> None:
        async with fleet(Publisher(6)) as instances:
            members = [instances.start() for _ in range(3)]
            await instances.balanced(*members)
            instances.store.taken()
            await instances.stop(members.pop())
            await instances.balanced(*members)
            calls = instances.store.taken()
            assert calls["claim"] == 2
            assert calls["load"] <= 4

    run_in_virtual_time(test, backend)


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
