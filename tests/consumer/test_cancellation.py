"""R20: whatever is cancelled natively, on asyncio, the consumer goes on and saves what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import Batch, FeedKey, MemoryCursorStore, Position, SQLiteCursorStore
from tests.consumer.helpers import SAFETY_LIMIT, LocalFeed, RecordingStore, n_of

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class LateReplies(RecordingStore):
    """A save takes effect at once, and returns later."""

    async def save(self, feed: FeedKey, positions: Mapping[int, Position], **more: Any) -> None:
        await super().save(feed, positions, **more)
        for _ in range(5):
            await asyncio.sleep(0)


async def cancelled_after(steps: int, call: Awaitable[Any]) -> bool:
    """Run the call in a task of its own, and cancel it. Return whether that ended it."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError, StopAsyncIteration):
        await task
    return task.cancelled()


def feed_of(count: int, store: Any = None, *, partitions: int = 1, page: int = 5) -> LocalFeed:
    feed = LocalFeed(partitions, store=store, page_size=page)
    feed.fill(0, count)
    return feed


@pytest.mark.parametrize(
    ("store", "steps"),
    [
        # It never suspends, so that it needs no task of its own.
        *((MemoryCursorStore, steps) for steps in range(5)),
        *((LateReplies, steps) for steps in range(1, 12)),
    ],
)
async def test_r20_a_cancelled_commit_is_saved_or_not_begun_and_the_next_one_is_not_fenced(
    store: type[MemoryCursorStore], steps: int
) -> None:
    feed = feed_of(15, store())
    async with feed.open(limit={"max_batch_bytes": 1}) as reader:
        key = reader.consumer.key
        first = await reader.batch()
        await cancelled_after(steps, first.commit())
        assert (await feed.store.load(key))[0].cursor == (first.cursor if steps else "_first")
        second = await reader.batch()
        await second.commit()
        assert (await feed.store.load(key))[0].cursor == second.cursor
    seen = n_of(first.events) + n_of(second.events)
    assert seen == [*range(len(seen))]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21])
async def test_r20_with_sqlite_no_save_goes_through_behind_the_callers_back(
    tmp_path: Path, steps: int
) -> None:
    feed, seen = feed_of(20, SQLiteCursorStore(tmp_path / "cursors.db"), page=2), []
    async with feed.consume(follow=False) as consumer:
        async for batch in consumer.batches():
            seen += n_of(batch.events)
            await cancelled_after(steps, batch.commit())
            await batch.commit()
            assert (await feed.store.load(consumer.key))[0].cursor == batch.cursor
    assert seen == [*range(20)]


@pytest.mark.parametrize("steps", range(1, 12))
async def test_r20_an_iteration_that_is_cancelled_during_a_save_goes_on(steps: int) -> None:
    feed, seen = feed_of(5, LateReplies()), []
    children = feed.split(0)
    for child in children:
        feed.numbers(child, 100 + child)
    async with feed.consume(follow=False) as consumer:
        batches = consumer.batches()
        held: list[Batch] = []

        async def take() -> None:
            held.append(await anext(batches))

        for _ in range(100):
            await cancelled_after(steps, take())
            while held:
                seen += n_of(held[0].events)
                await held.pop().commit()
        async for batch in consumer.batches():
            seen += n_of(batch.events)
            await batch.commit()
    assert seen[:5] == [*range(5)]
    assert sorted(seen) == [*range(5), *(100 + child for child in children)]


@pytest.mark.parametrize("way", ["stopped", "left"])
@pytest.mark.parametrize("steps", range(12))
async def test_r20_a_cancellation_while_the_consumer_ends_is_not_lost(steps: int, way: str) -> None:
    """anyio took it for its own when it came in the very step in which the tasks were cancelled."""
    feed, ended = feed_of(30, partitions=3), asyncio.Event()

    async def application() -> None:
        async with feed.open(limit={"max_batch_bytes": 1}) as reader:
            for _ in range(6):
                await reader.commit()
            if way == "stopped":
                reader.consumer.stop()
            ended.set()
        await asyncio.sleep(SAFETY_LIMIT)  # what was cancelled does not come to an end here

    task = asyncio.ensure_future(application())
    await ended.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert done
    assert task.cancelled()
