"""Paused and read-only partitions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from feedapi_client.liftbridge import (
    AckTimeoutError,
    Message,
    RelayReader,
    StreamPausedError,
    StreamReadonlyError,
)
from tests.liftbridge.broker import Broker
from tests.liftbridge.ledgers import (
    FORMATS,
    KEY,
    offsets,
    open_ledger,
    read_relayed,
    save,
    store_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("impatient")]


async def collect(messages: AsyncGenerator[Message, None], offsets: list[int]) -> None:
    async for message in messages:
        offsets.append(message.offset)  # noqa: PERF401 - what came before an error counts


async def test_a_paused_partition_has_an_error_of_its_own_and_a_subscription_can_wake_it(
    broker: Broker,
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 3)
    await broker.api.pause_stream(broker.name)
    assert (await broker.api.metadata(broker.name)).partitions[0].paused
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await broker.api.partition_metadata(broker.name)
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await offsets(broker.api.subscribe(broker.name), 1)
    broker.publisher.ack_timeout = 0.2
    with pytest.raises(AckTimeoutError):
        await broker.publisher.publish(broker.name, b"lost")
    assert await offsets(broker.api.subscribe(broker.name, resume=True), 3) == [0, 1, 2]
    assert await broker.newest() == 2


async def test_a_live_subscription_ends_with_that_error_when_the_partition_is_paused(
    broker: Broker,
) -> None:
    await broker.create()
    await broker.publisher.publish(broker.name, b"x")
    async with aclosing(broker.api.subscribe(broker.name)) as messages:
        assert (await anext(messages)).offset == 0
        await broker.api.pause_stream(broker.name)
        with pytest.raises(StreamPausedError):
            await anext(messages)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_that_is_exactly_once_wakes_a_paused_partition(
    broker: Broker, format: str
) -> None:
    await broker.create(once=True)
    store = store_of(broker, format)
    await broker.api.pause_stream(broker.name)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    await broker.api.pause_stream(broker.name)
    await save(store, 2, 3)
    await broker.api.pause_stream(broker.name)
    assert await read_relayed(broker, 3) == [1, 2, 3]


async def test_a_subscription_to_a_read_only_partition_says_so_after_its_last_message(
    broker: Broker,
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 3)
    async with aclosing(broker.api.subscribe(broker.name)) as messages:
        live = [(await anext(messages)).offset]
        await broker.api.set_readonly(broker.name)
        with pytest.raises(StreamReadonlyError, match="all its messages were read"):
            live += [message.offset async for message in messages]
    assert (await broker.api.partition_metadata(broker.name)).readonly
    for start, expected in (("earliest", [0, 1, 2]), (3, []), ("new", [])):
        found: list[int] = []
        with pytest.raises(StreamReadonlyError):
            await collect(broker.api.subscribe(broker.name, start), found)  # type: ignore[arg-type]
        assert found == expected
    with pytest.raises(StreamReadonlyError):
        await offsets(broker.api.subscribe(broker.name, until=7), 4)
    # An end that is reached is no error.
    assert [
        message.offset async for message in broker.api.subscribe(broker.name, until="latest")
    ] == [0, 1, 2]
    await broker.api.set_readonly(broker.name, False)
    await broker.publisher.publish(broker.name, b"y")
    assert await offsets(broker.api.subscribe(broker.name, "latest"), 1) == [3]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_reader_of_a_partition_that_becomes_read_only_does_not_end_as_if_all_were_well(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format)
    await save(store, 1, 1, 2)
    async with aclosing(RelayReader(broker.api, broker.name).batches()) as batches:
        assert len((await anext(batches)).events) == 2
        await broker.api.set_readonly(broker.name)
        with pytest.raises(StreamReadonlyError):
            await anext(batches)


async def test_a_relay_to_a_read_only_partition_ends_with_an_error_of_its_own(
    broker: Broker,
) -> None:
    store = await open_ledger(broker)
    await broker.api.set_readonly(broker.name)
    with pytest.raises(StreamReadonlyError, match="partition 0 is read-only"):
        await save(store, 1, 1)
    with pytest.raises(StreamReadonlyError):
        await store.load(KEY)
