"""R20 after an error the iteration goes on or raises it again. R18 errors of one cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from feedapi_client import FeedError, FencedError, Position, StoreError
from tests.consumer.helpers import SHORT, LocalFeed, RecordingStore, n_of, read_n, take, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class DataError(Exception):
    """The error of a database driver (PEP 249) for a value that it can't store."""


class PickyStore(RecordingStore):
    """Cannot store some cursors, as PostgreSQL can't store a NUL."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    async def save(self, feed: Any, positions: Mapping[int, Position], **more: Any) -> None:
        if self.refused.intersection(position.cursor for position in positions.values()):
            raise DataError("a string literal cannot contain NUL (0x00) characters")
        await super().save(feed, positions, **more)


@pytest.mark.parametrize("way", ["events", "batches"])
@pytest.mark.parametrize("status", [401, 402, 405, 410])
async def test_r20_an_error_of_a_partition_is_raised_again(status: int, way: str) -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    async with feed.open(retry=SHORT) as reader:
        iterator = getattr(reader, way)
        await take(iterator)
        feed.fail(status, times=None)
        with pytest.raises(FeedError) as caught:
            await take(iterator)
        for _ in range(3):
            with pytest.raises(type(caught.value)) as again:
                await take(iterator)
            assert again.value is caught.value


async def test_r20_a_store_that_fails_once_costs_no_event() -> None:
    """The iteration goes on where the error was: the commit is tried again."""
    feed, failures, seen = LocalFeed(), 0, []
    feed.numbers(0, *range(20))

    async def fail_twice(_: object) -> None:
        nonlocal failures
        failures += 1
        if failures in (3, 4):
            raise ConnectionError("gone")

    feed.store.before_save = fail_twice
    async with feed.open(follow=False, limit={"max_batch_bytes": 1}) as reader:
        while True:
            try:
                seen += await reader.take()
            except StoreError:
                continue
            except StopAsyncIteration:
                break
    assert seen == [*range(20)]
    assert failures >= 5
    assert (await feed.store.cursors())[0] == feed.end_cursor(0)


async def test_r20_a_consumer_that_was_fenced_says_so_each_time() -> None:
    feed = LocalFeed()
    feed.numbers(0, *range(10))
    async with feed.open() as reader, feed.open() as other:
        await reader.take(10)
        await other.commit()
        for _ in range(3):
            with pytest.raises(FencedError):
                await reader.take()


async def test_r20_a_store_that_can_not_be_loaded_is_an_error_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)

    async def fail(_: object) -> dict[int, Position]:
        raise ConnectionError("gone")

    async with feed.open(follow=False) as reader:
        await read_n(reader.consumer)
        feed.numbers(0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(feed.store, "load", fail)
            for _ in range(3):
                with pytest.raises(StoreError):
                    await reader.take()
        assert await reader.take() == [1]


@pytest.mark.parametrize("way", ["events", "handler"])
@pytest.mark.parametrize("parks", [True, False])
async def test_r18_a_cursor_that_can_not_be_stored_parks_its_partition_only_or_is_raised(
    way: str, parks: bool
) -> None:
    feed, seen = LocalFeed(2, store=(store := PickyStore())), []
    store.refused.add(feed.numbers(0, 0))

    async def handle(batch: Any) -> None:
        seen.extend(n_of(batch.events))

    async def read() -> None:
        if way == "handler":
            await reader.consumer.run(handle)
        async for event in reader.consumer:
            seen.extend(n_of([event]))

    if not parks:
        async with feed.open() as reader:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"partition 0: .*refuses the value"):
                    await read()
        return
    async with feed.open(on_error="park") as reader, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await reader.until("parked")
        for n in (1, 2):
            feed.numbers(1, n)
            await wait_until(lambda n=n: n in seen)
        assert "refuses the value" in (reader.consumer.status()[0].error or "")
        tasks.cancel_scope.cancel()


async def test_r18_an_outage_of_the_store_parks_nobody() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)

    async def fail(positions: Mapping[int, Position]) -> None:
        if positions[0].cursor != "_first":
            raise ConnectionError("gone")

    feed.store.before_save = fail
    async with feed.open(on_error="park") as reader:
        await reader.take()
        with pytest.raises(StoreError):
            await reader.take()
        assert reader.state() != "parked"


@pytest.mark.parametrize("cursor", ["c" * 100_000, "\ud800"], ids=["long", "surrogate"])
async def test_r18_a_cursor_that_can_not_be_sent_parks_its_partition_only(
    monkeypatch: pytest.MonkeyPatch, cursor: str
) -> None:
    feed = LocalFeed(2)
    feed.numbers(1, 1)

    async def load(_: object) -> dict[int, Position]:
        return {0: Position(cursor), 1: Position("_first")}

    async def save(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(feed.store, "load", load)
    monkeypatch.setattr(feed.store, "save", save)
    async with feed.open(on_error="park") as reader:
        assert await reader.take() == [1]
        await reader.until("parked")
