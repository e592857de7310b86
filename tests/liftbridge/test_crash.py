"""A crash of the broker."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    Relay,
    reveal_newest,
)
from feedapi_client.model import FeedKey
from feedapi_client.stores.moving import adopt
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.ledgers import (
    FORMATS,
    KEY,
    look_often,
    offsets,
    open_ledger,
    read_relayed,
    save,
    store_of,
)
from tests.positions import counted, stand

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("impatient")]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_starts_after_a_crash_of_the_broker(broker: Broker, format: str) -> None:
    store = await open_ledger(broker, format)
    await save(store, 1, 1, 2)
    await broker.crash()
    restarted = store_of(broker, format)
    assert await restarted.load(KEY) == {0: counted("c1", 1)}
    await save(restarted, 2, 3)
    assert await read_relayed(broker, 3) == [1, 2, 3]


@pytest.mark.parametrize("format", FORMATS)
async def test_positions_that_a_crash_hides_are_adopted_by_the_name_of_their_feed(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format)
    await save(store, 1, 1, 2)
    await broker.crash()
    named = FeedKey.named("payments")
    restarted = store_of(broker, format)
    assert await adopt(restarted, KEY, named) == 1
    assert stand(await restarted.load(named)) == {0: ("c1", "open")}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_running_relay_survives_a_crash_of_the_broker(broker: Broker, format: str) -> None:
    store = await open_ledger(broker, format)
    for revision in range(1, 3):
        await broker.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, store, revision, revision)
            await anyio.lowlevel.checkpoint()
            await broker.start()
    await save(store, 3, 3)
    assert await read_relayed(broker, 3) == [1, 2, 3]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_save_that_a_crash_of_the_broker_interrupts_is_finished(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format)
    saved, crashes = 0, 3
    over = anyio.Event()

    async def save_on() -> None:
        nonlocal saved
        # One after the other without a pause: a crash interrupts one of them.
        while not over.is_set():
            await save(store, saved + 1, 2 * saved, 2 * saved + 1)
            saved += 1

    with anyio.fail_after(SAFETY_NET):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save_on)
            for _ in range(crashes):
                before = saved
                while saved < before + 5:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                await broker.crash()
            over.set()
    assert saved >= 5 * crashes
    assert await read_relayed(broker, 2 * saved) == list(range(2 * saved))
    position = counted(f"c{saved}", saved)
    assert await store_of(broker, format).load(KEY) == {0: position}


@pytest.mark.parametrize("start", [5, "new"])
async def test_a_subscription_above_the_high_watermark_gets_nothing_older(
    broker: Broker, start: Any
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 5)
    await broker.crash()
    await broker.api.partition_metadata(broker.name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await offsets(broker.api.subscribe(broker.name, start), 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        while not found:
            await broker.publisher.publish(broker.name, b"later")
    assert found[0] >= 5


async def test_what_was_stored_before_a_crash_is_hidden_until_something_is_published(
    broker: Broker,
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 5)
    await broker.crash()
    found = await broker.api.partition_metadata(broker.name)
    assert (found.high_watermark, found.newest_offset) == (-1, 4)
    with pytest.raises(BrokerUnavailableError, match="no message"):
        await offsets(broker.api.subscribe(broker.name, idle_timeout=0.5), 1)
    await broker.publisher.publish(broker.name, b"y")
    assert await offsets(broker.api.subscribe(broker.name), 6) == list(range(6))


async def test_a_reader_that_resumes_after_a_crash_gets_each_batch_once(broker: Broker) -> None:
    store = await open_ledger(broker)
    for n in range(1, 6):
        await save(store, n, n)
    start = await broker.newest() + 1
    await broker.crash()
    await broker.api.partition_metadata(broker.name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await read_relayed(broker, 1, start=start))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await save(store, 6, 6)
    assert found == [6]


async def test_a_live_subscription_survives_a_crash_of_the_broker(broker: Broker) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 5)
    found: list[int] = []
    async with aclosing(broker.api.subscribe(broker.name)) as messages:
        async for message in messages:
            found.append(message.offset)
            if len(found) == 5:
                await broker.crash()
                await broker.api.partition_metadata(broker.name)
                await broker.publisher.publish_many(broker.name, [b"y"] * 5)
            if len(found) == 10:
                break
    assert found == list(range(10))


# A broker that is killed between two writes gives an offset twice


async def test_a_message_whose_offset_was_given_to_one_that_was_never_acked_is_read(
    broker: Broker,
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"0", b"1", b"never acked"])
    await broker.tear()
    assert await broker.newest() == 1
    ack = await broker.publisher.publish(broker.name, b"2")
    assert ack is not None
    assert ack.offset == 2
    await broker.publisher.publish(broker.name, b"3")
    for start in (0, 2):
        found = [
            message.value async for message in broker.api.subscribe(broker.name, start, until=3)
        ]
        assert found[-2:] == [b"2", b"3"]
    assert [m.value async for m in broker.api.subscribe(broker.name, until=2)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("format", FORMATS)
async def test_of_two_batches_with_one_offset_the_one_that_was_acked_counts(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format)
    await save(store, 1, 1)
    await save(store, 2, 99)
    await broker.tear()
    restarted = store_of(broker, format)
    assert await restarted.load(KEY) == {0: counted("c1", 1)}
    await save(restarted, 2, 2, 3)
    await save(restarted, 3, 4)
    assert await read_relayed(broker, 4) == [1, 2, 3, 4]
    assert await read_relayed(broker, 4, until="latest") == [1, 2, 3, 4]
    assert await store_of(broker, format).load(KEY) == {0: counted("c3", 3)}


# An idle stream


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_of_an_idle_feed_shows_what_a_crash_hides(
    broker: Broker, format: str
) -> None:
    await broker.create(once=True)
    store = store_of(broker, format)
    assert not await store.keep(idle_seconds=0)  # it is not loaded
    await store.load(KEY)
    await save(store, 1, 1)
    assert not await store.keep(idle_seconds=0)
    await broker.crash()
    with anyio.fail_after(SAFETY_NET):
        # A broker that does not answer at once is asked again at the next turn.
        while not await store.keep(idle_seconds=0):  # noqa: ASYNC110
            await anyio.sleep(0.1)
    assert await read_relayed(broker, 1) == [1]
    assert not await store.keep(idle_seconds=0)
    await save(store, 2, 2)
    assert await read_relayed(broker, 2) == [1, 2]


async def test_a_running_relay_of_an_idle_feed_does_that_by_itself(
    broker: Broker, feed: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    await broker.create(once=True)
    store = store_of(broker, "events")
    async with FeedConsumer(feed.url or "", store=store) as consumer:
        running = Relay(consumer, broker.publisher)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            with anyio.fail_after(SAFETY_NET):
                while running.progress.events < 20:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await broker.crash()
                assert await read_relayed(broker, 20) == list(range(20))
            consumer.stop()


async def test_a_stream_without_a_relay_is_shown_on_demand(broker: Broker) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 3)
    assert not await reveal_newest(broker.publisher, broker.api, broker.name)
    await broker.crash()
    assert await reveal_newest(broker.publisher, broker.api, broker.name)
    assert await offsets(broker.api.subscribe(broker.name), 3) == [0, 1, 2]
