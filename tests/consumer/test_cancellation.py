"""R20: whatever is cancelled natively, on asyncio, the consumer goes on and saves what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import Batch, FeedKey, MemoryCursorStore, Position, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    consume,
    fill,
    n_of,
    next_batch,
    numbers,
)

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class LateReplies(RecordingStore):
    """A save takes effect at once, and returns later."""

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        await super().save(feed, positions, transaction=transaction)
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


@pytest.mark.parametrize("steps", range(5))
async def test_r20_a_cancelled_commit_in_memory_is_saved_or_not_begun(
    serve: Callable[..., Publisher], steps: int
) -> None:
    """It never suspends, so that it needs no task of its own."""
    publisher = serve(1, page_size=5)
    fill(publisher, 15)
    store = MemoryCursorStore()
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        first = await next_batch(batches)
        await cancelled_after(steps, first.commit())
        stored = (await store.load(consumer.key))[0].cursor
        assert stored == (first.cursor if steps else "_first")
        second = await next_batch(batches)
        await second.commit()
        assert (await store.load(consumer.key))[0].cursor == second.cursor
    seen = n_of(first.events) + n_of(second.events)
    assert seen == list(range(len(seen)))


@pytest.mark.parametrize("steps", range(1, 12))
async def test_r20_a_commit_that_is_cancelled_is_saved_and_the_next_one_is_not_fenced(
    serve: Callable[..., Publisher], steps: int
) -> None:
    publisher = serve(1, page_size=5)
    fill(publisher, 15)
    store = LateReplies()
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        first = await next_batch(batches)
        await cancelled_after(steps, first.commit())
        assert await store.cursors() == {0: first.cursor}
        second = await next_batch(batches)
        await second.commit()
    seen = n_of(first.events) + n_of(second.events)
    assert seen == list(range(len(seen)))
    assert await store.cursors() == {0: second.cursor}


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21])
async def test_r20_with_sqlite_no_save_goes_through_behind_the_callers_back(
    serve: Callable[..., Publisher], tmp_path: Path, steps: int
) -> None:
    publisher = serve(1, page_size=2)
    fill(publisher, 20)
    store = SQLiteCursorStore(tmp_path / "cursors.db")
    seen: list[int] = []
    async with consume(publisher, store=store, follow=False) as consumer:
        async for batch in consumer.batches():
            seen += n_of(batch.events)
            await cancelled_after(steps, batch.commit())
            await batch.commit()
            assert (await store.load(consumer.key))[0].cursor == batch.cursor
    assert seen == list(range(20))


@pytest.mark.parametrize("steps", range(1, 12))
async def test_r20_an_iteration_that_is_cancelled_during_a_save_goes_on(
    serve: Callable[..., Publisher], steps: int
) -> None:
    publisher = serve(1, page_size=5)
    numbers(publisher, 0, range(5))
    children = publisher.split(0)
    for number, child in enumerate(children):
        numbers(publisher, child, [100 + number])
    store = LateReplies()
    seen: list[int] = []
    async with consume(publisher, store=store, follow=False) as consumer:
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
    assert seen[:5] == list(range(5))
    assert sorted(seen) == [*range(5), *(100 + number for number in range(len(children)))]


@pytest.mark.parametrize("way", ["stopped", "left"])
@pytest.mark.parametrize("steps", range(12))
async def test_r20_a_cancellation_while_the_consumer_ends_is_not_lost(
    serve: Callable[..., Publisher], steps: int, way: str
) -> None:
    """anyio took it for its own when it came in the very step in which the tasks were cancelled."""
    publisher = serve(3, page_size=5)
    fill(publisher, 30)
    ended = asyncio.Event()

    async def application() -> None:
        async with consume(publisher, follow=True) as consumer:
            batches = consumer.batches()
            for _ in range(6):
                await (await next_batch(batches)).commit()
            if way == "stopped":
                consumer.stop()
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
