"""R11: a publisher is rolled back after a split, as an application and its operator see it."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client import LineageError, Position, RetryPolicy
from feedapi_client.status import ProblemName
from tests.consumer.helpers import LocalFeed, read_n, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

IMPATIENT = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)


async def split_and_read() -> LocalFeed:
    """Partition 0, split by its cursors into 10."""
    feed = LocalFeed()
    feed.numbers(0, *range(6))
    assert await feed.read() == [*range(6)]
    feed.split(0, into=(10,), method="cursor-from")
    feed.numbers(10, 6, 7)
    assert await feed.read() == [6, 7]
    return feed


def roll_back(feed: LocalFeed) -> None:
    feed.remove(10)
    feed.add(0)


def roll_forward(feed: LocalFeed) -> None:
    feed.remove(0)
    feed.add(10, cursor_from=[0])


async def test_r11_a_rollback_is_a_problem_with_a_name_and_nobody_is_ready() -> None:
    feed = await split_and_read()
    async with feed.running(retry=IMPATIENT) as reader:
        health = reader.consumer.health
        await wait_until(lambda: health().ready)
        roll_back(feed)
        await wait_until(lambda: not health().ready)
        problems = {p.name: p for p in health().problems}
        assert problems[ProblemName.ROLLED_BACK].partition == 0
        assert "feedapi cursors restore" in problems[ProblemName.ROLLED_BACK].text
        assert health().live
        await wait_until(lambda: reader.reports("as open again"))
        roll_forward(feed)
        await wait_until(lambda: health().ready)
    assert (await feed.store.statuses())[0] == "superseded"


async def test_r11_without_follow_a_rollback_is_an_error() -> None:
    feed = await split_and_read()
    roll_back(feed)
    before = await feed.store.positions()
    with pytest.raises(LineageError, match="listed as open again") as caught:
        await feed.read(retry=IMPATIENT)
    assert caught.value.partition == 0
    assert await feed.store.positions() == before


async def test_r11_without_follow_a_discovery_that_lags_is_waited_out() -> None:
    feed = await split_and_read()
    feed.numbers(10, 8)
    roll_back(feed)
    async with feed.consume(follow=False) as consumer, anyio.create_task_group() as tasks:

        async def forward() -> None:
            await wait_until(lambda: consumer.health().problems)
            roll_forward(feed)

        tasks.start_soon(forward)
        assert await read_n(consumer) == [8]


async def test_r11_without_follow_one_that_is_open_again_is_read_and_then_an_error() -> None:
    feed = LocalFeed()
    feed.numbers(0, *range(6))
    feed.close(0)
    assert await feed.read() == [*range(6)]
    feed.reopen(0)
    with pytest.raises(LineageError, match="although it was closed and drained"):
        await feed.read(retry=IMPATIENT)
    drained = (await feed.store.positions())[0]
    await feed.store.replace(feed.consume().key, {0: Position(drained.cursor)})
    assert await feed.read(retry=IMPATIENT) == []
