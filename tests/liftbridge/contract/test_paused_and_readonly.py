"""Paused and read-only partitions, on both brokers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from feedapi_client.liftbridge import (
    AckTimeoutError,
    LiftbridgeApi,
    LiftbridgePublisher,
    Message,
    RelayReader,
    StreamPausedError,
    StreamReadonlyError,
)
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.contract.reading import FORMATS, KEY, read, relayed, save, store_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def collect(messages: AsyncGenerator[Message, None], offsets: list[int]) -> None:
    async for message in messages:
        offsets.append(message.offset)  # noqa: PERF401 - what came before an error counts


async def test_a_paused_partition_has_an_error_of_its_own_and_a_subscription_can_wake_it(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    await api.pause_stream(name)
    assert (await api.metadata(name)).partitions[0].paused
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await api.partition_metadata(name)
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await read(api.subscribe(name), 1)
    with pytest.raises(AckTimeoutError):
        await publisher.publish(name, b"lost", timeout=0.2)
    assert await read(api.subscribe(name, resume=True), 3) == [0, 1, 2]
    assert (await api.partition_metadata(name)).newest_offset == 2


async def test_a_live_subscription_ends_with_that_error_when_the_partition_is_paused(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish(name, b"x")
    async with aclosing(api.subscribe(name)) as messages:
        assert (await anext(messages)).offset == 0
        await api.pause_stream(name)
        with pytest.raises(StreamPausedError):
            await anext(messages)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_that_is_exactly_once_wakes_a_paused_partition(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await api.pause_stream(name)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    await api.pause_stream(name)
    await save(store, 2, 3)
    await api.pause_stream(name)
    assert await relayed(api, name, 3) == [1, 2, 3]


async def test_a_subscription_to_a_read_only_partition_says_so_after_its_last_message(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    async with aclosing(api.subscribe(name)) as messages:
        live = [(await anext(messages)).offset]
        await api.set_readonly(name)
        with pytest.raises(StreamReadonlyError, match="all its messages were read"):
            live += [message.offset async for message in messages]
    assert (await api.partition_metadata(name)).readonly
    for start, expected in (("earliest", [0, 1, 2]), (3, []), ("new", [])):
        found: list[int] = []
        with pytest.raises(StreamReadonlyError):
            await collect(api.subscribe(name, start), found)  # type: ignore[arg-type]
        assert found == expected
    with pytest.raises(StreamReadonlyError):
        await read(api.subscribe(name, until=7), 4)
    # An end that is reached is no error.
    assert [message.offset async for message in api.subscribe(name, until="latest")] == [0, 1, 2]
    await api.set_readonly(name, False)
    await publisher.publish(name, b"y")
    assert await read(api.subscribe(name, "latest"), 1) == [3]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_reader_of_a_partition_that_becomes_read_only_does_not_end_as_if_all_were_well(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    async with aclosing(RelayReader(api, name).batches()) as batches:
        assert len((await anext(batches)).events) == 2
        await api.set_readonly(name)
        with pytest.raises(StreamReadonlyError):
            await anext(batches)


async def test_a_relay_to_a_read_only_partition_ends_with_an_error_of_its_own(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, "batch")
    await store.load(KEY)
    await api.set_readonly(name)
    with pytest.raises(StreamReadonlyError, match="partition 0 is read-only"):
        await save(store, 1, 1)
    with pytest.raises(StreamReadonlyError):
        await store.load(KEY)
