"""R20 after an error the iteration goes on or raises it again. R18 errors of one cursor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
import pytest

from feedapi_client import FeedError, FencedError, Position, StoreError
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SHORT,
    RecordingStore,
    consume,
    n_of,
    numbers,
    read_n,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio


class DataError(Exception):
    """The error of a database driver (PEP 249) for a value that it can't store."""


class PickyStore(RecordingStore):
    """Cannot store some cursors, as PostgreSQL can't store a NUL."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    async def save(
        self, feed: Any, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        if self.refused.intersection(position.cursor for position in positions.values()):
            raise DataError("a string literal cannot contain NUL (0x00) characters")
        await super().save(feed, positions, transaction=transaction)


@pytest.mark.parametrize("way", ["events", "batches"])
@pytest.mark.parametrize("status", [401, 402, 405, 410])
async def test_r20_an_error_of_a_partition_is_raised_again(
    publisher: Publisher, status: int, way: str
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, retry=SHORT) as consumer:
        iterator: AsyncIterator[Any] = aiter(consumer) if way == "events" else consumer.batches()
        await take(iterator)
        publisher.fail(status, times=None)
        with pytest.raises(FeedError) as caught:
            await take(iterator)
        for _ in range(3):
            with pytest.raises(type(caught.value)) as again:
                await take(iterator)
            assert again.value is caught.value


async def test_r20_a_store_that_fails_once_costs_no_event(
    publisher: Publisher, store: RecordingStore
) -> None:
    """The iteration goes on where the error was: the commit is tried again."""
    numbers(publisher, 0, range(20))
    failures = 0

    async def fail_twice(_: Mapping[int, Position]) -> None:
        nonlocal failures
        failures += 1
        if failures in (3, 4):
            raise ConnectionError("gone")

    store.before_save = fail_twice
    seen: list[int] = []
    async with consume(publisher, store=store, follow=False) as consumer:
        events = aiter(consumer)
        while True:
            try:
                seen += n_of(await take(events))
            except StoreError:
                continue
            except StopAsyncIteration:
                break
    assert seen == list(range(20))
    assert failures >= 5
    assert (await store.cursors())[0] == publisher.end_cursor(0)


async def test_r20_a_consumer_that_was_fenced_says_so_each_time(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(10))
    async with (
        consume(publisher, store=store) as consumer,
        consume(publisher, store=store) as other,
    ):
        events = aiter(consumer)
        await take(events, 10)
        batch = (await take(other.batches()))[0]
        await batch.commit()
        for _ in range(3):
            with pytest.raises(FencedError):
                await take(events)


async def test_r20_a_store_that_can_not_be_loaded_is_an_error_until_it_can(
    publisher: Publisher, store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(publisher, 0, [0])
    load = store.load
    broken = True

    async def fail(feed: Any) -> dict[int, Position]:
        if broken:
            raise ConnectionError("gone")
        return await load(feed)

    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
        monkeypatch.setattr(store, "load", fail)
        numbers(publisher, 0, [1])
        events = aiter(consumer)
        for _ in range(3):
            with pytest.raises(StoreError):
                await take(events)
        broken = False
        assert n_of(await take(events)) == [1]


@pytest.mark.parametrize("way", ["events", "handler"])
async def test_r18_a_cursor_that_can_not_be_stored_parks_its_partition_only(
    serve: Callable[..., Publisher], way: str
) -> None:
    publisher, store = serve(2), PickyStore()
    store.refused.add(numbers(publisher, 0, [0]))
    async with consume(publisher, store=store, on_error="park") as consumer:
        seen: list[int] = []

        async def handle(batch: Any) -> None:
            seen.extend(n_of(batch.events))

        async def read() -> None:
            if way == "handler":
                await consumer.run(handle)
            async for event in consumer:
                seen.extend(n_of([event]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await wait_until(lambda: consumer.status()[0].state == "parked")
            numbers(publisher, 1, [1])
            await wait_until(lambda: 1 in seen)
            numbers(publisher, 1, [2])
            await wait_until(lambda: 2 in seen)
            tasks.cancel_scope.cancel()
        assert "refuses the value" in (consumer.status()[0].error or "")


async def test_r18_a_cursor_that_can_not_be_stored_is_raised_without_park(
    publisher: Publisher,
) -> None:
    store = PickyStore()
    store.refused.add(numbers(publisher, 0, [0]))
    async with consume(publisher, store=store) as consumer:
        events = aiter(consumer)
        await take(events)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"partition 0: .*refuses the value"):
                await take(events)


async def test_r18_an_outage_of_the_store_parks_nobody(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])

    async def fail(positions: Mapping[int, Position]) -> None:
        if positions[0].cursor != "_first":
            raise ConnectionError("gone")

    store.before_save = fail
    async with consume(publisher, store=store, on_error="park") as consumer:
        events = aiter(consumer)
        await take(events)
        with pytest.raises(StoreError):
            await take(events)
        assert consumer.status()[0].state != "parked"


@pytest.mark.parametrize("cursor", ["c" * 100_000, "\ud800"], ids=["long", "surrogate"])
async def test_r18_a_cursor_that_can_not_be_sent_parks_its_partition_only(
    serve: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch, cursor: str
) -> None:
    publisher, store = serve(2), RecordingStore()
    numbers(publisher, 1, [1])

    async def load(feed: Any) -> dict[int, Position]:
        return {0: Position(cursor), 1: Position("_first")}

    async def save(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(store, "load", load)
    monkeypatch.setattr(store, "save", save)
    async with consume(publisher, store=store, on_error="park") as consumer:
        assert n_of(await take(aiter(consumer))) == [1]
        await wait_until(lambda: consumer.status()[0].state == "parked")
